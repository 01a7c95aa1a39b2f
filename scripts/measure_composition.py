"""Accuracy of combined injections on the reference model, as Markdown.

python scripts/measure_composition.py [--seeds 3] [--limit 200]    # seeds of one task, pairs of tasks
python scripts/measure_composition.py --groups [--seeds 5]         # classes against random groups
"""

import argparse
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from itertools import permutations

import torch

from i2cl import CalibrationConfig, Decoder, Injection, Task, calibrate, combine, extract, load_task
from i2cl.reference import tasks as reference

RECIPE = CalibrationConfig.recipe("fast")
SUMS = {"mean (0.5, 0.5)": [0.5, 0.5], "sum (1, 1)": [1.0, 1.0]}


def main() -> None:
    """Fit every bundled task with every seed, and measure what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--groups", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    decoder = Decoder.from_pretrained("reference", device="cpu")
    tasks = [load_task(name) for name in reference.names()]
    if asked.groups:
        _groups(decoder, tasks, asked.seeds, asked.limit)
        return
    fitted = {task.name: [_fit(decoder, task, [seed], seed) for seed in range(asked.seeds)] for task in tasks}
    _seeds(decoder, tasks, fitted, asked.limit)
    print()
    _pairs(decoder, tasks, fitted, asked.limit)


def _fit(decoder: Decoder, task: Task, samples: list[int], seed: int) -> Injection:
    """An injection from the demonstrations of these seeds."""
    shots = list(dict.fromkeys(example for sample in samples for example in task.sample(seed=sample)))
    context = extract(decoder, task, shots, seed=seed)
    return calibrate(decoder, task, shots, context, RECIPE, seed=seed)


def _accuracy(decoder: Decoder, injection: Injection, task: Task, limit: int) -> float:
    queries = task.queries(limit)
    best = injection.scores(decoder, [query.text for query in queries]).argmax(-1).tolist()
    return 100 * statistics.fmean(label == query.label for label, query in zip(best, queries, strict=True))


def _seeds(decoder: Decoder, tasks: list[Task], fitted: dict[str, list[Injection]], limit: int) -> None:
    """One task, several sets of demonstrations: alone, combined, and all demonstrations in one fit."""
    _row("task", "alone, mean over seeds", "combined", "one fit on all")
    print("|---|---:|---:|---:|")
    columns: list[list[float]] = [[], [], []]
    for task in tasks:
        parts = fitted[task.name]
        whole = _fit(decoder, task, list(range(len(parts))), 0)
        found = [
            statistics.fmean(_accuracy(decoder, part, task, limit) for part in parts),
            _accuracy(decoder, combine(parts), task, limit),
            _accuracy(decoder, whole, task, limit),
        ]
        for column, value in zip(columns, found, strict=True):
            column.append(value)
        _row(task.name, *(f"{value:.1f}" for value in found))
    _row("**mean**", *(f"**{statistics.fmean(column):.1f}**" for column in columns))


def _pairs(decoder: Decoder, tasks: list[Task], fitted: dict[str, list[Injection]], limit: int) -> None:
    """Two tasks with one set of label words, first seed: each injection on both tasks, and both combined."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for own, other in permutations(tasks, 2):
        if set(own.labels) != set(other.labels):
            continue
        same = own.name.split("-")[0] == other.name.split("-")[0]
        kind = "one attribute, two keys" if same else "two attributes"
        parts = [fitted[own.name][0], fitted[other.name][0]]
        tried = {"its own injection": parts[0], "the other's injection": replace(parts[1], task=own)}
        tried |= {name: combine(parts, weights) for name, weights in SUMS.items()}
        for name, injection in tried.items():
            found[kind, name].append(_accuracy(decoder, injection, own, limit))
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    names = list(dict.fromkeys(name for _, name in found))
    _row("accuracy on each task of a pair", *kinds)
    print("|---" + "|---:" * len(kinds) + "|")
    for name in names:
        _row(name, *(f"{statistics.fmean(found[kind, name]):.1f}" for kind in kinds))


def _groups(decoder: Decoder, tasks: list[Task], seeds: int, limit: int) -> None:
    """The control of class vectors: as many vectors, each of demonstrations drawn at random."""
    _row("task", "random groups")
    print("|---|---:|")
    means = []
    for task in tasks:
        found = []
        for seed in range(seeds):
            shots, classes = task.sample(seed=seed), len(task.labels)
            drawn = random.Random(f"groups {seed}").sample(shots, len(shots))
            vectors = [extract(decoder, task, drawn[start::classes], seed=seed) for start in range(classes)]
            injection = calibrate(decoder, task, shots, vectors, RECIPE, seed=seed)
            found.append(_accuracy(decoder, injection, task, limit))
        means.append(statistics.fmean(found))
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        _row(task.name, f"{means[-1]:.1f} ± {spread:.1f}")
    _row("**mean**", f"**{statistics.fmean(means):.1f}**")


def _row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
