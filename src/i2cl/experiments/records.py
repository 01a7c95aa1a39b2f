"""What is kept of a cell that was run: results, predictions and where they come from."""

import base64
import binascii
from dataclasses import asdict, fields
from typing import Any, Literal, Self

import numpy as np
import pydantic
from jaxtyping import Float
from pydantic import Field, field_validator, model_validator

from i2cl.experiments.confidence import NAMES, Confidence, confidence
from i2cl.experiments.grid import Cell, Frozen
from i2cl.injections.temperature import normalised
from i2cl.methods import Cost

# The numbers of a `Cost` under the names that they have in files.
COUNTS = {"trainable_parameters" if one.name == "trained" else one.name: one.name for one in fields(Cost)}

TOLD_BY_RECORD = {"model", "task", "method", "seed", "versions"}
"""What a line of a store holds beside the run's own numbers."""


class Scores(Frozen):
    """Log-probabilities among the labels in half precision, as text that JSON holds.

    ``numpy.frombuffer(base64.b64decode(float16), "<f2").reshape(shape)`` reads them without this package.

    Attributes:
        shape: queries and labels.
        float16: base64 of the little-endian numbers, query by query.
    """

    shape: tuple[int, int]
    float16: str = Field(repr=False)

    @classmethod
    def of(cls, scores: Float[np.ndarray, "queries labels"]) -> Self:
        """Scores of any kind, as log-probabilities; what is below half precision is its least number."""
        kept = np.maximum(normalised(scores), np.finfo(np.float16).min).astype("<f2")
        return cls(shape=(len(kept), kept.shape[1]), float16=base64.b64encode(kept.tobytes()).decode())

    @property
    def array(self) -> Float[np.ndarray, "queries labels"]:
        """As numbers of double precision."""
        return np.frombuffer(base64.b64decode(self.float16), "<f2").reshape(self.shape).astype(float)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        try:
            held = np.frombuffer(base64.b64decode(self.float16, validate=True), "<f2")
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"scores are no base64 of half-precision numbers: {error}") from None
        if min(self.shape) < 1 or held.size != self.shape[0] * self.shape[1]:
            raise ValueError(f"scores are {held.size} numbers, not {self.shape[0]} x {self.shape[1]}")
        if not np.isfinite(held).all():
            raise ValueError("scores are not all finite")
        return self


class Run(Frozen):
    """One row of results: a method fitted with one seed and scored on a task's queries.

    In files the numbers of its cost stand one by one, see `COUNTS`.

    Attributes:
        model: as given at loading.
        task: name.
        method: name.
        seed: of demonstrations and of everything the method draws.
        accuracy: share of queries whose best label is the right one.
        macro_f1: mean over classes of the F1 score.
        gold: right label id of each query, in the order of ``Task.queries``.
        predictions: best label id of each query, in the same order.
        scores: of each query and label; None for a run that kept none.
        labels: label words, by id.
        demonstrations: places of the demonstrations in the training split, None for one from elsewhere.
        fit_seconds: from demonstrations to a predictor; an equal share of the time where several seeds
            were fitted together.
        predict_seconds: for all queries, tokenisation included.
        together: how many seeds were fitted together.
        cost: numbers trained and kept, labelled examples used beyond the demonstrations.
        coefficients: [layer][(mha, mlp)][(lambda, beta)] of what was injected, if anything was.
        weights: of the related tasks that a transfer averaged, by name.
        versions: of the software, and the device and precision it ran in; empty for one read from a
            store, whose record has them as its provenance.
    """

    model: str
    task: str
    method: str
    seed: int
    accuracy: float
    macro_f1: float
    gold: tuple[int, ...] = Field(repr=False)
    predictions: tuple[int, ...] = Field(repr=False)
    scores: Scores | None = Field(None, repr=False)
    labels: tuple[str, ...] = Field(repr=False)
    demonstrations: tuple[int | None, ...] = Field(repr=False)
    fit_seconds: float
    predict_seconds: float
    together: int = 1
    cost: Cost
    coefficients: list[list[list[float]]] | None = Field(None, repr=False)
    weights: dict[str, float] = Field(default_factory=dict, repr=False)
    versions: dict[str, str] = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        ids = (*self.gold, *self.predictions)
        if len(self.gold) != len(self.predictions) or not ids:
            raise ValueError(f"{len(self.gold)} gold labels for {len(self.predictions)} predictions")
        if not 0 <= min(ids) <= max(ids) < len(self.labels):
            raise ValueError(f"a label id is not one of 0 to {len(self.labels) - 1}")
        wanted = (len(self.gold), len(self.labels))
        if self.scores is not None and self.scores.shape != wanted:
            raise ValueError(f"scores of {self.scores.shape} for queries and labels {wanted}")
        return self

    @property
    def n(self) -> int:
        """Queries."""
        return len(self.gold)

    @property
    def shots(self) -> int:
        """Demonstrations per class."""
        return len(self.demonstrations) // len(self.labels)

    @property
    def confidence(self) -> Confidence | None:
        """How far its probabilities can be trusted, where it kept them."""
        if self.scores is None:
            return None
        return confidence(self.scores.array, np.array(self.gold), np.array(self.predictions))

    def record(self) -> dict[str, Any]:
        """Plain values for JSON, without those of single queries, demonstrations and layers."""
        single = {"gold", "predictions", "scores", "labels", "demonstrations", "coefficients", "weights"}
        measures = self.confidence
        trust = asdict(measures) if measures is not None else dict.fromkeys(NAMES)
        return {**self.model_dump(exclude=single), **trust, "n": self.n, "shots": self.shots}

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "cost" in data:
            return data
        cost = {COUNTS[name]: value for name, value in data.items() if name in COUNTS}
        return {name: value for name, value in data.items() if name not in COUNTS} | {"cost": cost}

    @pydantic.model_serializer(mode="wrap")
    def _spread(self, write: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        cost = values.pop("cost")
        return values | {name: cost[field] for name, field in COUNTS.items()}


class Record(Frozen):
    """One line of a store."""

    key: str  # of the cell
    cell: Cell  # what was run
    # whether it ended well, or was skipped since its method needs another model
    status: Literal["done", "failed", "skipped"]
    # results, where it ended well; a line holds model, task, method and seed once, in its cell
    outcome: Run | None = None
    error: str | None = None  # what went wrong, or why it was skipped, where it did not
    started: str  # UTC time, ISO 8601
    # the most that the device's allocator held (CUDA), or that the process ever held up to then (CPU)
    peak_memory_bytes: int = 0
    # versions, git commit, device, dtype, threads, weights fingerprint, kind of machine
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if self.key != self.cell.key:
            raise ValueError(f"the key {self.key!r} is not that of its cell, {self.cell.key!r}")
        if (self.outcome is None) != (self.status != "done"):
            which = "no" if self.outcome is None else "an"
            raise ValueError(f"a cell that is {self.status} has {which} outcome")
        return self

    @field_validator("outcome", mode="before")
    @classmethod
    def _of_the_cell(cls, outcome: Any, info: pydantic.ValidationInfo) -> Any:
        cell = info.data.get("cell")
        if not isinstance(outcome, dict) or cell is None:
            return outcome
        method = cell.method if cell.study == "method" else cell.study
        return {"model": cell.model, "task": cell.task, "method": method, "seed": cell.seed} | outcome
