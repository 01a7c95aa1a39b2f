"""Estimated against measured time of fits of different shapes.

    python benchmarks/estimates.py smollm2 2x10x1000 10x50x25 24x24x60 5x2000x10

A shape is LABELSxROWSxTOKENS, with random words as texts. ``--words`` makes labels share their first token.
Both are wall-clock seconds, so run it on an idle machine. The ratio is measured over estimated time; a fit
that converges early is faster than estimated.
"""

import argparse
import json
import math
import time
import warnings
from random import Random
from typing import Any

from i2cl import Decoder, Example, Task, Template
from i2cl.experiments.draw import Draw
from i2cl.methods import make_methods
from i2cl.methods.anchored import Anchored

WORDS = ("river", "stone", "cloud", "lamp", "bread", "train", "paper", "glass", "horse", "winter", "garden")
COLOURS = ("red", "blue", "green", "brown", "white", "black", "silver", "golden", "orange", "purple", "grey")


def make_task(labels: int, rows: int, tokens: int, *, words: bool) -> Task:
    """Make a task whose queries have about the given number of tokens."""
    picker = Random(0)
    names = [COLOURS[n % 11] + (f" {WORDS[n // 11]}" if n >= 11 else "") for n in range(labels)]
    if words:
        names = [f"colour {name}" for name in names]
    texts = [" ".join(picker.choices(WORDS, k=max(1, tokens - 6))) for _ in range(rows)]
    examples = tuple(Example(f"{text} {row}", row % labels) for row, text in enumerate(texts))
    return Task("shape", tuple(names), Template("{text}\nLabel: {label}"), train=examples)


def main() -> None:
    """Measure and print JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("shapes", nargs="+", help="LABELSxROWSxTOKENS")
    parser.add_argument("--words", action="store_true", help="labels that share their first token")
    parser.add_argument("--set", dest="options", action="append", default=[], help="NAME=VALUE of anchored")
    parser.add_argument("--dtype", help="such as bfloat16; default: float32 on a CPU")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    decoder = Decoder.from_pretrained(given.model, dtype=given.dtype)
    (method,) = make_methods(["anchored"], dict(option.split("=", 1) for option in given.options))
    if not isinstance(method, Anchored):
        raise TypeError(method)
    for shape in given.shapes:
        task = make_task(*map(int, shape.split("x")), words=given.words)
        print(json.dumps({"shape": shape} | measure(decoder, task, method)), flush=True)


def measure(decoder: Decoder, task: Task, method: Anchored) -> dict[str, Any]:
    """Estimate and measure a fit to all rows."""
    drawn = Draw(task.train, len(task.train), len(task.train)).timed(decoder, task, method)
    estimated = drawn.seconds or math.nan
    started = time.perf_counter()
    injection = method.fit_injection(decoder, task, task.train)
    seconds = time.perf_counter() - started
    return {
        "solver": injection.settings["solved_by"],
        "scoring": injection.scoring,
        "steps": len(injection.history) - 1,
        "estimated_s": round(estimated, 2),
        "measured_s": round(seconds, 2),
        "ratio": round(seconds / estimated, 2),
    }


if __name__ == "__main__":
    main()
