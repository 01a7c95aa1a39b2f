"""Compare the time of fits: anchored calibration and the fast recipe against the paper's recipe.

    python benchmarks/fits.py smollm2 tickets
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/fits.py smollm2 tickets     emulates a processor without AVX-512

The paper's recipe runs only a few of its 100 epochs, and its time is extrapolated. Ratios are medians over
adjacent runs.
"""

import argparse
import json
import os
from functools import partial
from statistics import median

from rich.console import Console
from rich.table import Table

from i2cl import Decoder, load_task
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.calibration import calibrate
from i2cl.core.context import extract
from i2cl.core.recipe import CalibrationConfig
from i2cl.models.scoring import LabelScorer
from measures import seconds
from tables import machine

EPOCHS = 100
"""Epochs of the paper's recipe (appendix "Implementation of I2CL")."""


def measured(decoder: Decoder, name: str, epochs: int, rounds: int) -> dict[str, object]:
    """Measure the seconds of each stage and recipe, and their ratios: medians over rounds."""
    task = load_task(name)
    shown = task.sample(seed=0)
    scorer = LabelScorer(decoder, task)
    texts = [example.text for example in shown]
    context = extract(decoder, task, shown)
    paper = CalibrationConfig.recipe("paper", epochs=epochs)
    work = {
        "forward": partial(scorer.scores, texts),
        "extract": partial(extract, decoder, task, shown),
        "anchored, one step": partial(anchor, decoder, task, shown, AnchoredConfig(steps=1)),
        "anchored": partial(anchor, decoder, task, shown),
        "fast": partial(calibrate, decoder, task, shown, context, CalibrationConfig.recipe("fast")),
        "paper": partial(calibrate, decoder, task, shown, context, paper),
    }
    work["forward"]()  # warm-up
    turns = []
    for turn in range(rounds):
        order = list(work) if turn % 2 == 0 else list(reversed(work))
        took = {stage: seconds(work[stage], decoder.device) for stage in order}
        took["paper"] *= EPOCHS / epochs
        turns.append(took)
    labels = len(task.labels)
    ratios = {
        "anchored / paper": [one["anchored"] / one["paper"] for one in turns],
        "fast / paper": [one["fast"] / one["paper"] for one in turns],
        "anchored / (forward x (1 + labels))": [
            one["anchored"] / one["forward"] / (1 + labels) for one in turns
        ],
    }
    return {
        "task": name,
        "labels": labels,
        "demonstrations": len(shown),
        "seconds": {stage: median(one[stage] for one in turns) for stage in work},
        "ratios": {name: median(result) for name, result in ratios.items()},
        "rounds": turns,
    }


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="'reference', 'smollm2', a folder or a hub id")
    parser.add_argument("tasks", nargs="+", help="such as tickets")
    parser.add_argument("--epochs", type=int, default=4, help="of the paper's recipe, to be run")
    parser.add_argument("--rounds", type=int, default=3, help="of all stages")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    decoder = Decoder.from_pretrained(given.model)
    result = [measured(decoder, name, given.epochs, given.rounds) for name in given.tasks]
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "all instructions")
    if given.json:
        print(json.dumps({"machine": machine(), "isa": isa, "model": decoder.name, "tasks": result}))
        return
    table = Table(
        "task", *result[0]["seconds"], *result[0]["ratios"], title=f"{decoder.name}, {isa}: seconds, ratios"
    )
    for row in result:
        numbers = [*row["seconds"].values(), *row["ratios"].values()]
        table.add_row(row["task"], *(f"{value:.3g}" for value in numbers))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
