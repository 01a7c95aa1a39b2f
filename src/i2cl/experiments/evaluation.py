"""Evaluate methods on tasks: accuracy, macro-F1, calibration metrics and cost."""

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, failure_reason, require_type
from i2cl.experiments.confidence import Confidence, mean_confidence
from i2cl.experiments.records import Run, Scores
from i2cl.experiments.workers import DecoderSource, run_jobs
from i2cl.methods import Cost, Method, Predictor
from i2cl.methods.base import LabelScores
from i2cl.methods.postprocessing import PostProcessedPredictor, Wrapper
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.precision import dtype_name, quantization_of
from i2cl.models.scoring import Progress, require_decoder_and_task
from i2cl.tasks import Example, Examples, Task
from i2cl.version import __version__


@dataclass(frozen=True)
class Fitted:
    """A method fitted with one seed.

    Attributes:
        method: the method that was fitted.
        predictor: the result of the fit.
        demonstrations: the rows it was fitted to.
        seed: seed of the fit.
        seconds: duration of the fit.
        held_out: number of labelled rows used to choose the demonstrations.
    """

    method: Method
    predictor: Predictor
    demonstrations: tuple[Example, ...]
    seed: int
    seconds: float
    held_out: int = 0

    @property
    def injection(self) -> Injection | None:
        """The injection, or None if the method does not predict with one."""
        return self.predictor.injection if isinstance(self.predictor, PromptPredictor) else None


def fit_method(decoder: Decoder, task: Task, method: Method, demonstrations: Examples, seed: int) -> Fitted:
    """Fit a method and time it. Raises I2CLError if it cannot be fitted."""
    started = time.perf_counter()
    predictor = method.fit(decoder, task, demonstrations, seed)
    return Fitted(method, predictor, tuple(demonstrations), seed, time.perf_counter() - started)


def innermost(method: Method) -> Method:
    """Return the method inside all wrappers, or the method itself if it is not wrapped."""
    return innermost(method.inner) if isinstance(method, Wrapper) else method


def fit_wrappers(decoder: Decoder, method: Method, fitted: Fitted, task: Task) -> Fitted:
    """Fit a method's wrappers, given the fit of its `innermost` method.

    The seconds of the result include the innermost fit. Raises I2CLError if a wrapper cannot be fitted.
    """
    if not isinstance(method, Wrapper):
        return fitted
    inner = fit_wrappers(decoder, method.inner, fitted, task)
    started = time.perf_counter()
    predictor = method.wrap(decoder, inner.predictor, task, inner.demonstrations, inner.seed)
    seconds = inner.seconds + time.perf_counter() - started
    return replace(inner, method=method, predictor=predictor, seconds=seconds)


class SharedScores:
    """Scores of predictors for the same queries, so that a wrapper reuses those of its inner predictor."""

    def __init__(self) -> None:
        self._scored: list[tuple[Predictor, LabelScores, float]] = []

    def of(
        self, predictor: Predictor, texts: Sequence[str], progress: Progress | None = None
    ) -> tuple[LabelScores, float]:
        """Return a predictor's scores, and the seconds that it takes to compute them from the texts."""
        for known, scores, seconds in self._scored:
            if known is predictor:
                if progress is not None:
                    progress(len(texts))
                return scores, seconds
        before = 0.0
        if isinstance(predictor, PostProcessedPredictor):
            inner, before = self.of(predictor.inner, texts, progress)
            started = time.perf_counter()
            scores = predictor.process(inner, texts)
        else:
            started = time.perf_counter()
            scores = predictor.log_probs(texts, progress)
        seconds = before + time.perf_counter() - started
        self._scored.append((predictor, scores, seconds))
        return scores, seconds


