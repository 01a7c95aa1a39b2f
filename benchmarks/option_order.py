"""Count the answers that change when the labels are listed in another order.

    python benchmarks/option_order.py smollm2 tickets,sst2,agnews,trec --queries 50 -o results.json

Each method is fitted with the task's labels in three random orders and the same demonstrations. All figures
are shares of the queries:

- ``flips``: the answer differs between two of the orders, on average over the three pairs;
- ``same_position``: the answers of two orders are different labels at the same position of the list;
- ``accuracy``: mean over orders and seeds.

Methods that list the options (`menu`) depend on the order; methods that score the label words one by one
should not. Results that are already in the output file are not measured again. The paper's tasks need
I2CL_DATA_DIR or the hub.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from i2cl import Decoder, Task, load_task
from i2cl.experiments.evaluation import fit_method, fit_wrappers, innermost
from i2cl.methods import make_methods
from i2cl.methods.base import Method
from i2cl.tasks import Examples

METHODS = "menu,menu+label_prior,menu_few_shot,few_shot,anchored,anchored+label_prior"
ORDERS = 3


def reorder_rows(rows: Examples, order: list[int]) -> tuple[Any, ...]:
    """Return the rows with their label's index in another order."""
    return tuple(replace(row, label=order.index(row.label)) for row in rows)


def reorder_labels(task: Task, order: list[int]) -> Task:
    """Return the task with its labels in another order; its rows keep their label words."""
    labels = tuple(task.labels[label] for label in order)
    rows = {"train": reorder_rows(task.train, order), "test": reorder_rows(task.test, order)}
    return replace(task, labels=labels, **rows)


def answers(
    decoder: Decoder, methods: Sequence[Method], task: Task, order: list[int], seed: int, queries: Examples
) -> list[np.ndarray]:
    """Fit methods that share a fit, with the labels in an order; return each one's answers as positions."""
    other = reorder_labels(task, order)
    shown = reorder_rows(task.sample(seed=seed), order)
    fitted = fit_method(decoder, other, innermost(methods[0]), shown, seed)
    texts = [row.text for row in queries]
    return [
        fit_wrappers(decoder, method, fitted, other).predictor.log_probs(texts).argmax(-1).numpy()
        for method in methods
    ]


def measure(
    decoder: Decoder, methods: Sequence[Method], task: Task, seeds: int, limit: int
) -> list[dict[str, Any]]:
    """Return the record of each of some methods that share a fit."""
    orders = [list(range(len(task.labels)))]
    generator = random.Random(0)
    while len(orders) < ORDERS:
        order = generator.sample(orders[0], len(orders[0]))
        # A task of two labels has two orders: the third is one of them.
        if order != orders[-1]:
            orders.append(order)
    queries = task.queries(limit)
    gold = np.array([row.label for row in queries])
    seeds = seeds if innermost(methods[0]).is_stochastic else 1
    figures: dict[str, list[list[float]]] = {method.full_name: [] for method in methods}
    for seed in range(seeds):
        positions = [answers(decoder, methods, task, order, seed, queries) for order in orders]
        for method, given in zip(methods, zip(*positions, strict=True), strict=True):
            labels = [np.array(order)[one] for order, one in zip(orders, given, strict=True)]
            indices = range(ORDERS)
            pairs = list(pairwise(indices) if len(task.labels) == 2 else combinations(indices, 2))
            changed = [labels[one] != labels[other] for one, other in pairs]
            same = [given[one] == given[other] for one, other in pairs]
            flips = np.mean(changed)
            same_position = np.mean([a & b for a, b in zip(changed, same, strict=True)])
            accuracy = np.mean([one == gold for one in labels])
            figures[method.full_name].append([float(flips), float(same_position), float(accuracy)])
    names = ("flips", "same_position", "accuracy")
    means = {name: np.mean(values, axis=0).round(4).tolist() for name, values in figures.items()}
    return [
        {"task": task.name, "method": name, "shots": task.shots, "seeds": seeds, "queries": len(gold)}
        | dict(zip(names, values, strict=True))
        for name, values in means.items()
    ]


def main() -> None:
    """Measure all methods on all tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--shots", type=int, help="demonstrations per class; default: the task's own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    if options.output is not None and options.output.exists():
        records = json.loads(options.output.read_text(encoding="utf-8"))["records"]
    decoder = Decoder.from_pretrained(options.model, dtype="float32", device="cpu")
    groups: dict[Method, list[Method]] = {}
    for method in make_methods(options.methods.split(",")):
        groups.setdefault(innermost(method), []).append(method)
    for methods in groups.values():
        for name in options.tasks.split(","):
            task = load_task(name)
            task = replace(task, shots=options.shots or task.shots)
            done = {(one["task"], one["method"]) for one in records}
            if all((task.name, method.full_name) in done for method in methods):
                continue
            measured = measure(decoder, methods, task, options.seeds, options.queries)
            records += measured
            sys.stdout.writelines(json.dumps(one) + "\n" for one in measured)
            sys.stdout.flush()
            if options.output is not None:
                text = json.dumps({"model": options.model, "records": records}, indent=1) + "\n"
                options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
