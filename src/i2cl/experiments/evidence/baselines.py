"""Whether a fit pays: its injection beside what needs no fit, on the same labelled rows.

What may be said of it is the matter of `i2cl.experiments.evidence.verdicts`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from i2cl.core import encoder_bias
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, is_out_of_memory
from i2cl.experiments.confidence import Confidence, confidence, highest
from i2cl.experiments.evaluation import Fitted, fit_seeds, measure
from i2cl.experiments.evidence.selective import require_target, selection
from i2cl.experiments.evidence.verdicts import verdict, wilson
from i2cl.experiments.records import Run
from i2cl.injections.temperature import likely_temperature, normalised
from i2cl.methods import METHODS, Injector, Method, make_methods
from i2cl.methods.anchored import Anchored
from i2cl.methods.calibrated.folds import FOLDS, folded, injected
from i2cl.methods.calibrated.label_calibration import LabelPrior
from i2cl.methods.i2cl import I2CL
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.tasks import Example, Examples, Task

# What costs nothing beside the model: an injection has to beat all of it.
FREE = ("zero_shot", "zero_shot+batch_calibration")
BASELINES = (*FREE, "few_shot")  # what an injection is set beside in any case; see `baselines`
MOST_FOLDED = 512  # demonstrations, at most, that refits are scored on: more say little more
Split = Literal["train", "test", "demonstrations"]
Fits = dict[Method, Callable[[Method], Fitted]]  # how each method is fitted, the injection's own last


@dataclass(frozen=True)
class Score:
    """How one method did, with its 95 % interval (`wilson`); bytes are those kept per task."""

    accuracy: float
    low: float
    high: float
    fit_seconds: float
    milliseconds_per_query: float
    cached_bytes: int


@dataclass(frozen=True)
class Worth:
    """An injection beside the baselines, on rows that it was not fitted to."""

    rows: int  # how many
    # of the task that they come from; or the demonstrations, each answered by a refit that has not seen it
    split: Split
    # whether to use it, in words; see `i2cl.experiments.evidence.verdicts`, for the next four too
    verdict: str
    against: str  # the best of what is free
    difference: float  # accuracy minus that one's, a share
    low: float  # of its 95 % interval
    high: float
    p: float  # of a test on the same rows
    methods: dict[str, Score]  # scores by method
    not_run: dict[str, str]  # why the other methods could not be run
    # log-loss, Brier score, calibration error and area under the risk-coverage curve of the injection at its
    # temperature, which these rows chose (`i2cl.experiments.confidence.Confidence`)
    confidence: dict[str, float]
    # the confidence from which on answers are right as often as was asked, see
    # `i2cl.experiments.evidence.selective.selection`; empty where nothing was asked
    selection: dict[str, Any]


def baselines() -> list[Method]:
    """`BASELINES`, and what has no LLM where its encoder is here without a download."""
    encoder, rival = encoder_bias.local_encoder(), METHODS["sentence_embeddings"]
    return make_methods(BASELINES) + ([rival.configured({"encoder": encoder})] if encoder else [])


def labelled_rows(task: Task, demonstrations: Examples, limit: int) -> tuple[Example, ...]:
    """Rows to score on: test rows or, without any, training rows; none whose text is a demonstration's.
    At most ``limit``, as equal in number per class as the rows allow; 0 for none. Returns no rows where none
    remain. Raises I2CLError on a limit below 0.
    """
    shown = {example.text for example in demonstrations}
    rows = tuple(example for example in task.test or task.train if example.text not in shown)
    return replace(task, test=rows).queries(limit) if rows and limit else ()


def with_worth(
    injection: Injection,
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    queries: Examples,
    *,
    seconds: float,
    method: Method | None = None,
    target: float | None = None,
    watch: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Injection:
    """The same injection with what it is worth on labelled rows, and a temperature that fits these.
    The baselines have the same demonstrations and seed. One that cannot be run, such as few-shot where the
    demonstrations do not fit into the context, is told as such. ``queries`` are those of `labelled_rows`,
    ``method`` made the injection in so many ``seconds`` (default: I2CL), ``target`` is an accuracy of
    `i2cl.experiments.evidence.selective`. ``watch`` is called with the name of each method before it runs.
    Raises I2CLError without queries or with too few for the target, or on an empty text.
    """
    if target is not None:
        require_target(target, len(queries))
    if not queries:
        raise I2CLError("no queries were given: at least one is needed")
    shown, by = tuple(demonstrations), _by(injection, method or I2CL())

    ours = Fitted(by, injected(injection, decoder, task), shown, injection.seed, seconds)
    fit = partial(_fit, decoder, task, shown, injection.seed)
    fits: Fits = {**dict.fromkeys(baselines(), fit), by: lambda _: ours}
    split: Split = "test" if task.test else "train"
    return _measured(injection, fits, split, decoder, task, queries, watch, progress, target)


def with_folds(
    injection: Injection,
    decoder: Decoder,
    task: Task,
    demonstrations: Examples,
    make: Callable[[Examples], Injection],
    *,
    seconds: float,
    method: Method | None = None,
    folds: int = FOLDS,
    watch: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Injection:
    """`with_worth` where no other labelled rows remain: refits answer what they have not seen.
    A text that several demonstrations have is asked once, and `MOST_FOLDED` are asked at most. What else has
    demonstrations is made anew for the same folds. A refit has fewer of them than the fit, so what is
    measured is on the whole a little low. Raises I2CLError where some refit would not see all labels.
    """
    shown, seed, by = tuple(demonstrations), injection.seed, _by(injection, method or I2CL())
    unique = tuple({example.text: example for example in reversed(shown)}.values())[::-1]
    asked = replace(task, test=unique).queries(MOST_FOLDED, seed)
    free, others = baselines()[: len(FREE)], baselines()[len(FREE) :]

    def again(other: Method) -> Fitted:
        started = time.perf_counter()
        predictor = folded(task, shown, partial(other.fit, decoder, task, seed=seed), folds, seed)
        took = (time.perf_counter() - started) / len(predictor.refits)
        return Fitted(other, predictor, shown, seed, took)

    def ours(_: Method) -> Fitted:
        cost = injected(injection, decoder, task).cost
        predictor = folded(task, shown, lambda rest: injected(make(rest), decoder, task), folds, seed, cost)
        return Fitted(by, predictor, shown, seed, seconds)

    fits: Fits = dict.fromkeys(free, partial(_fit, decoder, task, shown, seed))
    fits |= {**dict.fromkeys(others, again), by: ours}
    return _measured(injection, fits, "demonstrations", decoder, task, asked, watch, progress)


def refitting(method: Injector, injection: Injection) -> Callable[..., Injection]:
    """``method.injection`` as an injection was made: fewer demonstrations would have another solver, and
    might have labels scored otherwise, and what is measured would be of another fit.
    """
    like = method.like(injection) if isinstance(method, Anchored) else method
    return partial(like.injection, scoring=injection.scoring)


def _by(injection: Injection, method: Method) -> Method:
    """What made an injection, whether with a label prior or without."""
    return method if injection.label_bias is None else LabelPrior(method)


def _fit(decoder: Decoder, task: Task, shown: Examples, seed: int, method: Method) -> Fitted:
    return fit_seeds(decoder, task, method, [shown], [seed])[0]


def tempered(run: Run, temperatures: tuple[float, float]) -> tuple[float, Confidence]:
    """The most probable temperature given a run's rows, and the four numbers of confidence at it."""
    scores = run.scores.array if run.scores else np.empty((0, len(run.labels)))
    gold = np.array(run.gold)
    temperature = likely_temperature(scores, gold, *temperatures)
    return temperature, confidence(normalised(scores, temperature), gold, np.array(run.predictions))


