"""Evaluate anchored calibration, sentence embeddings and their product on fresh rows and seeds.

Uses seeds from 4 on, and up to 200 test rows per task that are in no table of docs/, because
`Task.queries(200)` excludes them. Appends a line of JSON per task and seed; existing lines are not run again.

    python benchmarks/fresh.py smollm2 docs/experiments/real/fresh.jsonl
"""

import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from i2cl import Decoder, load_task, make_methods
from i2cl.experiments.statistics import difference
from i2cl.injections.temperature import TYPICAL

TASKS = ("tickets", "intents", "subj", "trec", "agnews", "emoc", "hate_speech18", "sst2", "mr", "sst5")
TASKS += ("dbpedia",)
SEEDS = (4, 5, 6, 7)
NAMES = ("anchored", "sentence_embeddings", "product")


def measured(decoder: Decoder, name: str, seed: int) -> dict[str, Any]:
    """Return which queries each of the three predicts correctly."""
    task = load_task(name)
    asked = {row.text for row in task.queries(200)}
    queries = replace(task, test=tuple(row for row in task.test if row.text not in asked)).queries(200)
    texts, gold = [row.text for row in queries], torch.tensor([row.label for row in queries])
    demonstrations, started = task.sample(None, seed), time.perf_counter()
    methods = make_methods(NAMES[:2], {"encoder": "minilm"})
    fitted = [method.fit(decoder, task, demonstrations, seed) for method in methods]
    seconds = time.perf_counter() - started
    anchored, embeddings = (one.log_probs(texts).log_softmax(-1) for one in fitted)
    scores = (anchored, embeddings, anchored / TYPICAL + embeddings)
    right = {key: (one.argmax(-1) == gold).int().tolist() for key, one in zip(NAMES, scores, strict=True)}
    return {"task": name, "seed": seed, "fit_seconds": round(seconds, 1)} | right


def main(model: str, path: str) -> None:
    """Run what is missing, and print the gain of the product."""
    file = Path(path)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known, decoder = {(one["task"], one["seed"]) for one in lines}, None
    for seed, name in product(SEEDS, TASKS):
        if (name, seed) not in known:
            decoder = decoder or Decoder.from_pretrained(model)
            lines.append(measured(decoder, name, seed))
            with file.open("a") as out:
                out.write(json.dumps(lines[-1]) + "\n")
    of_task = {name: [one for one in lines if one["task"] == name] for name in TASKS}
    right = {key: [np.array([one[key] for one in rows], bool) for rows in of_task.values()] for key in NAMES}
    for key in NAMES:
        each = [f"{name} {100 * task.mean():.1f}" for name, task in zip(TASKS, right[key], strict=True)]
        print(f"{key}: mean {100 * np.mean([task.mean() for task in right[key]]):.1f}; {', '.join(each)}")
    for other in NAMES[:2]:
        one = difference(right["product"], right[other])
        low, mean, high = (100 * value for value in (one.low, one.mean, one.high))
        p = max(one.p_seeds, one.p_queries)
        print(f"product minus {other}: {mean:+.1f} ({low:+.1f} to {high:+.1f}), p {p:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
