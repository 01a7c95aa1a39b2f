"""What tasks cost in vLLM: plain against the plugin, and ten tasks against a thousand, on a random Llama.

Three engines are up at once, each in its own process, and take turns with one list of requests, so that
whatever else the machine does meets all of them. Printed are medians of processor seconds, and of
neighbouring runs' ratios; on a GPU wall-clock seconds are what counts (``--wall``).

    python benchmarks/vllm_tasks.py [--rounds 7] [--wall]
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = {"plain": 0, "ten": 10, "thousand": 1000}
REQUESTS, LAYERS, WIDTH = 48, 8, 576


def make_model(folder: Path) -> None:
    """A Llama of SmolLM2-135M's width and fewer layers, with the bundled tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from i2cl.models.loading import located

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
    AutoTokenizer.from_pretrained(located("reference")).save_pretrained(folder)


def serve(model: str, tasks: int) -> None:
    """An engine that runs the requests whenever a line comes in, and prints what that took."""
    import torch
    from vllm import LLM, SamplingParams

    from i2cl.faces.vllm.engine import LOAD
    from i2cl.faces.vllm.slots import Packed
    from i2cl.faces.vllm.tasks import TASKS, Served

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
        packed = Packed.of(0.1 * torch.randn(LAYERS, 2, WIDTH, generator=draw), scales)
        llm.collective_rpc(LOAD, args=(packed.rows, packed.scales))
        TASKS.add(Served(name, packed, None, None))  # an edit without label words
    chosen = random.Random(0)
    prompts = [
        {"prompt_token_ids": chosen.choices(range(1, 690), k=chosen.randint(20, 80))} for _ in range(REQUESTS)
    ]
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


def start(model: Path, name: str) -> Any:
    """One of the engines, without its log."""
    env = os.environ | {
        "VLLM_PLUGINS": "i2cl" if ENGINES[name] else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, "--serve", str(model), "--tasks", str(ENGINES[name])]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def told(engine: Any, word: str) -> str:
    """The next line of an engine that holds a word; vLLM prints lines of its own."""
    return next(line for line in engine.stdout if word in line)


def turn(engine: Any) -> list[float]:
    """Let an engine run the requests once."""
    engine.stdin.write("\n")
    engine.stdin.flush()
    found: list[float] = json.loads(told(engine, "["))
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--serve")
    parser.add_argument("--tasks", type=int, default=0)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.tasks)
        return
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch))
        engines = {name: start(Path(scratch), name) for name in ENGINES}
        try:
            for engine in engines.values():
                told(engine, "ready")
                turn(engine)
            taken: dict[str, list[float]] = {name: [] for name in engines}
            for _ in range(given.rounds):
                for name, engine in engines.items():
                    taken[name].append(turn(engine)[given.wall])
        finally:
            for engine in engines.values():
                engine.kill()
    for name, values in taken.items():
        print(f"{name:9} {statistics.median(values):.2f} s, of {min(values):.2f} to {max(values):.2f}")
    for one, other in (("ten", "plain"), ("thousand", "ten")):
        ratios = [mine / theirs for mine, theirs in zip(taken[one], taken[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(ratios):.3f} of neighbouring runs")


if __name__ == "__main__":
    main()
