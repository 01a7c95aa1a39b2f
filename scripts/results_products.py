"""Two rows of a store multiplied: what `anchored+sentence_embeddings` answers, from both rows' scores.

A product is made of scores that the store holds, so it needs no fit. Scores have half precision there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.experiments.report.results import Line, Results, outcome
from i2cl.experiments.statistics import Accuracy, Difference, accuracy, difference
from i2cl.injections.temperature import TYPICAL
from i2cl.methods import Cost
from i2cl.methods.base import CalibratedPredictor, ProductPredictor
from i2cl.models.scoring import Progress
from results_stores import OURS, average, line_of, named_line, results, shown, written
from results_tables import decided, table

Right = Bool[np.ndarray, "seeds queries"]
OTHERS = {
    "sentence_embeddings": "Sentence embeddings",
    "setfit": "SetFit",
    "Linear probe": "Linear probe of the LLM",
}
EMBEDDINGS = "sentence_embeddings"


@cache
def right(result: Results, first: Line, second: Line | None, task: str) -> Right:
    """Which queries a row, or its product with a second one, answers rightly; for the seeds of both."""
    seeds = set(result.records(first, task)) & set(result.records(second or first, task))
    return np.stack([_right(result, first, second, task, seed) for seed in sorted(seeds)])


def _right(result: Results, first: Line, second: Line | None, task: str, seed: int) -> Bool[np.ndarray, " _"]:
    run = outcome(result.records(first, task)[seed])
    if second is None:
        return np.equal(run.predictions, run.gold)
    other = outcome(result.records(second, task)[seed])
    if run.scores is None or other.scores is None or other.gold != run.gold:
        raise LookupError(f"{first.name} and {second.name} on {task}: no scores, or other queries")
    first_one = CalibratedPredictor(_Kept(run.scores.array), Cost(), temperature=TYPICAL)
    both = ProductPredictor(first_one, _Kept(other.scores.array), Cost()).scores([])
    return np.equal(both.argmax(-1).numpy(), run.gold)


@dataclass(frozen=True)
class _Kept:
    """What a store keeps of a predictor: the scores that it gave."""

    kept: Float[np.ndarray, "queries labels"]
    cost: Cost = field(default_factory=Cost)

    def scores(self, _texts: Sequence[str], _progress: Progress | None = None) -> Tensor:
        return torch.from_numpy(self.kept).double()


def measured(result: Results, first: Line, second: Line, tasks: tuple[str, ...]) -> Accuracy:
    """Of a product, over tasks."""
    return accuracy([right(result, first, second, task) for task in tasks])


def together() -> str:
    """The default, sentence embeddings, and both multiplied, by task."""
    rows = []
    result = results("real")
    ours, theirs = named_line(result, OURS), named_line(result, EMBEDDINGS)
    both = measured(result, ours, theirs, result.tasks)
    rows.append(["**mean**", average(result, ours), average(result, theirs), _written(both)])
    for task in result.tasks:
        got = _written(measured(result, ours, theirs, (task,)))
        rows.append([task, shown(result, ours, task), shown(result, theirs, task), got])
    many = results("many-labels")
    for task in many.tasks:
        for shots in (1, 5):
            ours, theirs = (_of(many, method, shots) for method in ("anchored", EMBEDDINGS))
            got = _written(measured(many, ours, theirs, (task,)))
            rows.append([f"{task}, {shots} a class", shown(many, ours, task), shown(many, theirs, task), got])
    return table(["Task", "Anchored calibration", "Sentence embeddings", "Both"], rows)


def products() -> str:
    """The default multiplied with other rows, against what it is made of, and against LoRA and SetFit."""
    result, gaps = results("real"), {}
    ours = named_line(result, OURS)
    lines = {name: named_line(result, name) for name in OTHERS}
    for name, line in lines.items():
        gaps[f"with {OTHERS[name]}", "Anchored calibration"] = _gap(result, (ours, line), (ours, None))
    for name, text in (("LoRA", "LoRA"), *OTHERS.items()):
        other = line_of(result, name)
        if other is not None:
            pair = (ours, lines[EMBEDDINGS]), (other, None)
            gaps[f"with {OTHERS[EMBEDDINGS]}", text] = _gap(result, *pair)
    rows = [[*names, *entry] for names, entry in decided(gaps).items()]
    return table(["Anchored calibration", "minus", "Difference", "95 % interval", "q"], rows, 2)


def _gap(result: Results, *pair: tuple[Line, Line | None]) -> Difference:
    ours, theirs = ([right(result, *one, task) for task in result.tasks] for one in pair)
    return difference(ours, theirs)


def _of(result: Results, method: str, shots: int) -> Line:
    return next(line for line in result.lines if line.row.method == method and line.shots == shots)


def _written(got: Accuracy) -> str:
    return written(got.mean, got.sd, got.seeds)
