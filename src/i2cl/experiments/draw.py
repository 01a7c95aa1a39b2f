"""Draw the demonstrations of a fit from labelled rows, by default as many as a few minutes allow."""

import time
import warnings
from dataclasses import dataclass, replace
from math import ceil
from random import Random
from statistics import median_low
from typing import Literal

from i2cl.core.anchored import MOST_DEMONSTRATIONS, require_few
from i2cl.core.descent import schedule
from i2cl.core.problem import MOST_COLUMNS, MOST_WHOLE
from i2cl.errors import I2CLError
from i2cl.methods import Method
from i2cl.methods.anchored import Anchored
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import ScoringWarning
from i2cl.models.scoring import Questions, next_token_log_probabilities
from i2cl.tasks import Example, Examples, Task
from i2cl.tasks.task import group_by_label, sample_per_class

MAX_SHOTS = 20  # demonstrations per class by default
PATIENCE_S = 300.0  # default time budget of a fit
KEEP_BACK = 5  # one row in five is held out by default, if there are no test rows
MIN_ROWS_TO_KEEP_BACK = 10  # no row is held out from classes with fewer rows
FORWARD, BACKWARD = 1.5, 1.3  # cost of a training forward and backward pass, in inference passes
LATER_STEPS = 1.0  # backward passes of all later Gauss-Newton steps, over those of the first one
SHARED_PREFIX = 2.5  # label sequences after one query that cost as much as the query alone
TIMED_TEXTS = 8
MIN_SHOTS = 5  # demonstrations per class regardless of the estimated time: the paper's number
Shots = int | Literal["all"] | None  # per class; every row; or by default
CHOICES = (MAX_SHOTS, 15, 10, 8, 6, MIN_SHOTS, 4, 3, 2, 1)
"""Candidate numbers of shots. There are few, so small differences in speed rarely change the choice."""


class FewRowsWarning(UserWarning):
    """A class has fewer rows than the requested number of demonstrations."""


@dataclass(frozen=True)
class Draw:
    """Demonstrations drawn from a task's training rows.

    Attributes:
        demonstrations: the rows to fit.
        shots: maximum number per class.
        rows: number of training rows.
        keep_back: one row in this many was held out, 0 for none; see `up_to`.
        seconds: estimated time of the fit; None before the model is known.
        first_step: share of that time that the first step takes.
        more: a larger number of shots that the user may prefer, with its number of rows and seconds.
    """

    demonstrations: tuple[Example, ...]
    shots: int
    rows: int
    keep_back: int = 0
    seconds: float | None = None
    first_step: float = 1.0
    more: tuple[int, int, float] | None = None

    def timed(self, decoder: Decoder, task: Task, method: Method) -> "Draw":
        """The same draw with an estimate of the time that the fit takes."""
        pace = _Pace.of(decoder, task, method)
        seconds, first_step = pace.estimate(self.demonstrations)
        return replace(self, seconds=seconds, first_step=first_step)


def up_to(task: Task, shots: int, seed: int, keep_back: int = 0) -> tuple[Example, ...]:
    """Draw up to ``shots`` rows of each class; the same rows as `Task.sample` if every class has enough.

    With ``keep_back`` n > 0, one row in n is held out from every class with at least
    `MIN_ROWS_TO_KEEP_BACK` rows. Raises I2CLError if a class has no rows.
    """
    task.sample(1, seed)  # raises for a class without rows
    groups = group_by_label(task.train, len(task.labels))
    available = [
        n - ceil(n / keep_back) if keep_back and n >= MIN_ROWS_TO_KEEP_BACK else n for n in map(len, groups)
    ]
    return sample_per_class(groups, [min(shots, max(1, n)) for n in available], Random(seed))


def draw(
    task: Task,
    method: Method,
    shots: Shots,
    seed: int,
    *,
    from_file: bool,
    keep_back: int | None,
    scored: bool,
) -> Draw | None:
    """Draw the demonstrations, or return None if their number depends on the model's speed (see `fitting`).

    Args:
        task: with its training rows.
        method: the method to fit.
        shots: rows per class, or ``"all"`` for every row. Default: the task's own number, or as many as
            the time budget allows if ``from_file``.
        seed: seed of the draw.
        from_file: whether the rows come from a user's file, where a class may have fewer than ``shots`` rows.
        keep_back: see `up_to`. Default: `KEEP_BACK` if ``shots`` is None and ``scored``, else 0.
        scored: whether the fit will be evaluated and the task has no test rows.

    Raises:
        I2CLError: if there are too few or too many rows.
    """
    anchored, all_rows = isinstance(method, Anchored), shots == "all"
    count = _largest(task) if shots == "all" else shots or task.shots
    if from_file and anchored and (all_rows or shots is None):
        require_few(up_to(task, count if all_rows else 1, seed, keep_back or 0))
        return None
    if keep_back and not from_file:
        raise I2CLError(f"--keep-back needs rows from a file, not the built-in task {task.name!r}: omit it")
    if keep_back is None:
        keep_back = KEEP_BACK if scored and shots is None else 0
    allow_small_classes = from_file or all_rows
    demonstrations = up_to(task, count, seed, keep_back) if allow_small_classes else task.sample(count, seed)
    if anchored:
        require_few(demonstrations)
    return Draw(demonstrations, count, len(task.train), keep_back if from_file else 0)


