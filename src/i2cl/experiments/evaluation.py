"""Accuracy, macro-F1, confidence and cost of methods on tasks."""

import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
import transformers
from jaxtyping import Int

from i2cl.core.edits import LinearEdit
from i2cl.errors import OUT_OF_MEMORY, I2CLError, is_out_of_memory
from i2cl.experiments.confidence import Confidence, mean_confidence
from i2cl.experiments.records import Run, Scores
from i2cl.experiments.workers import DecoderSource, run_jobs
from i2cl.methods import Cost, Method, Predictor
from i2cl.methods.base import Wrapper
from i2cl.methods.compressors.base import NoCompressorError
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.precision import dtype_name, quantization_of
from i2cl.models.scoring import Progress
from i2cl.tasks import Example, Examples, Task
from i2cl.version import __version__


@dataclass(frozen=True)
class Fitted:
    """A method fitted with one seed; ``seconds`` are an equal share where seeds were fitted ``together``,
    ``held_out`` is how many rows chose its demonstrations.
    """

    method: Method
    predictor: Predictor
    demonstrations: tuple[Example, ...]
    seed: int
    seconds: float
    together: int = 1
    held_out: int = 0

    @property
    def injected(self) -> LinearEdit | None:
        """The injection that it predicts under, if that is what the method does."""
        edit = self.predictor.edit if isinstance(self.predictor, PromptPredictor) else None
        return edit if isinstance(edit, LinearEdit) else None


def fit_seeds(
    decoder: Decoder, task: Task, method: Method, demonstrations: Sequence[Examples], seeds: Sequence[int]
) -> list[Fitted]:
    """Fit a method with some seeds in one call; raises I2CLError as `i2cl.methods.Method.fit_many` does."""
    started = time.perf_counter()
    predictors = method.fit_many(decoder, task, demonstrations, seeds)
    seconds = (time.perf_counter() - started) / len(seeds)
    return [
        Fitted(method, predictor, tuple(shown), seed, seconds, len(seeds))
        for predictor, shown, seed in zip(predictors, demonstrations, seeds, strict=True)
    ]


def bottom(method: Method) -> Method:
    """What a method's wrappers stand on in the end; the method itself, if it is none."""
    return bottom(method.inner) if isinstance(method, Wrapper) else method


def on_top(decoder: Decoder, method: Method, fitted: Fitted, task: Task) -> Fitted:
    """A method's wrappers on what its `bottom` is fitted to, timed together; raises I2CLError as `over`."""
    if not isinstance(method, Wrapper):
        return fitted
    below = on_top(decoder, method.inner, fitted, task)
    started = time.perf_counter()
    predictor = method.wrap(decoder, below.predictor, task, below.demonstrations, below.seed)
    seconds = below.seconds + time.perf_counter() - started
    return replace(below, method=method, predictor=predictor, seconds=seconds)