def measure(
    decoder: Decoder,
    task: Task,
    fitted: Fitted,
    queries: Examples,
    progress: Progress | None = None,
    shared: SharedScores | None = None,
) -> Run:
    """Score a fitted method on labelled queries.

    ``shared`` holds the scores of other methods for these queries, and receives those of this one. Raises
    I2CLError for a multi-label task, and for scores that are NaN or not of shape (texts, labels).
    """
    task.require_single_label("a comparison of methods", "`i2cl fit` evaluates it")
    texts = [query.text for query in queries]
    scores, seconds = (shared or SharedScores()).of(fitted.predictor, texts, progress)
    scores = torch.as_tensor(scores).detach().double()
    name, shape, expected = fitted.method.full_name, tuple(scores.shape), (len(texts), len(task.labels))
    if shape != expected:
        raise I2CLError(
            f"{name}: log_probs returned scores of shape {shape}: return (texts, labels) = {expected}"
        )
    if scores.softmax(-1).isnan().any():
        raise I2CLError(f"{name}: log_probs returned NaN, or only -inf for a text: return log-probabilities")
    gold = np.array([query.label for query in queries])
    best = scores.argmax(-1).numpy()
    indices = {example: index for index, example in reversed(list(enumerate(task.train)))}
    return Run(
        model=decoder.name,
        task=task.name,
        method=name,
        seed=fitted.seed,
        accuracy=float((best == gold).mean()),
        macro_f1=macro_f1(gold, best, len(task.labels)),
        gold=tuple(gold.tolist()),
        predictions=tuple(best.tolist()),
        scores=Scores.of(scores.numpy()),
        labels=tuple(task.labels),
        demonstrations=tuple(indices.get(example) for example in fitted.demonstrations),
        fit_seconds=fitted.seconds,
        predict_seconds=seconds,
        cost=fitted.predictor.cost + Cost(held_out=fitted.held_out),
        coefficients=fitted.injection.coefficients.tolist() if fitted.injection else None,
        versions=software(decoder),
    )


def evaluate(
    decoder: Decoder,
    task: Task,
    method: Method,
    *,
    shots: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    demonstrations: Examples | None = None,
    progress: Progress | None = None,
) -> Run:
    """Fit a method on demonstrations drawn with ``seed`` and score it on the task's queries.

    All seeds and methods get the same queries, so their results are paired.

    Args:
        decoder: the frozen model.
        task: with its rows.
        method: the method to evaluate.
        shots: demonstrations per class. Default: the task's own number.
        seed: seed of the draw and of the fit.
        limit: maximum number of queries, spread nearly uniformly over the classes. Default: all.
        demonstrations: rows to fit instead of drawn ones.
        progress: called as queries finish.

    Raises:
        I2CLError: if an argument has the wrong type, there are too few rows to draw from, or the method
            cannot be fitted.
    """
    require_decoder_and_task(decoder, task)
    require_type("method", method, Method, "make one with make_methods")
    if demonstrations is None:
        demonstrations = task.sample(shots, seed)
    queries = task.queries(limit)
    fitted = fit_method(decoder, task, method, demonstrations, seed)
    return measure(decoder, task, fitted, queries, progress)


