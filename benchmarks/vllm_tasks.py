"""Measure the cost of tasks in vLLM, on a random Llama: without the plugin, with 10 and with 1,000 tasks.

Three engines run in separate processes and alternate on the same list of requests, so other load on the
machine affects all of them. Prints medians of CPU seconds, and of ratios of adjacent runs. On a GPU, use
wall-clock seconds (``--wall``).

    python benchmarks/vllm_tasks.py [--rounds 7] [--wall]
    python benchmarks/vllm_tasks.py --http [--rounds 25]

With ``--http``, it compares servers over 16 connections: one without the plugin, and one with four tasks,
with and without a task in the request. It counts the CPU seconds of the server's processes only.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ENGINES = {"plain": 0, "ten": 10, "thousand": 1000}
REQUESTS, LAYERS, WIDTH = 48, 8, 576
CONNECTIONS, TASKS, EACH = 16, 4, 4


def make_model(folder: Path) -> None:
    """Save a random Llama with the width of SmolLM2-135M, fewer layers, and the bundled tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from i2cl.models.loading import resolve_name

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=694,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_name("reference")).save_pretrained(folder)


def serve(model: str, tasks: int) -> None:
    """Run an engine that processes the requests for every line of stdin, and prints the seconds."""
    import torch
    from vllm import LLM, SamplingParams

    from i2cl.interfaces.vllm.engine import LOAD
    from i2cl.interfaces.vllm.frontend import TASKS, ServedTask
    from i2cl.interfaces.vllm.worker import PackedEdit

    options = {"i2cl": {"slots": max(2, tasks)}} if tasks else {}
    llm = LLM(
        model,
        dtype="auto" if torch.cuda.is_available() else "float32",
        max_model_len=256,
        max_num_seqs=64,
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),
        additional_config=options,
    )
    names = [f"task-{number}" for number in range(tasks)]
    draw = torch.Generator().manual_seed(0)
    for name in names:
        scales = 1 + 0.1 * torch.randn(LAYERS, 2, generator=draw)
        edit = PackedEdit.of(0.1 * torch.randn(LAYERS, 2, WIDTH, generator=draw), scales)
        llm.collective_rpc(LOAD, args=(edit.rows, edit.scales))
        TASKS.add(ServedTask(name, edit, name, None, None))  # an edit without label words
    chosen = random.Random(0)
    prompts = [{"prompt_token_ids": drawn(chosen)} for _ in range(REQUESTS)]
    asked = [
        SamplingParams(
            max_tokens=8,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={"i2cl": chosen.choice(names)} if names else None,
        )
        for _ in prompts
    ]
    print("ready", flush=True)
    for _ in sys.stdin:
        before = time.process_time(), time.perf_counter()
        llm.generate(prompts, asked, use_tqdm=False)
        print(json.dumps([time.process_time() - before[0], time.perf_counter() - before[1]]), flush=True)


def drawn(chosen: random.Random) -> list[int]:
    """Draw a random prompt."""
    return chosen.choices(range(1, 690), k=chosen.randint(20, 80))


def environment(*, plugin: bool) -> dict[str, str]:
    """Return the environment of an engine or a server."""
    return os.environ | {
        "VLLM_PLUGINS": "i2cl" if plugin else "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }


def start(model: Path, name: str) -> Any:
    """Start one of the engines without its log."""
    env = environment(plugin=bool(ENGINES[name])) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, __file__, "--serve", str(model), "--tasks", str(ENGINES[name])]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def message(engine: Any, word: str) -> str:
    """Return the next line of an engine that contains a word, and skip vLLM's own lines."""
    return next(line for line in engine.stdout if word in line)


def turn(engine: Any) -> list[float]:
    """Let an engine run the requests once."""
    engine.stdin.write("\n")
    engine.stdin.flush()
    outcome: list[float] = json.loads(message(engine, "["))
    return outcome


