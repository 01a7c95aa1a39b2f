"""Detect out-of-scope texts: CLINC150's out-of-scope texts against ten of its labels.

    I2CL_DATA_DIR=DATA python benchmarks/outside.py smollm2 --draws 5 -o outside.jsonl

DATA/clinc150 has train.jsonl, test.jsonl, oos_test.jsonl and labels.json. Appends a line of JSON per draw of
labels; existing lines are not run again. The scores should be higher for in-scope texts:

- confidence: the highest label probability, at the typical temperature;
- mass: the total probability of the labels under the fitted model, fitted without the label-token vector;
- plain_mass: the same under the plain model;
- mix: the mean rank of confidence and mass.

``kept`` is the false positive rate at a true positive rate of 95 %.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score

from i2cl import AnchoredConfig, Decoder, Example, Task, anchor
from i2cl.injections.temperature import TYPICAL
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Template

LABELS, SHOTS, INSIDE, OUTSIDE = 10, 5, 100, 200
"""Number of labels, examples per label, and scored texts in and out of scope."""

TEMPLATE = Template("Request: {text}\nIntent: {label}")


def rows(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def drawn(folder: Path, draw: int) -> tuple[Task, tuple[Example, ...], list[str]]:
    """Draw ten labels, and return their task, demonstrations, and out-of-scope texts."""
    random = np.random.default_rng(draw)
    names = json.loads((folder / "labels.json").read_text(encoding="utf-8"))
    chosen = sorted(random.choice(len(names), LABELS, replace=False).tolist())
    splits = {}
    for split in ("train", "test"):
        held = [row for row in rows(folder / f"{split}.jsonl") if row["label"] in chosen]
        splits[split] = tuple(Example(row["text"], chosen.index(row["label"])) for row in held)
    task = Task(f"clinc150-{draw}", tuple(names[one] for one in chosen), TEMPLATE, **splits)
    outside = [row["text"] for row in rows(folder / "oos_test.jsonl")]
    return task, task.sample(SHOTS, draw), [outside[at] for at in random.permutation(len(outside))[:OUTSIDE]]


def measured(decoder: Decoder, folder: Path, draw: int) -> dict[str, Any]:
    """Fit one draw, and measure how well each score detects out-of-scope texts."""
    task, demonstrations, outside = drawn(folder, draw)
    injection = anchor(decoder, task, demonstrations, AnchoredConfig(say_label=False), seed=draw)
    inside = task.queries(INSIDE, draw)
    texts = [query.text for query in inside] + outside
    scorer = LabelScorer(decoder, task, injection.scoring)
    scores = scorer.scores(texts, edit=injection.edit()).double()
    plain = scorer.scores(texts).double()
    result = {
        "confidence": (scores / TYPICAL).softmax(-1).amax(-1),
        "mass": scores.logsumexp(-1),
        "plain_mass": plain.logsumexp(-1),
    }
    kinds = {name: value.numpy() for name, value in result.items()}
    kinds["mix"] = (rankdata(kinds["confidence"]) + rankdata(kinds["mass"])) / 2
    known = np.arange(len(texts)) < len(inside)
    gold = torch.tensor([query.label for query in inside])
    return {
        "labels": list(task.labels),
        "whole_sequences": scorer.labels.full,
        "accuracy": (scores[: len(inside)].argmax(-1) == gold).double().mean().item(),
        "auroc": {name: float(roc_auc_score(known, value)) for name, value in kinds.items()},
        "kept": {name: _kept(value, known) for name, value in kinds.items()},
    }


def _kept(value: Any, known: Any) -> float:
    return float((value[~known] >= np.quantile(value[known], 0.05)).mean())


def main() -> None:
    """Run what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    lines = asked.output.read_text(encoding="utf-8").splitlines() if asked.output.is_file() else []
    done = {one["draw"] for one in map(json.loads, lines)}
    decoder = Decoder.from_pretrained(asked.model)
    for draw in sorted(set(range(asked.draws)) - done):
        row = {"draw": draw} | measured(decoder, Path(os.environ["I2CL_DATA_DIR"]) / "clinc150", draw)
        with asked.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
