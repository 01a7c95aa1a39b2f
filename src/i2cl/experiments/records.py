"""Records of a store: results and predictions of a cell, and the software and hardware that made them."""

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
from i2cl.injections.temperature import log_softmax
from i2cl.methods import Cost

# JSON field -> field of `Cost`
COUNTS = {
    "trainable_parameters" if count.name == "trained" else count.name: count.name for count in fields(Cost)
}

STORED_IN_CELL = {"model", "task", "method", "seed", "versions"}
"""Fields of `Run` that a stored `Record` omits, because its cell and its provenance have them."""


class Scores(Frozen):
    """Label log-probabilities of shape (queries, labels), stored as base64 of float16.

    To read them without this package, use
    ``numpy.frombuffer(base64.b64decode(float16), "<f2").reshape(shape)``.

    Attributes:
        shape: numbers of queries and labels.
        float16: base64 of the little-endian array in C order.
    """

    shape: tuple[int, int]
    float16: str = Field(repr=False)

    @classmethod
    def of(cls, scores: Float[np.ndarray, "queries labels"]) -> Self:
        """Convert scores to log-probabilities in float16; values below its range become its minimum."""
        clipped = np.maximum(log_softmax(scores), np.finfo(np.float16).min).astype("<f2")
        return cls(
            shape=(len(clipped), clipped.shape[1]), float16=base64.b64encode(clipped.tobytes()).decode()
        )

    @property
    def array(self) -> Float[np.ndarray, "queries labels"]:
        """The log-probabilities as float64."""
        return np.frombuffer(base64.b64decode(self.float16), "<f2").reshape(self.shape).astype(float)

    @model_validator(mode="after")
    def _check_array(self) -> Self:
        try:
            values = np.frombuffer(base64.b64decode(self.float16, validate=True), "<f2")
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"scores are not base64 of float16 numbers: {error}") from None
        if min(self.shape) < 1 or values.size != self.shape[0] * self.shape[1]:
            raise ValueError(f"scores are {values.size} numbers, not {self.shape[0]} x {self.shape[1]}")
        if not np.isfinite(values).all():
            raise ValueError("scores are not all finite")
        return self


class Run(Frozen):
    """Result of one method on one task: fitted with one seed, and scored on the task's queries.

    In JSON, the fields of ``cost`` are top-level fields, see `COUNTS`.

    Attributes:
        model: name or path that the model was loaded from.
        task: name.
        method: name.
        seed: seed of the draw and of the fit.
        accuracy: share of queries whose predicted label is the gold label.
        macro_f1: mean F1 over classes.
        gold: gold label id of each query, in the order of ``Task.queries``.
        predictions: predicted label id of each query, in the same order.
        scores: label log-probabilities of the queries; None if they were not stored.
        labels: label words, by id.
        demonstrations: indices of the demonstrations in the training split; None for one from elsewhere.
        fit_seconds: duration of the fit; an equal share of it if several seeds were fitted in one call.
        predict_seconds: duration of the prediction of all queries, tokenization included.
        together: number of seeds that were fitted in one call; above 1 in older stores only.
        cost: numbers trained and stored, and labelled examples used beyond the demonstrations.
        coefficients: [layer][(mha, mlp)][(lambda, beta)] of the injected edit; None if there is none.
        weights: weight of each related task in a transfer, by name.
        versions: software versions, device and precision; empty for a run read from a store, whose record
            has them as its provenance.
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
    def _check_labels(self) -> Self:
        ids = (*self.gold, *self.predictions)
        if len(self.gold) != len(self.predictions) or not ids:
            raise ValueError(f"{len(self.gold)} gold labels for {len(self.predictions)} predictions")
        if not 0 <= min(ids) <= max(ids) < len(self.labels):
            raise ValueError(f"a label id is not one of 0 to {len(self.labels) - 1}")
        expected = (len(self.gold), len(self.labels))
        if self.scores is not None and self.scores.shape != expected:
            raise ValueError(
                f"scores have shape {self.scores.shape}, expected (queries, labels) = {expected}"
            )
        return self

    @property
    def n(self) -> int:
        """Number of queries."""
        return len(self.gold)

    @property
    def shots(self) -> int:
        """Demonstrations per class."""
        return len(self.demonstrations) // len(self.labels)

    @property
    def confidence(self) -> Confidence | None:
        """Calibration metrics; None if the scores were not stored."""
        if self.scores is None:
            return None
        return confidence(self.scores.array, np.array(self.gold), np.array(self.predictions))

    def record(self) -> dict[str, Any]:
        """Return the summary fields as a JSON object, without values per query, demonstration and layer."""
        detailed = {"gold", "predictions", "scores", "labels", "demonstrations", "coefficients", "weights"}
        confidence = self.confidence
        metrics = asdict(confidence) if confidence is not None else dict.fromkeys(NAMES)
        return {**self.model_dump(exclude=detailed), **metrics, "n": self.n, "shots": self.shots}

    @model_validator(mode="before")
    @classmethod
    def _nest_cost(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "cost" in data:
            return data
        cost = {COUNTS[name]: value for name, value in data.items() if name in COUNTS}
        return {name: value for name, value in data.items() if name not in COUNTS} | {"cost": cost}

    @pydantic.model_serializer(mode="wrap")
    def _flatten_cost(self, serialize: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self)
        cost = values.pop("cost")
        return values | {name: cost[field] for name, field in COUNTS.items()}


class Record(Frozen):
    """One line of a store."""

    key: str  # `Cell.key` of the cell
    cell: Cell
    status: Literal["done", "failed", "skipped"]  # skipped: the method needs another model
    outcome: Run | None = None  # result of a cell that is done; its `STORED_IN_CELL` fields are not written
    error: str | None = None  # error message of a failed cell, or the reason for skipping it
    started: str  # UTC time, ISO 8601
    # peak of the CUDA allocator during the cell, or of the whole process so far (CPU)
    peak_memory_bytes: int = 0
    # versions, git commit, device, dtype, threads, hash of the weights, kind of machine
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.key != self.cell.key:
            raise ValueError(f"the key is {self.key!r}, but the key of its cell is {self.cell.key!r}")
        if (self.outcome is None) != (self.status != "done"):
            article = "no" if self.outcome is None else "an"
            raise ValueError(f"a cell that is {self.status} has {article} outcome")
        return self

    @field_validator("outcome", mode="before")
    @classmethod
    def _add_cell_fields(cls, outcome: Any, info: pydantic.ValidationInfo) -> Any:
        cell = info.data.get("cell")
        if not isinstance(outcome, dict) or cell is None:
            return outcome
        method = cell.method if cell.study == "method" else cell.study
        return {"model": cell.model, "task": cell.task, "method": method, "seed": cell.seed} | outcome
