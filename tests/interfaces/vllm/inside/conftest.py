"""Engines of vLLM in separate processes, and a server; all tests here are skipped without vLLM."""

import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from i2cl.models.decoder import Decoder
from i2cl.models.loading import resolve_name

from .engines import ADMIN, CHILD, EAGER, ENVIRONMENT, USER, random_injection


@pytest.fixture(scope="module", autouse=True)
def vllm_is_there():
    if find_spec("vllm") is None:
        pytest.skip("takes vLLM: docs/guide/vllm.md")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama whose heads are as wide as vLLM's kernels for CPUs want them, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    sizes = {"vocab_size": 694, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    more = {"max_position_embeddings": 1024, "initializer_range": 0.15, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **more, bos_token_id=0, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_name("reference")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder.from_pretrained(str(model), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def artefacts(decoder, tmp_path_factory):
    """Fifty tasks that change what the model says by nats, saved."""
    draw, folder = torch.Generator().manual_seed(0), tmp_path_factory.mktemp("tasks")
    names = ("mood-colour-1", "place-colour-2", "job-letter-2")
    outcome = {}
    for number in range(50):
        injection = random_injection(decoder, draw, names[number % 3])
        injection.save_pretrained(folder / f"t{number}")
        outcome[f"t{number}"] = injection
    return folder, outcome


@pytest.fixture(scope="module")
def engines():
    """For each model runner, a process that forks one for every engine, and has imported what they need."""
    started = {}

    def engine(runner):
        if runner not in started:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            started[runner] = subprocess.Popen([sys.executable, CHILD, runner], env=ENVIRONMENT, **pipes)
        return started[runner]

    yield engine
    for process in started.values():
        process.stdin.close()
        process.wait()
        process.stdout.close()


@pytest.fixture
def run(engines, tmp_path, model):
    """What an engine answers; where its start is to fail, what it prints."""

    def run(steps, tasks=None, *, where=model, options=None, env=None, succeeds=True, runner="V1", **more):
        result, log = tmp_path / "result.json", tmp_path / "log"
        result.unlink(missing_ok=True)
        job = {"model": str(where), "options": EAGER | (options or {}), "tasks": tasks or {}, "steps": steps}
        job |= {"result": str(result), "log": str(log), "env": env or {}}
        engine = engines(runner)
        engine.stdin.write(json.dumps(job | more) + "\n")
        engine.stdin.flush()
        while not (status := engine.stdout.readline().strip()).lstrip("-").isdigit():
            assert engine.poll() is None
        message = log.read_text(encoding="utf-8")
        assert (status == "0") == succeeds, message[-6000:]
        if not succeeds:
            return message
        outcome = json.loads(result.read_text(encoding="utf-8"))
        assert outcome["v2"] in {None, runner == "V2"}
        return outcome

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory, model, artefacts):
    """URL of a server, in three separate processes, with the tasks t0 and t1."""
    folder, _ = artefacts
    tasks = {name: folder / name for name in ("t0", "t1")}
    with serving(tmp_path_factory.mktemp("server"), model, tasks) as url:
        yield url


@contextmanager
def serving(tmp_path, model, tasks):
    """Run vLLM's server with task folders by name, and yield its URL."""
    (tmp_path / "tasks").mkdir()
    for name, folder in tasks.items():
        (tmp_path / "tasks" / name).symlink_to(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"I2CL_VLLM_TASKS": str(tmp_path / "tasks"), "I2CL_VLLM_ADMIN_KEY": ADMIN}
    own |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}  # which has /sleep
    options = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 16 --max-logprobs 694"
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [*options.split(), "--port", str(port), "--host", "127.0.0.1", "--api-key", USER, ADMIN]
        process = subprocess.Popen(command, env=ENVIRONMENT | own, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                urlopen(f"{url}/health", timeout=5).close()
                break
            except (URLError, OSError):
                assert process.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)