def measure(
    decoder: Decoder, task: Task, fitted: Fitted, queries: Examples, progress: Progress | None = None
) -> Run:
    """Score what was fitted on queries."""
    started = time.perf_counter()
    scores = fitted.predictor.scores([query.text for query in queries], progress)
    seconds = time.perf_counter() - started
    gold = np.array([query.label for query in queries])
    best = scores.argmax(-1).numpy()
    places = {example: place for place, example in reversed(list(enumerate(task.train)))}
    return Run(
        model=decoder.name,
        task=task.name,
        method=fitted.method.called,
        seed=fitted.seed,
        accuracy=float((best == gold).mean()),
        macro_f1=macro_f1(gold, best, len(task.labels)),
        gold=tuple(gold.tolist()),
        predictions=tuple(best.tolist()),
        scores=Scores.of(scores.double().numpy()),
        labels=tuple(task.labels),
        demonstrations=tuple(places.get(example) for example in fitted.demonstrations),
        fit_seconds=fitted.seconds,
        predict_seconds=seconds,
        together=fitted.together,
        cost=fitted.predictor.cost + Cost(held_out=fitted.held_out),
        coefficients=fitted.injected.coefficients.tolist() if fitted.injected else None,
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

    All seeds and methods see the same queries, so they can be compared in pairs. ``shots`` are per class, by
    default the task's own; ``limit`` is the most queries, near-uniform over classes; ``demonstrations`` stand
    instead of drawn ones; ``progress`` is called as queries finish. Raises I2CLError if demonstrations or
    queries are lacking, or the method cannot be fitted.
    """
    shown = task.sample(shots, seed) if demonstrations is None else demonstrations
    queries = task.queries(limit)
    (fitted,) = fit_seeds(decoder, task, method, [shown], [seed])
    return measure(decoder, task, fitted, queries, progress)


class SkippedWarning(UserWarning):
    """A method was left out, since it needs another model."""


@dataclass(frozen=True)
class NotRun:
    """A method that could not be run with one seed, and why."""

    task: str
    method: str
    seed: int
    why: str

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"task": self.task, "method": self.method, "seed": self.seed, "not_run": self.why}


@dataclass(frozen=True)
class Evaluation:
    """Methods that stand on one fit, on a task with some seeds: a job for `run_jobs`.
    The methods are equal but for the wrappers on top (`bottom`). With ``skip``, those that need another model
    are left out with a `SkippedWarning`; if it ``goes_on``, one that cannot be run is told as a `NotRun`.
    """

    task: Task
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    shots: int | None = None
    limit: int | None = None
    skip: bool = False
    goes_on: bool = False

    def run(self, decoder: Decoder) -> list[Run | NotRun]:
        """One run for each seed and method. Raises I2CLError as `evaluate` does, unless it goes on."""
        queries = self.task.queries(self.limit)
        runs: list[Run | NotRun] = []
        try:
            together = self._together(decoder)
            for seed in self.seeds:
                with self._refusals(runs, seed, self.methods):
                    fitted = together.get(seed) or self._fits(decoder, [seed])[0]
                    for method in self.methods:
                        with self._refusals(runs, seed, [method]):
                            top = on_top(decoder, method, fitted, self.task)
                            runs.append(measure(decoder, self.task, top, queries))
        except NoCompressorError as lacking:
            if not self.skip:
                raise
            warnings.warn(f"left out: {lacking}", SkippedWarning, stacklevel=2)
            return []
        return runs

    @contextmanager
    def _refusals(self, runs: list[Run | NotRun], seed: int, methods: Sequence[Method]) -> Iterator[None]:
        """Add what cannot be run, where others are to go on."""
        try:
            yield
        except (I2CLError, RuntimeError) as error:
            lacking = isinstance(error, NoCompressorError) and self.skip
            ours = isinstance(error, I2CLError) or is_out_of_memory(error)
            if lacking or not (self.goes_on and ours):
                raise
            why = str(error) if isinstance(error, I2CLError) else OUT_OF_MEMORY
            runs += [NotRun(self.task.name, method.called, seed, why) for method in methods]

    def _together(self, decoder: Decoder) -> dict[int, Fitted]:
        if bottom(self.methods[0]).joint and len(self.seeds) > 1:
            with suppress(I2CLError):  # by itself, each seed tells its own
                return dict(zip(self.seeds, self._fits(decoder, self.seeds), strict=True))
        return {}

    def _fits(self, decoder: Decoder, seeds: Sequence[int]) -> list[Fitted]:
        shown = [self.task.sample(self.shots, seed) for seed in seeds]
        return fit_seeds(decoder, self.task, bottom(self.methods[0]), shown, seeds)


def sweep(
    source: DecoderSource,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    seeds: Sequence[int],
    *,
    shots: int | None = None,
    limit: int | None = None,
    workers: int | None = None,
    skip: bool = False,
    word: Callable[[Task, Decoder], Task] | None = None,
    watch: Callable[[Run], None] | None = None,
    refused: Callable[[NotRun], None] | None = None,
) -> list[Run]:
    """Evaluate tasks x methods x seeds, in that order; seeds go together where a method gains by it.
    Methods that stand on the same fit, such as one with and without a label prior, share it. ``word`` gives a
    task other words once the model is there, such as those of its chat template. ``watch`` is called with
    each run as it ends, in any order; ``refused`` with each method that cannot be run, and the others go on;
    without it the first is raised. With ``skip``, methods that need another model are left out with a
    `SkippedWarning`. Raises I2CLError if rows are lacking, before the model is loaded; or if a method, or
    every one, cannot be fitted.
    """
    for task in tasks:
        task.sample(shots, seeds[0])
        task.queries(limit)
    decoder = source()
    if word is not None:
        tasks = [word(task, decoder) for task in tasks]
    fits: dict[Method, list[Method]] = {}
    for method in methods:
        fits.setdefault(bottom(method), []).append(method)
    jobs = [
        Evaluation(task, tuple(wrappers), group, shots, limit, skip, refused is not None).run
        for task in tasks
        for fit, wrappers in fits.items()
        for group in ([tuple(seeds)] if fit.joint else [(seed,) for seed in seeds])
    ]
    runs: list[Run] = []
    lacking: list[NotRun] = []
    for run in chain.from_iterable(run_jobs(decoder, source, jobs, workers)):
        if isinstance(run, NotRun):
            lacking.append(run)
            if refused is not None:
                refused(run)
            continue
        runs.append(run)
        if watch is not None:
            watch(run)
    if lacking and not runs:
        raise I2CLError(lacking[0].why)
    names, called = [task.name for task in tasks], [method.called for method in methods]
    return sorted(
        runs, key=lambda run: (names.index(run.task), called.index(run.method), seeds.index(run.seed))
    )


def macro_f1(gold: Int[np.ndarray, " n"], best: Int[np.ndarray, " n"], classes: int) -> float:
    """Mean F1 over a task's classes, 0 for one without any (scikit-learn's, zero_division=0)."""
    table = np.zeros((classes, classes))
    np.add.at(table, (gold, best), 1)
    return float((2 * table.diagonal() / np.maximum(table.sum(0) + table.sum(1), 1)).mean())


def software(decoder: Decoder) -> dict[str, str]:
    """Versions, device and precision that a result depends on."""
    packages = {"i2cl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    precision = [dtype_name(decoder.model.dtype), quantization_of(decoder.model.config)]
    where = {"device": str(decoder.device), "dtype": ", ".join(filter(None, precision))}
    return {"python": platform.python_version(), **packages, **where, "threads": str(torch.get_num_threads())}


@dataclass(frozen=True)
class Summary:
    """Means over seeds (standard deviation with n - 1); ``confidence`` is None where a run kept no scores."""

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
    """One summary per task and method, in order of first appearance."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.task, run.method), []).append(run)
    return [_summary(group) for group in groups.values()]


def _summary(runs: Sequence[Run]) -> Summary:
    first, known = runs[0], (runs[0].task, runs[0].method, len(runs), runs[0].n)
    each = [(run.accuracy, run.macro_f1, run.fit_seconds, 1000 * run.predict_seconds / run.n) for run in runs]
    mean, f1, fit, query = (float(np.mean(column)) for column in zip(*each, strict=True))
    sd = float(np.std([run.accuracy for run in runs], ddof=1)) if len(runs) > 1 else 0.0
    trust = mean_confidence([run.confidence for run in runs])
    return Summary(*known, mean, sd, f1, fit, query, first.cost.cached_values, trust)