@dataclass(frozen=True)
class NotRun:
    """A method that could not be run with one seed, and the reason."""

    task: str
    method: str
    seed: int
    reason: str

    def record(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {"task": self.task, "method": self.method, "seed": self.seed, "not_run": self.reason}


@dataclass(frozen=True)
class Evaluation:
    """A job for `run_jobs`: evaluate methods that share one fit, on one task with one seed.

    Attributes:
        task: with its rows.
        methods: wrappers of the same `innermost` method, which is fitted once.
        seed: seed of the draw and of the fit.
        shots: demonstrations per class; None for the task's own number.
        limit: maximum number of queries; None for all.
    """

    task: Task
    methods: tuple[Method, ...]
    seed: int
    shots: int | None = None
    limit: int | None = None

    def run(self, decoder: Decoder) -> list[Run | NotRun]:
        """Run every method; those that fail are returned as `NotRun`."""
        queries = self.task.queries(self.limit)
        runs: list[Run | NotRun] = []
        shared = SharedScores()
        with self._record_failures(runs, self.methods):
            demonstrations = self.task.sample(self.shots, self.seed)
            fitted = fit_method(decoder, self.task, innermost(self.methods[0]), demonstrations, self.seed)
            for method in self.methods:
                with self._record_failures(runs, [method]):
                    wrapped = fit_wrappers(decoder, method, fitted, self.task)
                    runs.append(measure(decoder, self.task, wrapped, queries, shared=shared))
        return runs

    @contextmanager
    def _record_failures(self, runs: list[Run | NotRun], methods: Sequence[Method]) -> Iterator[None]:
        """Add a `NotRun` for each of the methods if the block fails."""
        try:
            yield
        except (I2CLError, RuntimeError) as error:
            if (reason := failure_reason(error)) is None:
                raise
            runs += [NotRun(self.task.name, method.full_name, self.seed, reason) for method in methods]


def sweep(
    source: DecoderSource,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    seeds: Sequence[int],
    *,
    shots: int | None = None,
    limit: int | None = None,
    workers: int | None = None,
    reword: Callable[[Task, Decoder], Task] | None = None,
    on_run: Callable[[Run], None] | None = None,
    on_failure: Callable[[NotRun], None] | None = None,
) -> list[Run]:
    """Evaluate every method on every task with every seed.

    Methods that share a fit, such as one with and without a label prior, are fitted once.

    Args:
        source: loads the model.
        tasks: with their rows.
        methods: the methods to compare.
        seeds: seeds of the draws and fits.
        shots: demonstrations per class. Default: each task's own number.
        limit: maximum number of queries per task. Default: all.
        workers: number of processes, see `run_jobs`.
        reword: changes the wording of a task for the loaded model, such as to its chat template.
        on_run: called with each finished run, in any order.
        on_failure: called with each method that fails; the others continue. Without it, the first failure
            is raised.

    Returns:
        The runs, ordered by task, method and seed.

    Raises:
        I2CLError: if a task has too few rows (before the model is loaded), or if a method fails; with
            ``on_failure``, only if no run succeeds.
    """
    for task in tasks:
        task.require_single_label("a comparison of methods", "`i2cl fit` evaluates it")
        task.sample(shots, seeds[0])
        task.queries(limit)
    decoder = source()
    if reword is not None:
        tasks = [reword(task, decoder) for task in tasks]
    fits: dict[Method, list[Method]] = {}
    for method in methods:
        fits.setdefault(innermost(method), []).append(method)
    jobs = [
        Evaluation(task, tuple(wrappers), seed, shots, limit).run
        for task in tasks
        for wrappers in fits.values()
        for seed in seeds
    ]
    runs: list[Run] = []
    failures: list[NotRun] = []
    for run in chain.from_iterable(run_jobs(decoder, source, jobs, workers)):
        if isinstance(run, NotRun):
            if on_failure is None:
                raise I2CLError(run.reason)
            failures.append(run)
            on_failure(run)
            continue
        runs.append(run)
        if on_run is not None:
            on_run(run)
    if failures and not runs:
        raise I2CLError(failures[0].reason)
    task_names, method_names = [task.name for task in tasks], [method.full_name for method in methods]

    def position(run: Run) -> tuple[int, int, int]:
        return task_names.index(run.task), method_names.index(run.method), seeds.index(run.seed)

    return sorted(runs, key=position)


def macro_f1(gold: Int[np.ndarray, " n"], predictions: Int[np.ndarray, " n"], classes: int) -> float:
    """Return the mean F1 over classes, like scikit-learn's ``f1_score`` with ``zero_division=0``."""
    table = np.zeros((classes, classes))
    np.add.at(table, (gold, predictions), 1)
    return float((2 * table.diagonal() / np.maximum(table.sum(0) + table.sum(1), 1)).mean())


def software(decoder: Decoder) -> dict[str, str]:
    """Return the software versions, device, precision and thread count that a result depends on."""
    packages = {"i2cl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    precision = [dtype_name(decoder.model.dtype), quantization_of(decoder.model.config)]
    where = {"device": str(decoder.device), "dtype": ", ".join(filter(None, precision))}
    return {"python": platform.python_version(), **packages, **where, "threads": str(torch.get_num_threads())}


@dataclass(frozen=True)
class Summary:
    """Means over the seeds of one method on one task.

    Attributes:
        task: name.
        method: name.
        seeds: number of seeds.
        n: number of queries.
        accuracy: mean accuracy, from 0 to 1.
        accuracy_sd: its sample standard deviation over seeds; 0 for one seed.
        macro_f1: mean macro-F1.
        fit_seconds: mean duration of a fit.
        milliseconds_per_query: mean duration of a prediction.
        cached_values: numbers stored per task for prediction.
        confidence: mean calibration metrics; None if a run has no scores.
    """

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
    confidence: Confidence | None = None


def summarize(runs: Iterable[Run]) -> list[Summary]:
    """Summarize runs by task and method, in order of first appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task, run.method), []).append(run)
    return [
        Summary(
            task=task,
            method=method,
            seeds=len(group),
            n=group[0].n,
            accuracy=float(np.mean([run.accuracy for run in group])),
            accuracy_sd=float(np.std([run.accuracy for run in group], ddof=1)) if len(group) > 1 else 0.0,
            macro_f1=float(np.mean([run.macro_f1 for run in group])),
            fit_seconds=float(np.mean([run.fit_seconds for run in group])),
            milliseconds_per_query=float(np.mean([1000 * run.predict_seconds / run.n for run in group])),
            cached_values=group[0].cost.cached_values,
            confidence=mean_confidence([run.confidence for run in group]),
        )
        for (task, method), group in groups.items()
    ]