def _measured(
    injection: Injection,
    fits: Fits,
    split: Split,
    decoder: Decoder,
    task: Task,
    queries: Examples,
    watch: Callable[[str], None] | None,
    progress: Progress | None,
    target: float | None = None,
) -> Injection:
    """Every method scored, the first one and the last, which is the injection's, in any case."""
    runs: dict[str, Run] = {}
    not_run: dict[str, str] = {}
    first, *_, by = fits
    for method, fit in fits.items():
        if watch is not None:
            watch(method.called)
        try:
            runs[method.called] = measure(decoder, task, fit(method), queries, progress)
        except (I2CLError, RuntimeError) as error:
            if method in {first, by} or not (isinstance(error, I2CLError) or is_out_of_memory(error)):
                raise
            not_run[method.called] = str(error) if isinstance(error, I2CLError) else "out of memory"
    run = runs[by.called]
    temperature, sure = tempered(run, by.temperatures)
    ours = _right(run)
    free = {name: _right(runs[name]) for name in FREE if name in runs}
    counts = {name: (int((ours & ~one).sum()), int((one & ~ours).sum())) for name, one in free.items()}
    threshold: dict[str, Any] = {}
    if target is not None and run.scores is not None:
        threshold = selection(highest(normalised(run.scores.array, temperature)), ours, target)
    answer: dict[str, Any] = asdict(verdict(counts, run.n))
    scores = {name: _score(one) for name, one in runs.items()}
    worth = Worth(
        run.n, split, **answer, methods=scores, not_run=not_run, confidence=asdict(sure), selection=threshold
    )
    injection = replace(injection, temperature=temperature, worth=asdict(worth))
    if split == "demonstrations":  # no measurement to publish
        return injection
    return replace(injection, metrics={"accuracy": run.accuracy, "macro_f1": run.macro_f1, "n": run.n})


def _right(run: Run) -> Bool[np.ndarray, " rows"]:
    right: Bool[np.ndarray, " rows"] = np.array(run.gold) == np.array(run.predictions)
    return right


def _score(run: Run) -> Score:
    low, high = wilson(int(_right(run).sum()), run.n)
    milliseconds = 1000 * run.predict_seconds / run.n
    return Score(run.accuracy, low, high, run.fit_seconds, milliseconds, run.cost.cached_bytes)