def make_tasks(model: Path, folder: Path) -> None:
    """Save random injections."""
    import torch

    from i2cl import Decoder, Injection
    from i2cl.tasks import load_task

    decoder = Decoder.from_pretrained(str(model), dtype="float32", device="cpu")
    draw, names = torch.Generator().manual_seed(0), [f"task-{number}" for number in range(TASKS)]
    task = load_task("mood-colour-1")
    for name in names:
        values = 0.1 * torch.randn(decoder.layers, 2, decoder.d_model, generator=draw)
        pairs = 1 + 0.1 * torch.randn(decoder.layers, 2, 2, generator=draw)
        Injection(values, pairs, task, decoder.base, demonstrations=4).save_pretrained(folder / name)


class Server:
    """vLLM's server in separate processes."""

    def __init__(self, model: Path, tasks: Path | None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        env = environment(plugin=tasks is not None)
        if tasks is not None:
            env["I2CL_VLLM_TASKS"] = str(tasks)
        options = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 64"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [*options.split(), "--served-model-name", "model", "--no-enable-prefix-caching"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def wait(self) -> None:
        """Wait until it answers."""
        for _ in range(600):
            try:
                connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(1)
        raise SystemExit("a server did not start")

    def spent(self) -> float:
        """Return the CPU seconds of all its processes."""
        import psutil

        whole = psutil.Process(self.process.pid)
        times = [one.cpu_times() for one in (whole, *whole.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[float]:
        """Send requests sequentially over one connection, and return the seconds of each."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        taken = []
        for body in bodies:
            before = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise SystemExit(content.decode())
            taken.append(time.perf_counter() - before)
        connection.close()
        return taken

    def turn(self, tasks: Sequence[str | None]) -> float:
        """Run one round over all connections, which alternate between tasks, and return the CPU seconds."""
        chosen = random.Random(0)
        sent: list[list[Mapping[str, Any]]] = []
        for number in range(CONNECTIONS):
            name = tasks[number % len(tasks)]
            more = {} if name is None else {"vllm_xargs": {"i2cl": name}}
            options = {"model": "model", "max_tokens": 8, "temperature": 0, "ignore_eos": True} | more
            sent.append([options | {"prompt": drawn(chosen)} for _ in range(EACH)])
        before = self.spent()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(self.ask, sent))
        return self.spent() - before


def over_http(rounds: int) -> dict[str, list[float]]:
    """Time every round: without the plugin, and with the plugin without and with tasks."""
    with tempfile.TemporaryDirectory() as scratch:
        model, tasks = Path(scratch) / "model", Path(scratch) / "tasks"
        make_model(model)
        make_tasks(model, tasks)
        plain, plugin = Server(model, None), Server(model, tasks)
        names: list[str | None] = [f"task-{number}" for number in range(TASKS)]
        asked: dict[str, tuple[Server, list[str | None]]] = {
            "plain": (plain, [None]),
            "none": (plugin, [None]),
            "four": (plugin, names),
        }
        taken: dict[str, list[float]] = {name: [] for name in asked}
        try:
            for server in (plain, plugin):
                server.wait()
            for number in range(rounds + 2):  # the first two warm up
                for name, (server, of) in asked.items():
                    outcome = server.turn(of)
                    taken[name] += [outcome] if number > 1 else []
        finally:
            for server in (plain, plugin):
                server.process.terminate()
                server.process.wait(60)
    return taken


def in_engines(rounds: int, *, wall: bool) -> dict[str, list[float]]:
    """Time every round of the three engines."""
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        engines = {name: start(Path(scratch), name) for name in ENGINES}
        try:
            for engine in engines.values():
                message(engine, "ready")
                turn(engine)
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(rounds):
                for name, engine in engines.items():
                    taken[name].append(turn(engine)[wall])
        finally:
            for engine in engines.values():
                engine.kill()
    return taken


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--serve")
    parser.add_argument("--tasks", type=int, default=0)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.tasks)
        return
    taken = over_http(given.rounds) if given.http else in_engines(given.rounds, wall=given.wall)
    for name, values in taken.items():
        print(f"{name:9} {statistics.median(values):.2f} s, of {min(values):.2f} to {max(values):.2f}")
    first, second, third = taken
    for one, other in ((second, first), (third, second), (third, first)):
        ratios = [mine / theirs for mine, theirs in zip(taken[one], taken[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(ratios):.3f} (median of adjacent runs)")


if __name__ == "__main__":
    main()
