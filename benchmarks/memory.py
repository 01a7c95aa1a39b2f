"""Estimate the memory and the passes of a fit with anchored calibration, without running it.

    python benchmarks/memory.py --layers 32 --width 4096 --keys 1024 --inner 14336 --vocab 128256 --rows 40
    python benchmarks/memory.py --check        compares estimate and measurement on three small models

Assumes Llama blocks: gated MLPs and fused attention. The saved activations of a block are the residual stream
before both norms; queries, keys, values and attention output; and three values per hidden unit of the MLP.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from i2cl import Decoder, Example, anchor, load_task
from i2cl.core.anchored import AnchoredConfig
from i2cl.core.objective import SLICE
from i2cl.core.plan import MAX_SCALE_EXAMPLES, SOLVER_MATRICES, FitPlan, FitSize, plan_fit
from i2cl.models.memory import peak_memory

GB = 1e9
RESIDENT, SCRATCH = 1.15, 0.09 * GB
"""Overhead of the CPU allocator: factor on the live tensors, and constant part; measured with `--check`."""


@dataclass(frozen=True)
class Shape:
    """A Llama-like decoder, and a fit on it.

    Attributes:
        layers: number of blocks.
        width: hidden size.
        keys: total width of the keys (and of the values) of a layer.
        inner: hidden size of the MLP.
        vocab: vocabulary size.
        rows: number of demonstrations.
        labels: number of labels.
        tokens: tokens per query.
        budget: padded tokens per batch.
        size: bytes per parameter.
    """

    layers: int
    width: int
    keys: int
    inner: int
    vocab: int
    rows: int
    labels: int
    tokens: int
    budget: int
    size: int

    @property
    def columns(self) -> int:
        """Kernel columns per demonstration with first-token scoring."""
        return self.labels - 1

    def plan(self, steps: int = 4) -> FitPlan:
        """The solver and the number of passes of the fit, on a machine with enough memory."""
        return plan_fit(FitSize(self.rows, self.labels, 2 * self.layers * self.width), math.inf, steps=steps)

    @property
    def uses_adamw(self) -> bool:
        """Whether the Gauss-Newton kernel would be too large."""
        return self.plan().solver == "adamw"

    def weights(self) -> float:
        """Bytes of the model, with an untied LM head."""
        block = 2 * self.width * (self.width + self.keys) + 3 * self.width * self.inner
        return self.size * (self.layers * block + 2 * self.vocab * self.width)

    def activations(self) -> float:
        """Bytes of the saved activations of the largest batch."""
        batch = min(self.rows, max(1, self.budget // self.tokens)) * self.tokens
        token = 6 * self.width + 3 * self.inner
        return self.size * self.layers * batch * token

    def gradients(self) -> float:
        """Bytes of the Jacobian on the host, and of a batch's vectors and gradients."""
        numbers = 2 * self.layers * self.width
        batch = min(self.rows, max(1, self.budget // self.tokens))
        kept = min(self.rows, MAX_SCALE_EXAMPLES) if self.uses_adamw else self.rows * self.columns
        return 4 * numbers * (kept + 3 * batch)

    def solver(self) -> float:
        """Bytes of a step's kernel and its solution."""
        if self.uses_adamw:
            return 0.0
        kernel = self.rows * self.columns
        return 8 * (SOLVER_MATRICES * kernel**2 + kernel * min(SLICE, 2 * self.layers * self.width))


def measured(shape: Shape, shots: int) -> tuple[float, float]:
    """Return the estimated and the measured bytes besides the weights, on a random model."""
    torch.manual_seed(0)
    tokenizer = Decoder.from_pretrained("reference").tokenizer
    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        vocab_size=len(tokenizer),
        num_attention_heads=8,
        num_key_value_heads=shape.keys * 8 // shape.width,
        max_position_embeddings=1024,
    )
    decoder = Decoder(LlamaForCausalLM(config).eval(), tokenizer, token_budget=shape.budget)
    base_task = load_task("mood-colour-1")  # its labels differ in their first token
    task = replace(base_task, labels=base_task.labels[: shape.labels], train=(), test=())
    shown = [Example("a " * shape.tokens + str(row), row % shape.labels) for row in range(shots)]
    lengths = [len(ids) for ids in decoder.encoder([task.template.query(one.text) for one in shown])]
    exact = replace(shape, rows=shots, tokens=max(lengths))
    anchor(decoder, task, shown[:1], AnchoredConfig(steps=1, say_label=False))  # warm-up
    with peak_memory(decoder.device) as peak:
        anchor(decoder, task, shown, AnchoredConfig(steps=2, say_label=False))
    tensors = exact.activations() + exact.gradients() + exact.solver()
    return SCRATCH + RESIDENT * tensors, peak.added


def main() -> None:
    """Print the estimates."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("layers", 30),
        ("width", 576),
        ("keys", 192),
        ("inner", 1536),
        ("vocab", 49152),
        ("rows", 20),
        ("labels", 4),
        ("tokens", 60),
        ("budget", 1024),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--check", action="store_true")
    given = vars(parser.parse_args())
    size = torch.finfo(getattr(torch, given.pop("dtype"))).bits // 8
    if given.pop("check"):
        table = Table("model", "rows x columns", "predicted", "measured", "ratio")
        # freed memory stays with a process, so each model runs in a new one
        alone = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
        for layers, width, inner, rows in ((4, 512, 2048, 48), (8, 768, 2048, 48), (12, 384, 1024, 96)):
            shape = Shape(layers, width, width // 2, inner, 600, rows, 3, 60, 1024, 4)
            message, seen = alone.submit(measured, shape, rows).result()
            name = f"{layers} x {width}, inner {inner}"
            cells = (name, f"{rows} x {shape.columns}", f"{message / GB:.2f} GB", f"{seen / GB:.2f} GB")
            table.add_row(*cells, f"{message / seen:.2f}")
    else:
        shape = Shape(**given, size=size)
        table = Table("what", "how much")
        table.add_row("weights", f"{shape.weights() / GB:.1f} GB")
        table.add_row("activations of the largest batch", f"{shape.activations() / GB:.2f} GB")
        table.add_row(
            "derivatives" + ("" if shape.uses_adamw else f", {shape.rows} x {shape.columns} columns"),
            f"{shape.gradients() / GB:.2f} GB",
        )
        table.add_row("kernel and solver", f"{shape.solver() / GB:.2f} GB")
        table.add_row("passes over the demonstrations", f"{shape.plan().passes:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
