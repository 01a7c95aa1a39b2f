"""What a cell runs: a method, what was fitted on another task, or a transfer from related tasks.

Each is a `Method`, so that everything is measured alike by `i2cl.experiments.evaluation.evaluate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import load_file

from i2cl.core.context import ContextVector, extract_classes
from i2cl.core.edits import LinearEdit
from i2cl.core.injection import Injection
from i2cl.experiments.evaluation import evaluate
from i2cl.experiments.grid import Cell
from i2cl.experiments.records import Outcome
from i2cl.experiments.store import save_vectors
from i2cl.injections.transfer import transfer
from i2cl.methods import Method, Predictor, make_methods
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.tasks import Example, Task, load_task

GROUPS = 20
"""Groups of demonstrations that the worst is taken from (paper, "Deficient ICL")."""

JUDGED_ON = 100
"""Held-out rows, at most, on which few-shot judges a group; the paper does not say how many it used."""


@dataclass(frozen=True)
class Bench:
    """Where cells are run.

    Attributes:
        decoder: the model.
        data_dir: folder of the tasks' rows, or None.
        vectors: folder that keeps what plain I2CL cells were fitted to, for other cells and for figures.
    """

    decoder: Decoder
    data_dir: str | None
    vectors: Path

    def task(self, name: str) -> Task:
        """A task with its rows, read once per process."""
        return _task(name, self.data_dir)

    def injection(self, cell: Cell) -> Injection:
        """What plain I2CL was fitted to on a cell's task, by an earlier cell or now."""
        task = self.task(cell.task)
        path = self.vectors / f"{cell.key}.safetensors"
        if not path.is_file():
            demonstrations = task.sample(cell.shots, cell.seed)
            predictor = _method(cell).fit(self.decoder, task, demonstrations, cell.seed)
            self.keep(cell, predictor, demonstrations)
        kept = load_file(path)
        return Injection(
            ContextVector(kept["context_vector"]),
            kept["coefficients"],
            task.without_data(),
            self.decoder.base,
            seed=cell.seed,
        )

    def keep(self, cell: Cell, predictor: Predictor, demonstrations: Sequence[Example]) -> None:
        """Save vector, coefficients and the vectors of each class alone (16-bit), of plain I2CL only."""
        edit = _injected(predictor)
        if edit is not None and cell == plain(cell, cell.task):
            task = self.task(cell.task)
            classes = [one.values for one in extract_classes(self.decoder, task, demonstrations)]
            tensors = {
                "context_vector": edit.values.numpy(),
                "coefficients": edit.coefficients.numpy(),
                "class_vectors": torch.stack(classes).numpy().astype(np.float16),
            }
            save_vectors(self.vectors, cell.key, tensors)


@lru_cache
def _task(name: str, data_dir: str | None) -> Task:
    return load_task(name, data_dir=data_dir)


def plain(cell: Cell, task: str) -> Cell:
    """The cell of plain I2CL on a task, with the same model, seed and queries."""
    return Cell(
        model=cell.model,
        revision=cell.revision,
        dtype=cell.dtype,
        task=task,
        seed=cell.seed,
        limit=cell.limit,
    )


def run_study(bench: Bench, cell: Cell) -> Outcome:
    """Run a cell.

    Raises:
        I2CLError: if the task, the method or the demonstrations do not allow it.
    """
    task = bench.task(cell.task)
    judged: Sequence[Example] = ()
    if cell.demonstrations == "worst":
        demonstrations, judged = worst_group(bench.decoder, task, cell.shots, cell.seed)
    else:
        demonstrations = task.sample(cell.shots, cell.seed)
    predictors: list[Predictor] = []
    method = STUDIES[cell.study](bench, cell)
    run = evaluate(
        bench.decoder,
        task,
        method,
        seed=cell.seed,
        limit=cell.limit,
        demonstrations=demonstrations,
        inspect=predictors.append,
    )
    if cell.study == "method":
        bench.keep(cell, predictors[0], demonstrations)
    injected = _injected(predictors[0])
    places = {example: place for place, example in reversed(list(enumerate(task.train)))}
    return Outcome(
        accuracy=run.accuracy,
        macro_f1=run.macro_f1,
        gold=run.gold,
        predictions=run.predictions,
        labels=task.labels,
        demonstrations=tuple(places[example] for example in demonstrations),
        fit_seconds=run.fit_seconds,
        predict_seconds=run.predict_seconds,
        trainable_parameters=run.trainable_parameters,
        cached_values=run.cached_values,
        cached_bytes=run.cached_bytes,
        held_out=run.held_out + len(judged),
        coefficients=injected.coefficients.tolist() if injected else None,
        weights=method.weights if isinstance(method, Transfer) else {},
    )


