"""Count the answers that change when the labels are listed in another order.

    python benchmarks/option_order.py smollm2 tickets,sst2 --seeds 4 --queries 100 -o results.json

Each method is fitted with the task's labels in three random orders and the same demonstrations. ``flips`` is
the share of queries whose answer differs between two of the orders, on average over the three pairs;
``accuracy`` is the mean over orders and seeds. Methods that list the options (`menu`) depend on the order;
methods that score the label words one by one should not. The paper's tasks need I2CL_DATA_DIR or the hub.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from i2cl import Decoder, Task, load_task
from i2cl.methods import make_methods
from i2cl.tasks import Examples

METHODS = "menu,menu+batch_calibration,menu_few_shot,menu_few_shot+batch_calibration,few_shot,anchored"
ORDERS = 3


def reordered(task: Task, order: list[int]) -> Task:
    """Return the task with its labels in another order; its rows keep their label words."""

    def moved(rows: Examples) -> tuple[Any, ...]:
        return tuple(replace(row, label=order.index(row.label)) for row in rows)

    labels = tuple(task.labels[label] for label in order)
    return replace(task, labels=labels, train=moved(task.train), test=moved(task.test))


def answers(decoder: Decoder, name: str, task: Task, order: list[int], seed: int, queries: int) -> list[str]:
    """Fit a method to the task with its labels in an order, and return the label words of its answers."""
    shown = task.sample(seed=seed)
    other = reordered(task, order)
    shown = tuple(replace(row, label=order.index(row.label)) for row in shown)
    (method,) = make_methods([name])
    predictor = method.fit(decoder, other, shown, seed)
    best = predictor.log_probs([row.text for row in task.queries(queries)]).argmax(-1)
    return [other.labels[index] for index in best.tolist()]


def measure(decoder: Decoder, name: str, task: Task, seeds: int, queries: int) -> dict[str, Any]:
    """Return flips and accuracy of one method on one task."""
    orders = [list(range(len(task.labels)))]
    generator = random.Random(0)
    while len(orders) < ORDERS:
        order = generator.sample(orders[0], len(orders[0]))
        # A task of two labels has two orders: the third is one of them.
        if order != orders[-1]:
            orders.append(order)
    gold = np.array([task.labels[row.label] for row in task.queries(queries)])
    if not make_methods([name])[0].is_stochastic:
        seeds = 1
    flips, accuracies = list[float](), list[float]()
    for seed in range(seeds):
        given = [np.array(answers(decoder, name, task, order, seed, queries)) for order in orders]
        pairs = pairwise(given) if len(task.labels) == 2 else combinations(given, 2)
        flips.append(float(np.mean([(one != other).mean() for one, other in pairs])))
        accuracies += [float((one == gold).mean()) for one in given]
    spread = float(np.std(flips, ddof=1)) if seeds > 1 else None
    return {
        "task": task.name,
        "method": name,
        "seeds": seeds,
        "queries": len(gold),
        "flips": float(np.mean(flips)),
        "flips_std": spread,
        "accuracy": float(np.mean(accuracies)),
    }


def main() -> None:
    """Measure all methods on all tasks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("tasks")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    decoder = Decoder.from_pretrained(options.model, dtype="float32", device="cpu")
    records = []
    for name in options.methods.split(","):
        for task in map(load_task, options.tasks.split(",")):
            records.append(measure(decoder, name, task, options.seeds, options.queries))
            sys.stdout.write(json.dumps(records[-1]) + "\n")
            sys.stdout.flush()
            if options.output is not None:
                text = json.dumps({"model": options.model, "records": records}, indent=1) + "\n"
                options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
