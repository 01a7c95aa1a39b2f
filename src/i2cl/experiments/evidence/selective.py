"""The confidence from which on answers are right often enough, shown on labelled rows.

A threshold passes where the exact binomial test rejects that answers at least so sure are right less often
than asked. Thresholds are tested one after the other, from the surest `START` of the rows on, with `STEP` of
them more each, until one fails: so all that pass hold together at the level of one test (fixed-sequence
testing in Angelopoulos et al., Learn then Test, https://arxiv.org/abs/2110.01052). The last one that passes
answers most.

Nothing here needs scipy, so that `i2cl fit` runs without the extra ``experiments``.
"""

from dataclasses import asdict, dataclass
from math import ceil, log

import numpy as np

from i2cl.errors import I2CLError
from i2cl.experiments.confidence import Right, Sure

LEVEL = 0.1  # chance that a threshold is given whose answers are right less often than asked
DIGITS = 1e6  # a threshold is given to six places, rounded down, so that typed again it means the same
START, STEP = 0.4, 0.05  # shares of the rows: the first threshold's, and what each further one adds
MOST_ROWS = 100_000  # beyond which no number of rows is named


@dataclass(frozen=True)
class Selection:
    """A threshold, the share of rows that reach it (``coverage``), and their accuracy."""

    target: float
    threshold: float
    coverage: float
    accuracy: float
    rows: int


def fewest_rows(target: float) -> int:
    """How many rows, all of them right, show an accuracy."""
    return ceil(log(LEVEL) / log(target))


def require_target(target: float, rows: int) -> None:
    """Refuse an accuracy that is none, or that so many rows cannot show (I2CLError)."""
    if not 0.5 <= target < 1:
        raise I2CLError(f"target accuracy {target!r}: give a number from 0.5 to below 1, such as 0.95")
    if rows < fewest_rows(target):
        raise I2CLError(
            f"a target accuracy of {target:g} takes {fewest_rows(target)} labelled rows beside the examples "
            f"or more, and {rows} remain: give rows with --test FILE, or fit with fewer --shots"
        )


def select(sure: Sure, right: Right, target: float) -> Selection | None:
    """The threshold that answers most of those shown to reach an accuracy, or None (see `require_target`)."""
    n, sure = len(sure), np.floor(sure * DIGITS) / DIGITS
    require_target(target, n)
    order = np.argsort(-sure, kind="stable")
    wrong = np.cumsum(~right[order])
    last = None
    shares, fewest = np.arange(START, 1 + STEP / 2, STEP), fewest_rows(target)
    ranks = {max(fewest, round(share * n)) for share in shares if round(share * n) <= n} | {n}
    for rank in sorted(ranks):  # they depend on no label
        if binomial_tail(int(wrong[rank - 1]), rank, 1 - target) > LEVEL:
            break
        last = rank
    if last is None:
        return None
    threshold = float(sure[order[last - 1]])
    reached = sure >= threshold
    return Selection(target, threshold, float(reached.mean()), float(right[reached].mean()), n)


def selection(sure: Sure, right: Right, target: float) -> dict[str, float | int | None]:
    """What `select` shows, as JSON has it; without a threshold, how many rows would show one."""
    threshold = select(sure, right, target)
    if threshold is not None:
        return asdict(threshold)
    return {"target": target, "rows": len(sure), "needed": rows_needed(sure, right, target)}


def rows_needed(sure: Sure, right: Right, target: float) -> int | None:
    """About how many rows would show a threshold, if the surest of them are as often right as these.
    None where the surest ones are not right so often, or more than `MOST_ROWS` would be needed.
    """
    order = np.argsort(-sure, kind="stable")
    first = max(1, round(START * len(sure)))
    error = (int((~right[order[:first]]).sum()) + 0.5) / (first + 1)
    if error >= 1 - target:
        return None
    rows = fewest_rows(target)
    while rows * START <= MOST_ROWS:
        if binomial_tail(round(error * rows), rows, 1 - target) <= LEVEL:
            return ceil(rows / START)
        rows = ceil(rows * 1.05)
    return None


def binomial_tail(errors: int, n: int, chance: float) -> float:
    """Probability of so few errors or fewer in n answers, each of them wrong by this chance."""
    k = np.arange(1, errors + 1)
    steps = np.log((n - k + 1) / k) + log(chance / (1 - chance))
    logs = n * log(1 - chance) + np.concatenate([[0.0], np.cumsum(steps)])
    return float(np.exp(logs).sum())
