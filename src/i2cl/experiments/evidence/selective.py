"""Choose a confidence threshold above which predictions reach a target accuracy.

A threshold passes if an exact binomial test rejects, at level `LEVEL`, that predictions at or above it are
less accurate than the target. Thresholds are tested in a fixed order: first the most confident share `START`
of the rows, then `STEP` more of them at a time, until one fails. All thresholds that pass are then valid at
the level of a single test (fixed-sequence testing in Angelopoulos et al., Learn then Test,
https://arxiv.org/abs/2110.01052). The last one has the largest coverage.
"""

from dataclasses import asdict, dataclass
from math import ceil, log

import numpy as np

from i2cl.errors import I2CLError
from i2cl.experiments.confidence import Confidences, Correct

LEVEL = 0.1  # probability that predictions above a returned threshold miss the target accuracy
DECIMALS = 6  # thresholds are rounded down, so a printed threshold selects the same rows
START, STEP = 0.4, 0.05  # shares of the rows above the first threshold, and added by each further one
MAX_ROWS = 100_000  # larger numbers of needed rows are not reported


@dataclass(frozen=True)
class Selection:
    """A confidence threshold on labelled rows.

    Attributes:
        target: the target accuracy.
        threshold: minimum confidence.
        coverage: share of rows at or above the threshold.
        accuracy: accuracy on these rows.
        rows: number of all rows.
    """

    target: float
    threshold: float
    coverage: float
    accuracy: float
    rows: int


def min_rows(target: float) -> int:
    """Return how many rows without any error pass the test."""
    return ceil(log(LEVEL) / log(target))


def require_target(target: float, rows: int) -> None:
    """Raise I2CLError if the target accuracy is out of range, or too high for the number of rows."""
    if not 0.5 <= target < 1:
        raise I2CLError(f"target accuracy must be at least 0.5 and below 1, got {target!r}")
    if rows < min_rows(target):
        raise I2CLError(
            f"a target accuracy of {target:g} needs at least {min_rows(target)} held-out rows, but there are "
            f"{rows}: give rows with --test FILE, or fit with fewer --shots"
        )


def select(confidences: Confidences, correct: Correct, target: float) -> Selection | None:
    """Return the threshold with the largest coverage that passes the test, or None if none passes.

    Raises I2CLError as `require_target` does.
    """
    from scipy.stats import binom

    n, confidences = len(confidences), np.floor(confidences * 10**DECIMALS) / 10**DECIMALS
    require_target(target, n)
    order = np.argsort(-confidences, kind="stable")
    errors = np.cumsum(~correct[order])
    last = None
    shares, smallest = np.arange(START, 1 + STEP / 2, STEP), min_rows(target)
    ranks = {max(smallest, round(share * n)) for share in shares if round(share * n) <= n} | {n}
    for rank in sorted(ranks):  # fixed in advance, independent of the labels
        if binom.cdf(errors[rank - 1], rank, 1 - target) > LEVEL:
            break
        last = rank
    if last is None:
        return None
    threshold = float(confidences[order[last - 1]])
    selected = confidences >= threshold
    return Selection(target, threshold, float(selected.mean()), float(correct[selected].mean()), n)


def selection(confidences: Confidences, correct: Correct, target: float) -> dict[str, float | int | None]:
    """Return the `Selection` as a JSON object; without one, the number of rows that would be needed."""
    threshold = select(confidences, correct, target)
    if threshold is not None:
        return asdict(threshold)
    return {
        "target": target,
        "rows": len(confidences),
        "needed": rows_needed(confidences, correct, target),
    }


def rows_needed(confidences: Confidences, correct: Correct, target: float) -> int | None:
    """Estimate how many rows would give a threshold, from the accuracy of the most confident rows.

    Returns None if their accuracy is below the target, or more than `MAX_ROWS` rows would be needed.
    """
    from scipy.stats import binom

    order = np.argsort(-confidences, kind="stable")
    first = max(1, round(START * len(confidences)))
    error = (int((~correct[order[:first]]).sum()) + 0.5) / (first + 1)
    if error >= 1 - target:
        return None
    rows = min_rows(target)
    while rows * START <= MAX_ROWS:
        if binom.cdf(round(error * rows), rows, 1 - target) <= LEVEL:
            return ceil(rows / START)
        rows = ceil(rows * 1.05)
    return None
