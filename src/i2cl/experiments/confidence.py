"""How far a classifier's probabilities can be trusted: four numbers and two curves.

Scores are log-probabilities among the labels, one row a query. What was answered is told beside them, since
scores that were rounded for keeping may tie where the answer did not. Queries of equal confidence count as
their mean, so that no number depends on the order of queries.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from jaxtyping import Bool, Float

from i2cl.injections.temperature import Labels, Scores, normalised

BINS = 15  # of the expected calibration error, each with as many queries
Sure = Float[np.ndarray, " queries"]
Right = Bool[np.ndarray, " queries"]
Curve = tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"]]


@dataclass(frozen=True)
class Confidence:
    """Four numbers of probabilities against right labels; for all of them, lower is better.

    Attributes:
        log_loss: mean of minus the log-probability of the right label, in nats.
        brier: mean of the squared distance to the right answer, summed over labels: from 0 to 2.
        ece: mean distance of confidence and accuracy over `BINS` bins of equal number, a share.
        aurc: area under the risk-coverage curve: the share of errors among the surest queries, averaged
            over all numbers of them.
    """

    log_loss: float
    brier: float
    ece: float
    aurc: float


NAMES = tuple(field.name for field in fields(Confidence))  # of the four numbers, as in files


def confidence(scores: Scores, gold: Labels, answers: Labels) -> Confidence:
    """The four numbers."""
    log_probabilities = normalised(scores)
    each = np.arange(len(gold))
    target = np.eye(scores.shape[1])[gold]
    sure, right = highest(scores), answers == gold
    bins = np.abs(np.subtract(*reliability(sure, right)))
    weights = np.array([len(part) for part in np.array_split(each, BINS) if len(part)]) / len(gold)
    return Confidence(
        log_loss=float(-log_probabilities[each, gold].mean()) + 0.0,
        brier=float(((np.exp(log_probabilities) - target) ** 2).sum(1).mean()),
        ece=float((weights * bins).sum()),
        aurc=float(risk_coverage(sure, right)[1].mean()),
    )


def mean_confidence(each: Sequence[Confidence | None]) -> Confidence | None:
    """Each number's mean; None where one is lacking."""
    held = [one for one in each if one is not None]
    if not held or len(held) < len(each):
        return None
    return Confidence(*np.mean([astuple(one) for one in held], axis=0).tolist())


def highest(scores: Scores) -> Sure:
    """The largest probability of each query: how sure its answer is."""
    return np.asarray(np.exp(normalised(scores).max(1)))


def reliability(sure: Sure, right: Right) -> Curve:
    """Mean confidence and accuracy of bins of equal number, the least sure first; empty bins are left out."""
    split = [np.array_split(one, BINS) for one in _by_confidence(sure, right)]
    means = np.array([[part.mean() for part in one if len(part)] for one in split])
    return means[0], means[1]


def risk_coverage(sure: Sure, right: Right) -> Curve:
    """Share of queries answered, and of errors among them, where the surest are answered first."""
    _, hits = _by_confidence(sure, right)
    count = np.arange(1, len(hits) + 1)
    return count / len(hits), np.cumsum(1 - hits[::-1]) / count


def _by_confidence(sure: Sure, right: Right) -> Curve:
    """Confidence, rising, and whether each query was answered rightly; a mean among equals."""
    rising, groups = np.unique(sure, return_inverse=True)
    sizes = np.bincount(groups)
    return np.repeat(rising, sizes), np.repeat(np.bincount(groups, weights=right) / sizes, sizes)
