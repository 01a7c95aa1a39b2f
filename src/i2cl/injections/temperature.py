"""Temperature scaling: calibrate label probabilities without changing predictions.

Source: Guo et al., On Calibration of Modern Neural Networks, https://arxiv.org/abs/1706.04599. With few
labelled rows the maximum-likelihood temperature is unreliable, so this is a maximum a posteriori estimate
with a log-normal prior.
"""

import math

import numpy as np
from jaxtyping import Float, Int

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError, require_type

TYPICAL_TEMPERATURE, TEMPERATURE_SPREAD = 2.4, 0.5
"""Prior for anchored calibration: median temperature, and standard deviation of its logarithm between tasks.

Measured on ten tasks and four seeds with SmolLM2 (docs/log.md).
"""

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0  # bounds of the search

# Smaller log-probabilities (nats), including minus infinity, are clipped to float16's minimum.
MIN_LOG_PROB = float(np.finfo(np.float16).min)

_MIN_THRESHOLD = 1e-12  # a threshold is inside (0, 1), also at extreme temperatures
_BISECTION_STEPS = 50  # relative precision better than 1e-14

Scores = Float[np.ndarray, "queries labels"]
Labels = Int[np.ndarray, " queries"]


def with_temperature(injection: Injection, temperature: float) -> Injection:
    """Return an injection with another `temperature`.

    Above 1, probabilities are less confident; at 1, they are the model's own. The weights of an ensemble and
    the log-odds of thresholds are all multiplied by the same factor. Predictions and their metrics do not
    change. The recorded command is removed, since it would not reproduce the temperature.

    Raises:
        I2CLError: if ``injection`` is not an `Injection`, or on a temperature that is not a number or outside
            `i2cl.core.injection.TEMPERATURE_BOUNDS`.
    """
    from scipy.special import expit, logit

    require_type("injection", injection, Injection, "load it with Injection.from_pretrained")
    try:
        number = float(temperature)
    except (TypeError, ValueError):
        raise I2CLError(f"temperature {temperature!r} is not a number: give one above 0") from None
    changed = injection.with_head(temperature=number).with_report(command="")
    factor, head = injection.temperature / changed.temperature, injection.head

    def rescale(thresholds: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if thresholds is None:
            return None
        scaled = expit(factor * logit(thresholds))
        return tuple(np.clip(scaled, _MIN_THRESHOLD, 1 - _MIN_THRESHOLD).tolist())

    return changed.with_head(
        expert_weights=tuple(factor * weight for weight in head.expert_weights),
        thresholds=rescale(head.thresholds),
        llm_thresholds=rescale(head.llm_thresholds),
    )


def log_softmax(scores: Scores, temperature: float = 1.0) -> Scores:
    """Return log-probabilities at a temperature, normalized over the labels, in double precision."""
    scaled = np.asarray(scores, float) / temperature
    shifted = scaled - scaled.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def likely_temperature(
    scores: Scores, gold: Labels, typical: float = TYPICAL_TEMPERATURE, spread: float = TEMPERATURE_SPREAD
) -> float:
    """Return the maximum a posteriori temperature, fitted to held-out rows.

    It minimizes the summed log-loss plus ``log(t / typical) ** 2 / (2 * spread ** 2)``. Without rows, or if
    all scores of each row are equal, it is ``typical``.

    Args:
        scores: log-probabilities of the labels, up to a constant per row.
        gold: index of the correct label of each row.
        typical: median of the prior.
        spread: standard deviation of the prior's logarithm; infinite for maximum likelihood.
    """
    if not len(scores) or not np.ptp(scores, axis=1).any():
        return typical
    log_probs = np.maximum(log_softmax(scores), MIN_LOG_PROB)
    gold_log_probs = log_probs[np.arange(len(gold)), gold]
    low, high = math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE)
    for _ in range(_BISECTION_STEPS):
        middle = (low + high) / 2
        inverse = math.exp(-middle)
        probabilities = np.exp(log_softmax(log_probs * inverse))
        # derivative of the log-loss with respect to the temperature's logarithm; negative if overconfident
        derivative = -inverse * ((probabilities * log_probs).sum(1) - gold_log_probs).sum()
        overconfident = derivative + (middle - math.log(typical)) / spread**2 < 0
        low, high = (middle, high) if overconfident else (low, middle)
    return math.exp((low + high) / 2)


def best_temperature(scores: Scores, gold: Labels) -> float:
    """Return the temperature with the lowest log-loss; 1 if the temperature has no effect."""
    return likely_temperature(scores, gold, 1.0, math.inf)
