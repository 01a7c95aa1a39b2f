"""Which rows of a file of one's own are demonstrations: as many as pay in the time that somebody waits."""

import time
import warnings
from dataclasses import dataclass
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

MOST_SHOTS = 20  # demonstrations of a class that are taken unasked
PATIENCE = 300.0  # seconds that a fit may take unasked
KEPT_BACK = 5  # one row in so many is kept back to score on, where nobody gives test rows or says otherwise
ENOUGH = 10  # rows of a class from which on some are kept back
FORWARD, BACKWARD = 1.5, 1.3  # passes of the plain model that one with gradients takes, forward and backward
AGAIN = 1.0  # what all later steps differentiate, over what the first does: they leave settled rows out
SHARED = 2.5  # whole labels behind one query that cost as much as a query alone
TIMED = 8  # texts of the batch that is timed
USUAL = 5  # demonstrations of a class that are taken however long it takes: the paper's number
Shots = int | Literal["all"] | None  # of each class; every row; or by default
CHOICES = (MOST_SHOTS, 15, 10, 8, 6, USUAL, 4, 3, 2, 1)
"""Shots that are chosen among: few, so that the same machine mostly chooses the same."""


@dataclass(frozen=True)
class Draw:
    """Demonstrations of a task, and what they were drawn from.
    ``shots`` is the most of a class, ``rows`` how many there are to draw from, ``seconds`` what a fit will
    take by the estimate, None where nobody timed the model; ``more`` a larger number of shots that somebody
    may prefer, with its rows and seconds.
    """

    demonstrations: tuple[Example, ...]
    shots: int
    rows: int
    keep_back: int = 0
    seconds: float | None = None
    more: tuple[int, int, float] | None = None


def up_to(task: Task, shots: int, seed: int, keep_back: int = 0) -> tuple[Example, ...]:
    """So many rows of each class, or all that it has: as `Task.sample` draws where all have so many.
    Of a class that has `ENOUGH`, one row in ``keep_back`` is left out; 0 for none. Raises I2CLError if a
    class has no row at all.
    """
    task.sample(1, seed)
    groups = group_by_label(task.train, len(task.labels))
    free = [n - ceil(n / keep_back) if keep_back and n >= ENOUGH else n for n in map(len, groups)]
    return sample_per_class(groups, [min(shots, max(1, n)) for n in free], Random(seed))


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
    """The demonstrations, unless it takes the model to say how many they are: see `fitting`.
    Shots are by default the task's own, or of rows ``from_file``, of which a class may have fewer than are
    asked for, as many as pay; ``"all"`` takes every row. ``keep_back`` (see `up_to`) is by default
    `KEPT_BACK` where shots are not given and something is to be ``scored`` without test rows. Raises
    I2CLError if rows lack, or are too many.
    """
    anchored, everything = isinstance(method, Anchored), shots == "all"
    count = _largest(task) if shots == "all" else shots or task.shots
    if from_file and anchored and (everything or shots is None):
        require_few(up_to(task, count if everything else 1, seed, keep_back or 0))
        return None
    if keep_back and not from_file:
        raise I2CLError(f"{task.name!r} draws from its training rows: leave --keep-back out")
    if keep_back is None:
        keep_back = KEPT_BACK if scored and shots is None else 0
    drawn_freely = from_file or everything
    shown = up_to(task, count, seed, keep_back) if drawn_freely else task.sample(count, seed)
    if anchored:
        require_few(shown)
    return Draw(shown, count, len(task.train), keep_back if from_file else 0)


def fitting(
    decoder: Decoder,
    task: Task,
    steps: int,
    seed: int,
    *,
    keep_back: int | None,
    scored: bool,
    shots: Literal["all"] | None = None,
) -> Draw:
    """As many demonstrations as anchored calibration takes in `PATIENCE`: `USUAL` to `MOST_SHOTS` of a class.
    Fewer than `USUAL` are taken where more would be too many for it, never to save time; of ``"all"`` shots
    every row is, and none kept back unasked.
    """
    pace, largest = _Pace.of(decoder, task, steps), _largest(task)
    if shots == "all":
        shown = up_to(task, largest, seed, keep_back or 0)
        return Draw(shown, largest, len(task.train), keep_back or 0, pace.seconds(shown))
    if keep_back is None:
        keep_back = KEPT_BACK if scored else 0

    def takes(shots: int) -> bool:
        shown = up_to(task, shots, seed, keep_back)
        return len(shown) <= MOST_DEMONSTRATIONS and (shots <= USUAL or pace.seconds(shown) <= PATIENCE)

    count = next(one for one in CHOICES if one == 1 or takes(one))
    shown = up_to(task, count, seed, keep_back)
    count = min(count, max(len(group) for group in group_by_label(shown, len(task.labels))))
    more = None
    for larger in (largest, MOST_SHOTS):
        larger_draw = up_to(task, larger, seed)
        if larger <= 2 * MOST_SHOTS and len(shown) < len(larger_draw) <= MOST_DEMONSTRATIONS:
            more = larger, len(larger_draw), pace.seconds(larger_draw)
            break
    return Draw(shown, count, len(task.train), keep_back, pace.seconds(shown), more)


def _largest(task: Task) -> int:
    """Rows of the class that has most."""
    return max(len(group) for group in group_by_label(task.train, len(task.labels)))


@dataclass(frozen=True)
class _Pace:
    """How fast a model reads a task's texts."""

    questions: Questions
    seconds_a_token: float
    steps: int

    @classmethod
    def of(cls, decoder: Decoder, task: Task, steps: int) -> "_Pace":
        """Timed on a batch of texts of the usual length, the second time, when everything is warm."""
        with warnings.catch_warnings():  # the fit itself says how labels are told
            warnings.simplefilter("ignore", ScoringWarning)
            questions = Questions(decoder, task)
        usual = median_low(len(row.text) for row in task.train)
        rows = sorted(task.train, key=lambda row: abs(len(row.text) - usual))[:TIMED]
        queries = questions.queries([row.text for row in rows])
        for _ in range(2):
            started = time.perf_counter()
            next_token_log_probabilities(decoder, queries)
            seconds = time.perf_counter() - started
        return cls(questions, seconds / sum(map(len, queries)), steps)

    def seconds(self, shown: Examples) -> float:
        """Estimate of a fit: a forward pass a step, and a backward pass a column where it differentiates.
        `benchmarks/fits.py` measures it. A fit skips steps that it does not need; other work on the machine
        slows it.
        """
        tokens = sum(map(len, self.questions.queries([row.text for row in shown])))
        columns = len(self.questions.task.labels) - 1.0
        whole = self.questions.labels.full
        if len(shown) * columns > (MOST_WHOLE if whole else MOST_COLUMNS):
            passes = (schedule(len(shown), words=whole).epochs + 1) * (FORWARD + BACKWARD)
        else:
            columns /= SHARED if whole else 1
            passes = (FORWARD + BACKWARD * columns) * (1 + AGAIN * (self.steps > 1)) + self.steps + FORWARD
        return self.seconds_a_token * tokens * passes
