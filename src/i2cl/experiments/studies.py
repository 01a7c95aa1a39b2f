"""Fit and score one cell of a grid: a method, an injection moved from another task, or a transfer.

All three are a `Method`, so `i2cl.experiments.evaluation.measure` scores them in the same way.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import load_file

from i2cl.core.context import ContextVector, extract_classes
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.evaluation import Fitted, fit_seeds, fit_wrappers, innermost, measure
from i2cl.experiments.grid import Cell, Wording
from i2cl.experiments.records import Run
from i2cl.experiments.store import save_vectors, store_errors
from i2cl.injections.transfer import transfer
from i2cl.methods import Cost, Method, make_methods
from i2cl.methods.base import Predictor, count_correct
from i2cl.methods.calibrated.folds import injected
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer
from i2cl.tasks import Examples, Task, load_task
from i2cl.tasks.loaders import default_template

GROUPS = 20  # draws of which "worst" demonstrations are the worst (paper, "Deficient ICL")
MAX_JUDGING_ROWS = 100  # held-out rows that few-shot scores each draw on; the paper gives no number


@dataclass(frozen=True)
class Bench:
    """Shared state of the cells that run on one model.

    Attributes:
        decoder: the model.
        data_dir: folder with the rows of tasks, see `i2cl.load_task`; None for the hub.
        vectors: folder for the vectors and coefficients of default I2CL, which other cells and figures use.
        fits: results of `fit_cells` so far, by `fit_key`.
    """

    decoder: Decoder
    data_dir: str | None
    vectors: Path
    fits: dict[str, list[Fitted]] = field(default_factory=dict)

    def task(self, cell: Cell) -> Task:
        """Load a cell's task, once per process. Raises I2CLError if a chat cell has no chat template."""
        task = _load(cell.task, self.data_dir, cell.wording)
        return task.chat(self.decoder.tokenizer) if cell.chat else task

    def hashes(self, cell: Cell) -> dict[str, str]:
        """Return two hashes of a cell's task, 16 hexadecimal digits each.

        ``rows`` covers both splits; ``wording`` covers template, label words, instruction and shots.
        """
        return _hashes(cell.task, self.data_dir, cell.wording)

    def injection(self, cell: Cell) -> Injection:
        """Load the injection of a default I2CL cell; fit and save it first if it is missing."""
        path = self.vectors / f"{cell.key}.safetensors"
        if not path.is_file():
            (fitted,) = fit_cells(self, [cell])
            self.save(cell, fitted)
        tensors = load_file(path)
        vector, task = ContextVector(tensors["context_vector"]), self.task(cell).without_data()
        return Injection(vector, tensors["coefficients"], task, self.decoder.base, seed=cell.seed)

    def save(self, cell: Cell, fitted: Fitted) -> None:
        """Save context vector, coefficients and float16 class vectors of a default I2CL cell.

        Does nothing for any other cell.
        """
        injection = fitted.injection
        if injection is not None and cell == plain(cell, cell.task):
            task = self.task(cell)
            classes = [one.values for one in extract_classes(self.decoder, task, fitted.demonstrations)]
            tensors = {
                "context_vector": injection.context.values.numpy(),
                "coefficients": injection.coefficients.numpy(),
                "class_vectors": torch.stack(classes).numpy().astype(np.float16),
            }
            with store_errors(self.vectors):
                save_vectors(self.vectors, cell.key, tensors)


@lru_cache
def _load(name: str, data_dir: str | None, wording: Wording) -> Task:
    template = wording.template or default_template(name)
    return load_task(name, data_dir=data_dir, template=template, test_path=wording.test)


@lru_cache
def _hashes(name: str, data_dir: str | None, wording: Wording) -> dict[str, str]:
    task, not_in_prompts = _load(name, data_dir, wording), {"name", "title", "description", "group"}
    rows = [[(example.text, example.label) for example in split] for split in (task.train, task.test)]
    words = {key: value for key, value in task.to_dict().items() if key not in not_in_prompts}
    texts = {"rows": json.dumps(rows), "wording": json.dumps(words, sort_keys=True)}
    return {part: hashlib.sha256(text.encode()).hexdigest()[:16] for part, text in texts.items()}


def plain(cell: Cell, task: str) -> Cell:
    """Return the cell of default I2CL on ``task`` with the same model, seed, queries and wording."""
    wordings = {name: wording for name, wording in cell.own.items() if name == task}
    same = ("model", "revision", "dtype", "seed", "limit", "chat")
    return Cell(task=task, own=wordings, **{name: getattr(cell, name) for name in same})


def run_cell(bench: Bench, cell: Cell, fitted: Fitted) -> Run:
    """Score a cell that `fit_cells` fitted, and save the vectors of default I2CL."""
    task = _skewed_task(bench, cell)
    run = measure(bench.decoder, task, fitted, task.queries(cell.limit))
    if cell.study == "method":
        bench.save(cell, fitted)
    weights = fitted.method.weights if isinstance(fitted.method, Transfer) else {}
    return run.model_copy(update={"weights": weights})


