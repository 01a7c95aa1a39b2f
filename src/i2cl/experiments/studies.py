"""What a cell runs: a method, what was fitted on another task, or a transfer from related tasks.

Each is a `Method`, so that everything is measured alike by `i2cl.experiments.evaluation.measure`.
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
from i2cl.experiments.evaluation import Fitted, bottom, fit_seeds, measure, on_top
from i2cl.experiments.grid import Cell, Wording
from i2cl.experiments.records import Run
from i2cl.experiments.store import save_vectors, store_errors
from i2cl.injections.transfer import transfer
from i2cl.methods import Cost, Method, make_methods
from i2cl.methods.base import Predictor, count_correct
from i2cl.methods.calibrated.folds import injected
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions
from i2cl.tasks import Examples, Task, load_task
from i2cl.tasks.loaders import default_template

GROUPS = 20  # groups of demonstrations that the worst is taken from (paper, "Deficient ICL")
JUDGED_ON = 100  # held-out rows, at most, on which few-shot judges a group; the paper does not say how many


@dataclass(frozen=True)
class Bench:
    """Where cells are run: ``vectors`` keeps what plain I2CL was fitted to, ``fits`` what was fitted here."""

    decoder: Decoder
    data_dir: str | None
    vectors: Path
    fits: dict[str, list[Fitted]] = field(default_factory=dict)

    def task(self, cell: Cell) -> Task:
        """A cell's task, read once per process; raises I2CLError if a chat has no template."""
        task = _task(cell.task, self.data_dir, cell.wording)
        return task.chat(self.decoder.tokenizer) if cell.chat else task

    def hashes(self, cell: Cell) -> dict[str, str]:
        """Fingerprints of a cell's task, 16 hexadecimal digits each.
        ``rows`` is of both splits, ``wording`` of template, label words, instruction and shots.
        """
        return _hashes(cell.task, self.data_dir, cell.wording)

    def injection(self, cell: Cell) -> Injection:
        """What plain I2CL was fitted to on a cell's task, by an earlier cell or now."""
        path = self.vectors / f"{cell.key}.safetensors"
        if not path.is_file():
            (fitted,) = fit_cells(self, [cell])
            self.keep(cell, fitted)
        kept = load_file(path)
        vector, task = ContextVector(kept["context_vector"]), self.task(cell).without_data()
        return Injection(vector, kept["coefficients"], task, self.decoder.base, seed=cell.seed)

    def keep(self, cell: Cell, fitted: Fitted) -> None:
        """Save vector, coefficients and the vectors of each class alone (16-bit), of plain I2CL only."""
        edit = fitted.injected
        if edit is not None and cell == plain(cell, cell.task):
            task = self.task(cell)
            classes = [one.values for one in extract_classes(self.decoder, task, fitted.demonstrations)]
            tensors = {
                "context_vector": edit.values.numpy(),
                "coefficients": edit.coefficients.numpy(),
                "class_vectors": torch.stack(classes).numpy().astype(np.float16),
            }
            with store_errors(self.vectors):
                save_vectors(self.vectors, cell.key, tensors)


@lru_cache
def _task(name: str, data_dir: str | None, wording: Wording) -> Task:
    template = wording.template or default_template(name)
    return load_task(name, data_dir=data_dir, template=template, test_path=wording.test)


@lru_cache
def _hashes(name: str, data_dir: str | None, wording: Wording) -> dict[str, str]:
    task, unsaid = _task(name, data_dir, wording), {"name", "title", "description", "group"}
    rows = [[(example.text, example.label) for example in split] for split in (task.train, task.test)]
    words = {key: value for key, value in task.to_dict().items() if key not in unsaid}
    texts = {"rows": json.dumps(rows), "wording": json.dumps(words, sort_keys=True)}
    return {part: hashlib.sha256(text.encode()).hexdigest()[:16] for part, text in texts.items()}


def plain(cell: Cell, task: str) -> Cell:
    """The cell of plain I2CL on a task, with the same model, seed, queries and wording."""
    wordings = {name: wording for name, wording in cell.own.items() if name == task}
    same = ("model", "revision", "dtype", "seed", "limit", "chat")
    return Cell(task=task, own=wordings, **{name: getattr(cell, name) for name in same})


def run_cell(bench: Bench, cell: Cell, fitted: Fitted) -> Run:
    """Score what `fit_cells` made of a cell, and keep the vectors of plain I2CL."""
    task = _asked(bench, cell)
    run = measure(bench.decoder, task, fitted, task.queries(cell.limit))
    if cell.study == "method":
        bench.keep(cell, fitted)
    weights = fitted.method.weights if isinstance(fitted.method, Transfer) else {}
    return run.model_copy(update={"weights": weights})


