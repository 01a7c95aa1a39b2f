"""Accuracy, macro-F1 and cost of methods on tasks."""

import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.methods import Method, Predictor
from i2cl.models.decoder import Decoder
from i2cl.models.precision import quantization_of
from i2cl.models.scoring import Progress
from i2cl.tasks import Example, Task
from i2cl.version import __version__


@dataclass(frozen=True)
class Run:
    """One row of results.

    Attributes:
        model: as given at loading.
        task: name.
        method: name.
        seed: of demonstrations and of everything the method draws.
        shots: demonstrations per class.
        accuracy: share of queries whose best label is the right one.
        macro_f1: mean over classes of the F1 score.
        n: queries.
        fit_seconds: from demonstrations to a predictor.
        predict_seconds: for all queries, tokenisation included.
        cached_values: numbers kept per task for prediction.
        cached_bytes: the same in bytes.
        trainable_parameters: numbers trained.
        held_out: labelled examples used beyond the demonstrations.
        predictions: best label id of each query, in the order of ``Task.queries``.
        gold: right label id of each query.
        versions: of the software, and the device and precision it ran in.
    """

    model: str
    task: str
    method: str
    seed: int
    shots: int
    accuracy: float
    macro_f1: float
    n: int
    fit_seconds: float
    predict_seconds: float
    cached_values: int
    cached_bytes: int
    trainable_parameters: int
    held_out: int
    predictions: tuple[int, ...] = field(repr=False)
    gold: tuple[int, ...] = field(repr=False)
    versions: dict[str, str] = field(repr=False)

    def record(self) -> dict[str, Any]:
        """Plain values for JSON, without those of single queries."""
        return {name: value for name, value in asdict(self).items() if name not in ("predictions", "gold")}


def evaluate(
    decoder: Decoder,
    task: Task,
    method: Method,
    *,
    shots: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    demonstrations: Sequence[Example] | None = None,
    inspect: Callable[[Predictor], None] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Fit a method on demonstrations drawn with ``seed`` and score it on the task's queries.

    All seeds and methods see the same queries, so they can be compared in pairs.

    Args:
        decoder: the model.
        task: with its splits.
        method: see `i2cl.methods.make_methods`.
        shots: demonstrations per class; default: the task's own.
        seed: of demonstrations and method.
        limit: at most so many queries, near-uniform over classes.
        demonstrations: these, instead of ones drawn with ``seed``.
        inspect: called with what was fitted, after everything is measured.
        progress: called as queries finish.

    Raises:
        I2CLError: if demonstrations or queries are lacking, or the method cannot be fitted.
    """
    if demonstrations is None:
        demonstrations = task.sample(shots, seed)
    queries = task.queries(limit)
    if not queries:
        raise I2CLError(f"task {task.name!r} has no test rows: give it a test split")
    started = time.perf_counter()
    predictor = method.fit(decoder, task, demonstrations, seed)
    fitted = time.perf_counter()
    scores = predictor.scores([query.text for query in queries], progress)
    done = time.perf_counter()
    gold = np.array([query.label for query in queries])
    best = scores.argmax(-1).numpy()
    if inspect is not None:
        inspect(predictor)
    return Run(
        model=decoder.name,
        task=task.name,
        method=method.called,
        seed=seed,
        shots=len(demonstrations) // len(task.labels),
        accuracy=float((best == gold).mean()),
        macro_f1=macro_f1(gold, best, len(task.labels)),
        n=len(queries),
        fit_seconds=fitted - started,
        predict_seconds=done - fitted,
        cached_values=predictor.cached_values,
        cached_bytes=predictor.cached_bytes,
        trainable_parameters=predictor.trainable_parameters,
        held_out=predictor.held_out,
        predictions=tuple(best.tolist()),
        gold=tuple(gold.tolist()),
        versions=software(decoder),
    )


def with_metrics(
    injection: Injection, decoder: Decoder, queries: Sequence[Example], *, progress: Progress | None = None
) -> Injection:
    """The same injection, which also knows its accuracy and macro-F1 on held-out rows.

    Args:
        injection: calibrated.
        decoder: the model.
        queries: labelled rows that calibration did not see (`i2cl.Task.queries`).
        progress: called as queries finish.

    Raises:
        I2CLError: without queries, on an empty text, or a decoder of other sizes.
    """
    if not queries:
        raise I2CLError("no queries were given: at least one is needed")
    best = injection.scores(decoder, [query.text for query in queries], progress=progress).argmax(-1).numpy()
    gold = np.array([query.label for query in queries])
    accuracy, f1 = float((best == gold).mean()), macro_f1(gold, best, len(injection.task.labels))
    return replace(injection, metrics={"accuracy": accuracy, "macro_f1": f1, "n": len(queries)})


def macro_f1(gold: Int[np.ndarray, " n"], best: Int[np.ndarray, " n"], classes: int) -> float:
    """Mean F1 over all classes of the task; a class that neither occurs nor is predicted counts as 0.

    The same as scikit-learn's ``f1_score(average="macro", labels=range(classes), zero_division=0)``.
    """
    table = np.zeros((classes, classes))
    np.add.at(table, (gold, best), 1)
    both = table.sum(0) + table.sum(1)
    return float((2 * table.diagonal() / np.maximum(both, 1)).mean())


def software(decoder: Decoder) -> dict[str, str]:
    """Versions, device and precision that a result depends on."""
    packages = {"i2cl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    precision = [str(decoder.model.dtype).removeprefix("torch."), quantization_of(decoder.model.config)]
    where = {"device": str(decoder.device), "dtype": ", ".join(filter(None, precision))}
    return {"python": platform.python_version(), **packages, **where, "threads": str(torch.get_num_threads())}


@dataclass(frozen=True)
class Summary:
    """Runs of one task and method over seeds (standard deviation with n - 1, as 0 for one seed)."""

    task: str
    method: str
    seeds: int
    n: int
    accuracy: float
    accuracy_sd: float
    macro_f1: float
    fit_seconds: float
    milliseconds_per_query: float
    cached_values: int


def summarize(runs: Iterable[Run]) -> list[Summary]:
    """One summary per task and method, in order of first appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task, run.method), []).append(run)
    return [_summary(group) for group in groups.values()]


def _summary(runs: Sequence[Run]) -> Summary:
    accuracies = [run.accuracy for run in runs]
    return Summary(
        task=runs[0].task,
        method=runs[0].method,
        seeds=len(runs),
        n=runs[0].n,
        accuracy=float(np.mean(accuracies)),
        accuracy_sd=float(np.std(accuracies, ddof=1)) if len(runs) > 1 else 0.0,
        macro_f1=float(np.mean([run.macro_f1 for run in runs])),
        fit_seconds=float(np.mean([run.fit_seconds for run in runs])),
        milliseconds_per_query=float(np.mean([1000 * run.predict_seconds / run.n for run in runs])),
        cached_values=runs[0].cached_values,
    )
