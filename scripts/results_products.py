"""Products of two rows of a store, as in ``anchored+sentence_embeddings``, computed from their stored scores.

No fit is needed. The stored scores have half precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from i2cl.experiments.report.layout import format_accuracy
from i2cl.experiments.report.results import Line, Results, outcome
from i2cl.experiments.statistics import Difference, accuracy, difference
from i2cl.injections.temperature import TYPICAL
from i2cl.methods import Cost
from i2cl.methods.base import CalibratedPredictor, ProductPredictor
from i2cl.models.scoring import Progress
from results_tables import (
    OURS,
    average,
    find_line,
    format_differences,
    line_of,
    on_task,
    results,
    table,
)

OTHERS = {
    "sentence_embeddings": "Sentence embeddings",
    "setfit": "SetFit",
    "Linear probe": "Linear probe of the LLM",
}
EMBEDDINGS = "sentence_embeddings"


@cache
def correct(
    result: Results, first: Line, second: Line | None, task: str
) -> Bool[np.ndarray, "seeds queries"]:
    """Whether a line, or its product with a second one, predicts each query correctly, for shared seeds."""
    seeds = set(result.records(first, task)) & set(result.records(second or first, task))
    return np.stack([_correct(result, first, second, task, seed) for seed in sorted(seeds)])


def _correct(
    result: Results, first: Line, second: Line | None, task: str, seed: int
) -> Bool[np.ndarray, " queries"]:
    run = outcome(result.records(first, task)[seed])
    if second is None:
        return np.equal(run.predictions, run.gold)
    other = outcome(result.records(second, task)[seed])
    if run.scores is None or other.scores is None or other.gold != run.gold:
        raise LookupError(f"{first.name} and {second.name} on {task}: no scores, or other queries")
    tempered = CalibratedPredictor(_StoredScores(run.scores.array), Cost(), temperature=TYPICAL)
    product = ProductPredictor(tempered, _StoredScores(other.scores.array), Cost()).log_probs([])
    return np.equal(product.argmax(-1).numpy(), run.gold)


@dataclass(frozen=True)
class _StoredScores:
    """A predictor that returns stored scores."""

    stored: Float[np.ndarray, "queries labels"]
    cost: Cost = field(default_factory=Cost)

    def log_probs(self, _texts: Sequence[str], _progress: Progress | None = None) -> Tensor:
        return torch.from_numpy(self.stored).double()


def together() -> str:
    """Tabulate anchored calibration, sentence embeddings, and their product, by task."""
    result = results("real")
    ours, theirs = line_of(result, OURS), line_of(result, EMBEDDINGS)
    product = _product(result, ours, theirs, result.tasks)
    rows = [["**mean**", average(result, ours), average(result, theirs), product]]
    for task in result.tasks:
        product = _product(result, ours, theirs, (task,))
        rows.append([task, on_task(result, ours, task), on_task(result, theirs, task), product])
    many = results("many-labels")
    for task in many.tasks:
        for shots in (1, 5):
            ours, theirs = (
                next(line for line in many.lines if line.row.method == method and line.shots == shots)
                for method in ("anchored", EMBEDDINGS)
            )
            product = _product(many, ours, theirs, (task,))
            accuracies = (on_task(many, ours, task), on_task(many, theirs, task))
            rows.append([f"{task}, {shots} per class", *accuracies, product])
    return table(["Task", "Anchored calibration", "Sentence embeddings", "Both"], rows)


def products() -> str:
    """Compare products of anchored calibration with its factors, and with LoRA and SetFit."""
    result = results("real")
    ours = line_of(result, OURS)
    lines = {name: line_of(result, name) for name in OTHERS}
    pairs: dict[tuple[str, str], Difference | None] = {}
    for name, line in lines.items():
        pair = (ours, line), (ours, None)
        pairs[f"with {OTHERS[name]}", "Anchored calibration"] = _difference(result, *pair)
    for name, label in (("LoRA", "LoRA"), *OTHERS.items()):
        other = find_line(result, name)
        if other is not None:
            pair = (ours, lines[EMBEDDINGS]), (other, None)
            pairs[f"with {OTHERS[EMBEDDINGS]}", label] = _difference(result, *pair)
    rows = [[*names, *cells] for names, cells in format_differences(pairs).items()]
    return table(["Anchored calibration", "minus", "Difference", "95 % interval", "q"], rows, 2)


def _difference(result: Results, *pair: tuple[Line, Line | None]) -> Difference:
    ours, theirs = ([correct(result, *lines, task) for task in result.tasks] for lines in pair)
    return difference(ours, theirs)


def _product(result: Results, first: Line, second: Line, tasks: Sequence[str]) -> str:
    product = accuracy([correct(result, first, second, task) for task in tasks])
    return format_accuracy(product.mean, product.sd, product.seeds)
