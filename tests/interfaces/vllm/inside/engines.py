"""What tests in vLLM itself share: where engines start, texts, and how far answers are max_difference."""

import json
import os
import random
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

import fitting
from i2cl.models.scoring import labelled_batch
from i2cl.tasks import load_task

CHILD = Path(__file__).with_name("child.py")
EAGER = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16}
EAGER |= {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 40}
ENVIRONMENT = os.environ | {"VLLM_PLUGINS": "i2cl", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ENVIRONMENT |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
RUNNERS = pytest.mark.parametrize("runner", ["V1", "V2"])
WORDS = ("the", "letter", "arrived", "on", "a", "quiet", "morning", "nobody", "had", "expected", "rise")

USER, ADMIN = "user-key", "admin-key"


def random_injection(decoder, draw, name):
    return fitting.random_injection(decoder, load_task(name), draw, shown=4, factor=0.3, around=(0.0, 1.0))


def texts(count, seed=0, most=60):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, most))) for _ in range(count)]


def max_difference(result, decoder, injections, queries, tasks):
    """Largest difference of what was found to `Injection.log_probs`, in nats."""
    worst = 0.0
    for name in set(tasks):
        rows = [row for row, task in enumerate(tasks) if task == name]
        wanted = injections[name].log_probs(decoder, [queries[row] for row in rows])
        worst = max(worst, float((torch.tensor([result[row] for row in rows]) - wanted).abs().max()))
    return worst


def followed(decoder, injection, prompt, ids):
    """Log-probability of each of some tokens behind a prompt, injected or not."""
    batch = labelled_batch([tuple(prompt)], [tuple(ids)], decoder.device)
    at = batch.last[:, None] + torch.arange(len(ids))
    with torch.no_grad():
        logits = decoder.forward(batch, at=at, edit=None if injection is None else injection.edit())
    return logits[0].float().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def off(decoder, injection, prompt, answer):
    """Largest difference of an answer's log-probabilities to those of the injected model."""
    wanted = followed(decoder, injection, prompt, answer["ids"])
    return float((torch.tensor(answer["logprobs"]) - wanted).abs().max())


def nats(result, injection, decoder, prompts):
    """Difference of each prompt's first new token's log-probability to the injected model's."""
    first = [{name: one[name][:1] for name in ("ids", "logprobs")} for one in result]
    return [off(decoder, injection, *pair) for pair in zip(prompts, first, strict=True)]


def call(url, body=None, key=USER, method=None):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urlopen(Request(url, data, headers, method=method), timeout=120) as reply:
            return reply.status, json.load(reply), reply.headers
    except HTTPError as error:
        return error.code, error.read().decode(), {}