def warn_of_small_classes(task: Task, shots: int) -> None:
    """Emit a `FewRowsWarning` if classes have fewer rows than the requested number of demonstrations."""
    groups = group_by_label(task.train, len(task.labels))
    small = [
        f"{word} ({len(rows)})" for word, rows in zip(task.labels, groups, strict=True) if len(rows) < shots
    ]
    if small:
        shown = ", ".join(small[:5]) + (f" and {len(small) - 5} more" if len(small) > 5 else "")
        message = f"these classes have fewer than {shots} rows, all of which are used: {shown}"
        warnings.warn(message, FewRowsWarning, stacklevel=3)


def fitting(
    decoder: Decoder,
    task: Task,
    method: Method,
    seed: int,
    *,
    keep_back: int | None,
    scored: bool,
    shots: Literal["all"] | None = None,
) -> Draw:
    """Draw as many demonstrations as anchored calibration can fit in `PATIENCE_S` seconds.

    Draws `MIN_SHOTS` to `MAX_SHOTS` rows per class, and fewer only if `MIN_SHOTS` would exceed
    `MOST_DEMONSTRATIONS`. With ``shots="all"``, every row is a demonstration, and none is held out unless
    ``keep_back`` is set.
    """
    pace, largest = _Pace.of(decoder, task, method), _largest(task)
    if shots == "all":
        demonstrations = up_to(task, largest, seed, keep_back or 0)
        estimate = pace.estimate(demonstrations)
        return Draw(demonstrations, largest, len(task.train), keep_back or 0, *estimate)
    if keep_back is None:
        keep_back = KEEP_BACK if scored else 0

    def is_affordable(shots: int) -> bool:
        rows = up_to(task, shots, seed, keep_back)
        return len(rows) <= MOST_DEMONSTRATIONS and (shots <= MIN_SHOTS or pace.seconds(rows) <= PATIENCE_S)

    count = next(choice for choice in CHOICES if choice == 1 or is_affordable(choice))
    demonstrations = up_to(task, count, seed, keep_back)
    count = min(count, max(len(group) for group in group_by_label(demonstrations, len(task.labels))))
    more = None
    for larger in (largest, MAX_SHOTS):
        larger_draw = up_to(task, larger, seed)
        if larger <= 2 * MAX_SHOTS and len(demonstrations) < len(larger_draw) <= MOST_DEMONSTRATIONS:
            more = larger, len(larger_draw), pace.seconds(larger_draw)
            break
    return Draw(demonstrations, count, len(task.train), keep_back, *pace.estimate(demonstrations), more)


def _largest(task: Task) -> int:
    """Number of rows of the largest class."""
    return max(len(group) for group in group_by_label(task.train, len(task.labels)))


@dataclass(frozen=True)
class _Pace:
    """Estimates the duration of a fit from the model's measured speed on the task's texts."""

    questions: Questions
    seconds_per_token: float
    steps: int
    anchored: bool = True

    @classmethod
    def of(cls, decoder: Decoder, task: Task, method: Method) -> "_Pace":
        """Time a batch of texts of median length; the second run counts, since the first one warms up."""
        with warnings.catch_warnings():  # the fit itself reports how labels are scored
            warnings.simplefilter("ignore", ScoringWarning)
            questions = Questions(decoder, task)
        typical = median_low(len(row.text) for row in task.train)
        rows = sorted(task.train, key=lambda row: abs(len(row.text) - typical))[:TIMED_TEXTS]
        queries = questions.queries([row.text for row in rows])
        for _ in range(2):
            started = time.perf_counter()
            next_token_log_probabilities(decoder, queries)
            seconds = time.perf_counter() - started
        steps = getattr(method, "rounds", 1)
        return cls(questions, seconds / sum(map(len, queries)), steps, isinstance(method, Anchored))

    def seconds(self, demonstrations: Examples) -> float:
        """Estimated time of a fit; see `estimate`."""
        return self.estimate(demonstrations)[0]

    def estimate(self, demonstrations: Examples) -> tuple[float, float]:
        """Estimate the seconds of a fit, and the share of them that its first step takes.

        Counts forward and backward passes; `benchmarks/fits.py` compares with real fits. A fit may need fewer
        steps, and other work on the machine slows it down.
        """
        tokens = sum(map(len, self.questions.queries([row.text for row in demonstrations])))
        columns = len(self.questions.task.labels) - 1.0
        whole = self.questions.labels.full
        if not self.anchored:
            rounds = max(1, self.steps)
            passes, first = 1 + rounds * (FORWARD + BACKWARD), FORWARD + BACKWARD
        elif len(demonstrations) * columns > (MOST_WHOLE if whole else MOST_COLUMNS):
            rounds = schedule(len(demonstrations), words=whole).epochs
            passes, first = (rounds + 1) * (FORWARD + BACKWARD), FORWARD + BACKWARD
        else:
            columns /= SHARED_PREFIX if whole else 1
            first = FORWARD + BACKWARD * columns + 1
            later = (FORWARD + BACKWARD * columns) * LATER_STEPS * (self.steps > 1)
            passes = first + later + self.steps - 1 + FORWARD
        return self.seconds_per_token * tokens * passes, first / passes
