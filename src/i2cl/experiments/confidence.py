"""Calibration metrics of a classifier: four numbers and two curves.

Scores are log-probabilities of shape (queries, labels). The predicted labels are passed separately, because
scores that were rounded for storage may have ties that the original scores did not have. Queries of equal
confidence are averaged, so no metric depends on the order of the queries.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
from jaxtyping import Bool, Float

from i2cl.injections.temperature import Labels, Scores, log_softmax

BINS = 15  # equal-mass bins of the expected calibration error
Confidences = Float[np.ndarray, " queries"]  # highest label probability of each query
Correct = Bool[np.ndarray, " queries"]  # whether each query's predicted label is the gold label
Curve = tuple[Float[np.ndarray, " points"], Float[np.ndarray, " points"]]


@dataclass(frozen=True)
class Confidence:
    """Four metrics of predicted probabilities. For each of them, lower is better.

    Attributes:
        log_loss: mean negative log-probability of the gold label, in nats.
        brier: mean squared error of the probabilities, summed over labels: from 0 to 2.
        ece: expected calibration error over `BINS` equal-mass bins, from 0 to 1.
        aurc: area under the risk-coverage curve, from 0 to 1: the error rate among the k most confident
            queries, averaged over all k.
    """

    log_loss: float
    brier: float
    ece: float
    aurc: float


NAMES = tuple(field.name for field in fields(Confidence))  # of the four metrics, as in files


def confidence(scores: Scores, gold: Labels, predictions: Labels) -> Confidence:
    """Compute the four metrics from label scores, gold label ids and predicted label ids."""
    log_probabilities = log_softmax(scores)
    queries = np.arange(len(gold))
    target = np.eye(scores.shape[1])[gold]
    confidences, correct = highest(scores), predictions == gold
    gaps = np.abs(np.subtract(*reliability(confidences, correct)))
    weights = np.array([len(part) for part in np.array_split(queries, BINS) if len(part)]) / len(gold)
    return Confidence(
        log_loss=float(-log_probabilities[queries, gold].mean()) + 0.0,  # + 0.0 turns -0.0 into 0.0
        brier=float(((np.exp(log_probabilities) - target) ** 2).sum(1).mean()),
        ece=float((weights * gaps).sum()),
        aurc=float(risk_coverage(confidences, correct)[1].mean()),
    )


def mean_confidence(metrics: Sequence[Confidence | None]) -> Confidence | None:
    """Return the mean of each metric, or None if any element is None or there are no elements."""
    present = [metric for metric in metrics if metric is not None]
    if not present or len(present) < len(metrics):
        return None
    return Confidence(*np.mean([astuple(metric) for metric in present], axis=0).tolist())


def highest(scores: Scores) -> Confidences:
    """Return the confidence of each query: its highest label probability."""
    return np.asarray(np.exp(log_softmax(scores).max(1)))


def reliability(confidences: Confidences, correct: Correct) -> Curve:
    """Return mean confidence and accuracy of each non-empty equal-mass bin, by rising confidence."""
    bins = [np.array_split(values, BINS) for values in _by_confidence(confidences, correct)]
    means = np.array([[part.mean() for part in parts if len(part)] for parts in bins])
    return means[0], means[1]


def risk_coverage(confidences: Confidences, correct: Correct) -> Curve:
    """Return the coverage and the error rate when the 1, 2, ..., n most confident queries are answered."""
    _, accuracies = _by_confidence(confidences, correct)
    count = np.arange(1, len(accuracies) + 1)
    return count / len(accuracies), np.cumsum(1 - accuracies[::-1]) / count


def _by_confidence(confidences: Confidences, correct: Correct) -> Curve:
    """Sort queries by rising confidence; queries of equal confidence all get their mean accuracy."""
    rising, groups = np.unique(confidences, return_inverse=True)
    sizes = np.bincount(groups)
    return np.repeat(rising, sizes), np.repeat(np.bincount(groups, weights=correct) / sizes, sizes)