def _injected(predictor: Predictor) -> LinearEdit | None:
    edit = predictor.edit if isinstance(predictor, PromptPredictor) else None
    return edit if isinstance(edit, LinearEdit) else None


def worst_group(
    decoder: Decoder, task: Task, shots: int | None, seed: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """The group of demonstrations with which few-shot does worst on held-out rows, and those rows.

    Held-out rows are of the training split and in none of the groups.

    Raises:
        I2CLError: if no rows remain to judge on.
    """
    groups = [task.sample(shots, 1_000_000 + GROUPS * seed + number) for number in range(GROUPS)]
    used = {example.text: example for group in groups for example in group}
    free = sum(example.text not in used for example in task.train)
    judged = task.held_out(max(1, min(JUDGED_ON, free)), list(used.values()), seed)
    gold = torch.tensor([example.label for example in judged])
    (few_shot,) = make_methods(["few_shot"])
    right = [
        int(
            (
                few_shot.fit(decoder, task, group, seed).scores([one.text for one in judged]).argmax(-1)
                == gold
            ).sum()
        )
        for group in groups
    ]
    return groups[right.index(min(right))], judged


@dataclass(frozen=True)
class Move(Method):
    """Injects vector and coefficients of another task (paper, figure on transfer between tasks)."""

    name: ClassVar[str] = "move"
    summary: ClassVar[str] = "vector and coefficients of another task"

    source: Injection

    def fit(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Sequence[Example],  # noqa: ARG002 - the protocol fixes the arguments
        seed: int,  # noqa: ARG002
    ) -> PromptPredictor:
        """Nothing to fit."""
        edit = self.source.edit()
        return PromptPredictor(decoder, task, edit=edit, cached_values=edit.values.numel())


class Transfer(Method):
    """Calibrates again from related tasks; fit seconds are those of this second calibration."""

    name: ClassVar[str] = "transfer"
    summary: ClassVar[str] = "calibration from the average of related tasks"

    def __init__(self, first: Injection, anchors: Sequence[Injection]) -> None:
        self.first = first
        self.anchors = anchors
        self.weights: dict[str, float] = {}

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """See `i2cl.injections.transfer.transfer`."""
        found = transfer(decoder, task, demonstrations, self.anchors, seed=seed, first=self.first)
        self.weights = {self.anchors[place].task.name: weight for place, weight in found.weights}
        edit = found.injection.edit()
        trained = edit.coefficients.numel()
        return PromptPredictor(
            decoder, task, edit=edit, cached_values=edit.values.numel(), trainable_parameters=trained
        )


def _method(cell: Cell) -> Method:
    (method,) = make_methods([cell.method], cell.options)
    return method


def _move(bench: Bench, cell: Cell) -> Method:
    return Move(bench.injection(plain(cell, cell.sources[0])))


def _transfer(bench: Bench, cell: Cell) -> Method:
    anchors = [bench.injection(plain(cell, source)) for source in cell.sources]
    return Transfer(bench.injection(plain(cell, cell.task)), anchors)


STUDIES: dict[str, Callable[[Bench, Cell], Method]] = {
    "method": lambda _bench, cell: _method(cell),
    "move": _move,
    "transfer": _transfer,
}
"""How the method of each study is made."""
