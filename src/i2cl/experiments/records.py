"""What is kept of a cell that was run: results, predictions and where they come from."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from i2cl.experiments.grid import Cell


class Outcome(BaseModel):
    """What came out of a cell.

    Attributes:
        accuracy: share of queries whose best label is the right one.
        macro_f1: mean over classes of the F1 score.
        gold: right label id of each query.
        predictions: best label id of each query, in the same order.
        labels: label words, by id.
        demonstrations: places of the demonstrations in the training split.
        fit_seconds: from demonstrations to a predictor.
        predict_seconds: for all queries.
        trainable_parameters: numbers trained.
        cached_values: numbers kept for prediction.
        cached_bytes: the same in bytes.
        held_out: labelled examples used beyond the demonstrations.
        coefficients: [layer][(mha, mlp)][(lambda, beta)] of what was injected, if anything was.
        weights: of the related tasks that a transfer averaged, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accuracy: float
    macro_f1: float
    gold: tuple[int, ...]
    predictions: tuple[int, ...]
    labels: tuple[str, ...]
    demonstrations: tuple[int, ...]
    fit_seconds: float
    predict_seconds: float
    trainable_parameters: int
    cached_values: int
    cached_bytes: int
    held_out: int
    coefficients: list[list[list[float]]] | None = None
    weights: dict[str, float] = Field(default_factory=dict)


class Record(BaseModel):
    """One line of a store.

    Attributes:
        key: of the cell.
        cell: what was run.
        status: whether it ended well.
        outcome: results, where it did.
        error: what went wrong, where it did not.
        started: UTC time, ISO 8601.
        peak_memory_bytes: the most that the device's allocator held (CUDA), or that the process ever
            held up to then (CPU).
        provenance: versions, git commit, device, dtype, threads, weights fingerprint, kind of machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    cell: Cell
    status: Literal["done", "failed"]
    outcome: Outcome | None = None
    error: str | None = None
    started: str
    peak_memory_bytes: int = 0
    provenance: dict[str, Any] = Field(default_factory=dict)
