"""The plugin in vLLM itself, on a CPU: what it answers is what `Injection` answers.

Each test starts engines in processes of their own, a minute each; all are skipped without vLLM.
"""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from i2cl.core.context import ContextVector, ExtractConfig
from i2cl.core.injection import Injection
from i2cl.models.decoder import Decoder
from i2cl.models.loading import located
from i2cl.models.scoring import labelled_batch
from i2cl.tasks import load_task

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="takes vLLM: docs/guide/vllm.md")

CHILD = Path(__file__).with_name("child.py")
EAGER = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "block_size": 32,
    "num_gpu_blocks_override": 40,
}
WORDS = tuple(
    [
        "the",
        "letter",
        "arrived",
        "on",
        "a",
        "quiet",
        "morning",
        "nobody",
        "had",
        "expected",
        "river",
        "to",
        "rise",
        "so",
        "early",
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama whose heads are as wide as vLLM's kernels for CPUs want them, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=694,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(located("reference")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder.from_pretrained(str(model), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def artefacts(decoder, tmp_path_factory):
    """Fifty tasks that change what the model says by nats, saved."""
    draw, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("tasks")
    names = ("mood-colour-1", "place-colour-2", "job-letter-2")
    found = {}
    for number in range(50):
        values = torch.randn(decoder.layers, 2, decoder.d_model, generator=draw)
        pairs = torch.randn(decoder.layers, 2, 2, generator=draw) * 0.3 + torch.tensor([0.0, 1.0])
        injection = Injection(
            ContextVector(values, ExtractConfig(), 4, decoder.base),
            pairs,
            load_task(names[number % 3]),
            decoder.base,
        )
        injection.save_pretrained(folder / f"t{number}")
        found[f"t{number}"] = injection
    return folder, found


def run(tmp_path, model, steps, tasks=None, *, options=None, env=None, succeeds=True, **more):
    """What an engine in another process answers; what it printed, if it is to fail."""
    job = {
        "model": str(model),
        "options": EAGER | (options or {}),
        "tasks": tasks or {},
        "steps": steps,
    } | more
    source, result = tmp_path / "job.json", tmp_path / "result.json"
    result.unlink(missing_ok=True)
    source.write_text(json.dumps(job), encoding="utf-8")
    environment = os.environ | {
        "VLLM_PLUGINS": "i2cl",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), str(source), str(result)],
        env=environment | (env or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    if not succeeds:
        assert done.returncode != 0
        return done.stdout + done.stderr
    assert result.is_file(), done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(result.read_text(encoding="utf-8"))


def texts(count, seed=0, most=60):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(2, most))) for _ in range(count)]


def apart(found, decoder, injections, asked, tasks):
    """Largest difference of what was found to `Injection.scores`, in nats."""
    worst = 0.0
    for name in set(tasks):
        rows = [row for row, task in enumerate(tasks) if task == name]
        wanted = injections[name].scores(decoder, [asked[row] for row in rows])
        worst = max(worst, float((torch.tensor([found[row] for row in rows]) - wanted).abs().max()))
    return worst


def followed(decoder, injection, prompt, ids):
    """Log-probability of each of some tokens behind a prompt, injected or not."""
    batch = labelled_batch([tuple(prompt)], [tuple(ids)], decoder.device)
    at = batch.last[:, None] + torch.arange(len(ids))
    with torch.no_grad():
        logits = decoder.forward(batch, at=at, edit=None if injection is None else injection.edit())
    return logits[0].float().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


def test_fifty_tasks_share_batches_with_aborts_and_preemption(
    tmp_path, model, decoder, artefacts, record_property
):
    folder, injections = artefacts
    asked = texts(60)
    tasks = [f"t{number % 50}" for number in range(60)]
    random.Random(1).shuffle(tasks)
    steps = [["classify", asked, tasks], ["crowd", 1, 80], ["crowd", 2, 80]]
    paths = {name: str(folder / name) for name in injections}
    got = run(tmp_path, model, steps, paths)
    labels, *crowds = got["answers"]
    worst = [apart(labels, decoder, injections, asked, tasks)]
    for one in crowds[0] + crowds[1]:
        injection = injections.get(one["task"])
        wanted = followed(decoder, injection, one["prompt"], one["ids"])
        worst.append(float((torch.tensor(one["logprobs"]) - wanted).abs().max()))
    print(f"\nworst {max(worst):.2e} of {len(worst)} and 60 texts; {got['counted']}")
    assert len(worst) > 100
    assert max(worst) < 1e-4
    assert got["counted"]["vllm:num_preemptions"] > 0


def cached(tmp_path, model, decoder, artefacts, **more):
    folder, injections = artefacts
    prompt = [1 + 7 * number % 600 for number in range(130)]  # four blocks and a little
    order = ["t0", None, "t1", "t0", None]
    steps = [["ask", prompt, task, 1] for task in order]
    got = run(tmp_path, model, steps, {name: str(folder / name) for name in ("t0", "t1")}, **more)
    wrong = []
    for task, one in zip(order, got["answers"], strict=True):
        wanted = followed(decoder, injections.get(task), prompt, one["ids"])
        wrong.append(float((torch.tensor(one["logprobs"]) - wanted).abs().max()))
    return wrong, [one["cached"] for one in got["answers"]]


def test_the_prefix_cache_keeps_tasks_apart(tmp_path, model, decoder, artefacts):
    wrong, hits = cached(tmp_path, model, decoder, artefacts)
    print(f"\nworst {max(wrong):.2e}, cached tokens {hits}")
    assert max(wrong) < 1e-4
    assert hits == [0, 0, 0, 128, 128]


def test_without_the_salt_they_are_mixed_up(tmp_path, model, decoder, artefacts):
    wrong, hits = cached(tmp_path, model, decoder, artefacts, unsalted=True)
    print(f"\nnats off {[round(one, 2) for one in wrong]}, cached tokens {hits}")
    assert hits[1] == 128
    assert max(wrong) > 0.1


def test_tasks_come_go_and_are_replaced(tmp_path, model, decoder, artefacts):
    folder, injections = artefacts
    asked = texts(2)
    one = {name: injections[name].scores(decoder, asked) for name in ("t0", "t3", "t4")}
    steps = [
        ["classify", asked, ["a", "a"]],
        ["load", "a", str(folder / "t3")],
        ["classify", asked, ["a", "a"]],
        ["load", "b", str(folder / "t4")],
        ["classify", asked, ["b", "a"]],
        ["load", "c", str(folder / "t5")],
        ["drop", "b"],
        ["ask", [5, 6, 7], "b", 1],
        ["load", "c", str(folder / "t5")],
        ["classify", asked, ["a", "a"]],
    ]
    more = {"options": {"additional_config": {"i2cl": {"slots": 2}}}}
    answers = run(tmp_path, model, steps, {"a": str(folder / "t0")}, **more)["answers"]
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(torch.tensor(answers[0]), one["t0"], **close)
    torch.testing.assert_close(torch.tensor(answers[2]), one["t3"], **close)
    torch.testing.assert_close(torch.tensor(answers[4]), torch.stack([one["t4"][0], one["t3"][1]]), **close)
    assert "all 2 slots" in answers[5]["error"]
    assert "no task 'b' is loaded" in answers[7]["error"]
    assert answers[8] is None
    torch.testing.assert_close(torch.tensor(answers[9]), one["t3"], **close)