def fit_cells(bench: Bench, cells: Sequence[Cell]) -> list[Fitted]:
    """Fit cells that differ in their seed alone, together; raises I2CLError where one cannot be."""
    first = cells[0]
    worded = _asked(bench, first)
    worded.queries(first.limit)  # none are told before anything is fitted
    task = bench.task(first)
    if first.demonstrations == "worst":
        drawn = [worst_group(bench.decoder, task, one.shots, one.seed) for one in cells]
    else:
        drawn = [(task.sample(one.shots, one.seed), ()) for one in cells]
    method = _method(bench, first)
    key = " ".join(fit_key(cell) for cell in cells)
    if key not in bench.fits:
        shown, seeds = [demonstrations for demonstrations, _ in drawn], [cell.seed for cell in cells]
        bench.fits[key] = fit_seeds(bench.decoder, task, bottom(method), shown, seeds)
    return [
        replace(on_top(bench.decoder, method, below, worded), held_out=len(judged))
        for below, (_, judged) in zip(bench.fits[key], drawn, strict=True)
    ]


def fit_key(cell: Cell) -> str:
    """The same for cells whose method, wrappers taken off, is fitted to the same: they differ in queries."""
    if (method := _fitting(cell)) is not None:
        known = {name: value for name, value in cell.options.items() if name in method.options()}
        cell = cell.model_copy(update={"method": method.called, "options": known})
    return cell.model_copy(update={"limit": None, "skew": 1}).key


def is_joint(cell: Cell) -> bool:
    """Whether a cell's method gains by being fitted with several seeds together."""
    return (method := _fitting(cell)) is not None and method.joint


def _fitting(cell: Cell) -> Method | None:
    """A cell's method, wrappers taken off, where that is all of its study."""
    with suppress(I2CLError):  # running the cell tells what is wrong with its method
        return bottom(*make_methods([cell.method], cell.options)) if cell.study == "method" else None
    return None


def _asked(bench: Bench, cell: Cell) -> Task:
    """The cell's task with its queries and unlabelled texts as frequent by class as the cell says."""
    task = bench.task(cell)
    return task if cell.skew == 1 else task.skewed(cell.skew, cell.limit)


def worst_group(decoder: Decoder, task: Task, shots: int | None, seed: int) -> tuple[Examples, Examples]:
    """The demonstrations with which few-shot does worst on held-out training rows, and these rows.
    Raises I2CLError if no rows remain to judge on.
    """
    groups = [task.sample(shots, 1_000_000 + GROUPS * seed + number) for number in range(GROUPS)]
    used = {example.text: example for group in groups for example in group}
    free = sum(example.text not in used for example in task.train)
    judged = task.held_out(max(1, min(JUDGED_ON, free)), list(used.values()), seed)
    (few_shot,) = make_methods(["few_shot"])
    worst = min(groups, key=lambda group: count_correct(few_shot.fit(decoder, task, group, seed), judged))
    return worst, judged


@dataclass(frozen=True)
class Move(Method):
    """Injects vector and coefficients of another task (paper, figure on transfer between tasks)."""

    name: ClassVar[str] = "move"
    summary: ClassVar[str] = "vector and coefficients of another task"

    source: Injection

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:  # noqa: ARG002
        """Nothing to fit; the protocol fixes the arguments."""
        return injected(self.source, decoder, task)


@dataclass(frozen=True, eq=False)
class Transfer(Method):
    """Calibrates again from related tasks; fit seconds are those of this second calibration."""

    name: ClassVar[str] = "transfer"
    summary: ClassVar[str] = "calibration from the average of related tasks"

    first: Injection
    anchors: Sequence[Injection]
    weights: dict[str, float] = field(default_factory=dict)  # of the anchors, by task, once it is fitted

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> PromptPredictor:
        """See `i2cl.injections.transfer.transfer`."""
        made = transfer(decoder, task, demonstrations, self.anchors, seed=seed, first=self.first)
        self.weights.update({self.anchors[place].task.name: weight for place, weight in made.weights})
        edit = made.injection.edit()
        cost = Cost.of(edit.values, trained=edit.coefficients.numel())
        return PromptPredictor(Questions(decoder, task), edit=edit, cost=cost)


def _method(bench: Bench, cell: Cell) -> Method:
    if cell.study == "method":
        return make_methods([cell.method], cell.options)[0]
    if cell.study == "move":
        return Move(bench.injection(plain(cell, cell.sources[0])))
    first = bench.injection(plain(cell, cell.task))
    return Transfer(first, [bench.injection(plain(cell, source)) for source in cell.sources])