def fit_cells(bench: Bench, cells: Sequence[Cell]) -> list[Fitted]:
    """Fit cells that differ only in their seed, in one call. Raises I2CLError if one cannot be fitted."""
    first = cells[0]
    skewed = _skewed_task(bench, first)
    skewed.queries(first.limit)  # raises without queries, before anything is fitted
    task = bench.task(first)
    if first.demonstrations == "worst":
        draws = [worst_group(bench.decoder, task, one.shots, one.seed) for one in cells]
    else:
        draws = [(task.sample(one.shots, one.seed), ()) for one in cells]
    method = _method(bench, first)
    key = " ".join(fit_key(cell) for cell in cells)
    if key not in bench.fits:
        demonstrations, seeds = [rows for rows, _ in draws], [cell.seed for cell in cells]
        bench.fits[key] = fit_seeds(bench.decoder, task, innermost(method), demonstrations, seeds)
    return [
        replace(fit_wrappers(bench.decoder, method, fitted, skewed), held_out=len(judging_rows))
        for fitted, (_, judging_rows) in zip(bench.fits[key], draws, strict=True)
    ]


def fit_key(cell: Cell) -> str:
    """Return a key that is equal for cells that share a fit: they differ in wrappers and queries only."""
    if (method := _innermost_method(cell)) is not None:
        options = {name: value for name, value in cell.options.items() if name in method.options()}
        cell = cell.model_copy(update={"method": method.called, "options": options})
    return cell.model_copy(update={"limit": None, "skew": 1}).key


def is_joint(cell: Cell) -> bool:
    """Whether a cell's method gains from fitting several seeds in one call."""
    return (method := _innermost_method(cell)) is not None and method.joint


def _innermost_method(cell: Cell) -> Method | None:
    """Return a cell's method without wrappers, or None for another study or an invalid method."""
    with suppress(I2CLError):  # reported when the cell is run
        return innermost(*make_methods([cell.method], cell.options)) if cell.study == "method" else None
    return None


def _skewed_task(bench: Bench, cell: Cell) -> Task:
    """Load a cell's task and apply its skew to the queries and the unlabelled texts."""
    task = bench.task(cell)
    return task if cell.skew == 1 else task.skewed(cell.skew, cell.limit)


def worst_group(decoder: Decoder, task: Task, shots: int | None, seed: int) -> tuple[Examples, Examples]:
    """Draw `GROUPS` groups of demonstrations, and return the one with the lowest few-shot accuracy.

    The accuracy is on held-out training rows, which are returned second. Raises I2CLError if no training rows
    are left to hold out.
    """
    groups = [task.sample(shots, 1_000_000 + GROUPS * seed + number) for number in range(GROUPS)]
    used = {example.text: example for group in groups for example in group}
    unused = sum(example.text not in used for example in task.train)
    judging_rows = task.held_out(max(1, min(MAX_JUDGING_ROWS, unused)), list(used.values()), seed)
    (few_shot,) = make_methods(["few_shot"])
    worst = min(
        groups, key=lambda group: count_correct(few_shot.fit(decoder, task, group, seed), judging_rows)
    )
    return worst, judging_rows


@dataclass(frozen=True)
class Move(Method):
    """Inject the vector and coefficients that were fitted on another task (paper, Figure 5)."""

    name: ClassVar[str] = "move"
    summary: ClassVar[str] = "vector and coefficients of another task"

    source: Injection

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:  # noqa: ARG002
        """Return a predictor with the source's injection; nothing is fitted."""
        return injected(self.source, decoder, task)


@dataclass(frozen=True, eq=False)
class Transfer(Method):
    """Calibrate from the average of related tasks (paper, Table 3).

    Attributes:
        first: the task's own injection, which is compared with the related ones; its fit is not timed.
        anchors: injections of other tasks.
        weights: weights of the related anchors by task; filled in by `fit`.
    """

    name: ClassVar[str] = "transfer"
    summary: ClassVar[str] = "calibration from the average of related tasks"

    first: Injection
    anchors: Sequence[Injection]
    weights: dict[str, float] = field(default_factory=dict)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """Calibrate; see `i2cl.injections.transfer.transfer`."""
        made = transfer(decoder, task, demonstrations, self.anchors, seed=seed, first=self.first)
        self.weights.update({self.anchors[index].task.name: weight for index, weight in made.weights})
        injection = made.injection
        cost = Cost.of(injection.context.values, trained=injection.coefficients.numel())
        return PromptPredictor(
            LabelScorer(decoder, task), edit=injection.edit(), injection=injection, cost=cost
        )


def _method(bench: Bench, cell: Cell) -> Method:
    if cell.study == "method":
        return make_methods([cell.method], cell.options)[0]
    if cell.study == "move":
        return Move(bench.injection(plain(cell, cell.sources[0])))
    first = bench.injection(plain(cell, cell.task))
    return Transfer(first, [bench.injection(plain(cell, source)) for source in cell.sources])
