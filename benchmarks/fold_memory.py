"""Measure the peak memory of `i2cl export` on a random checkpoint with a billion parameters.

Usage: python benchmarks/fold_memory.py

Writes a bfloat16 Llama shard by shard into a temporary folder (about 2.5 GB, and as much again for the
export), exports a random injection in a child process with and without golden values, and prints the child's
peak resident memory (https://man7.org/linux/man-pages/man2/getrusage.2.html).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from i2cl import ContextVector, ExtractConfig, Injection, Task
from i2cl.export.folding import skeleton
from i2cl.models.checkpoint import INDEX
from i2cl.models.fingerprint import ModelIdentity
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.tasks import Template
from workload import SHAPES

SHAPE = SHAPES["llama-3.2-1b"]
MAX_SHARD_BYTES = 600_000_000  # the largest tensor, the embedding, has 525 million bytes


def write_base(folder: Path) -> int:
    """Write a random checkpoint with one shard in memory at a time, and return its size in bytes."""
    model = skeleton(SHAPE)
    tied = model.all_tied_weights_keys
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name not in tied}
    files: list[dict[str, torch.Size]] = [{}]
    for name, shape in shapes.items():
        if 2 * sum(other.numel() for other in [*files[-1].values(), shape]) > MAX_SHARD_BYTES:
            files.append({})
        files[-1][name] = shape
    generator = torch.Generator().manual_seed(0)
    homes = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(
            {name: _random(shape, generator) for name, shape in names.items()},
            folder / file,
            metadata={"format": "pt"},
        )
        homes |= dict.fromkeys(names, file)
    size = 2 * sum(shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": size}, "weight_map": homes}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    SHAPE.save_pretrained(folder)
    load_model_and_tokenizer("reference")[1].save_pretrained(folder)
    return size


def _random(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


def write_injection(folder: Path, base: Path) -> None:
    """Write a random injection for the random model."""
    generator = torch.Generator().manual_seed(1)
    layers, width = SHAPE.num_hidden_layers, SHAPE.hidden_size
    values = torch.randn(layers, 2, width, generator=generator)
    coefficients = torch.randn(layers, 2, 2, generator=generator) * 0.05 + torch.tensor([0.1, 1.0])
    task = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
    Injection(
        ContextVector(values, ExtractConfig(), demonstrations=10),
        coefficients,
        task,
        ModelIdentity(
            str(base), None, "llama", layers, width, weights="random", tokenizer="random", config={}
        ),
    ).save_pretrained(folder)


def peak_of_export(artefact: Path, output: Path, *options: str) -> int:
    """Export in a child process, and return its peak resident memory in bytes."""
    code = "from i2cl.interfaces.cli import main; main()"
    command = [sys.executable, "-c", code, "export", str(artefact), str(output), "--force"]
    child = subprocess.Popen([*command, "--device", "cpu", *options], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(child.returncode)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Run the measurements and print them."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--shards", nargs="+", default=["5GB", "500MB"], help="sizes of exported files")
    table = Table("export", "max shard", "peak GB", "peak / checkpoint")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "base").mkdir()
        size = write_base(folder / "base")
        write_injection(folder / "artefact", folder / "base")
        for shard in arguments.parse_args().shards:
            for option in ("--no-golden", "--golden"):
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    sized = ("--max-shard-size", shard)
                    peak = peak_of_export(folder / "artefact", Path(output) / "out", option, *sized)
                table.add_row(option, shard, f"{peak / 1e9:.2f}", f"{peak / size:.2f}")
    table.title = f"fold_memory: checkpoint of {size / 1e9:.2f} GB, {size // 2 / 1e9:.2f} billion parameters"
    Console().print(table)


if __name__ == "__main__":
    main()
