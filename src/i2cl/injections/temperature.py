"""A temperature: one number that says how sure label probabilities are; answers stay.

Source: Guo et al., On Calibration of Modern Neural Networks, https://arxiv.org/abs/1706.04599. Few labelled
rows tell little of it, so here it is the maximum a posteriori under a prior for its logarithm: a typical
value, and how far tasks differ.
"""

import math
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from i2cl.core.injection import Injection

TYPICAL, SPREAD = 2.4, 0.5
"""The best temperature of anchored calibration: its median, and the spread of its logarithm between tasks.

Of ten tasks and four seeds on SmolLM2 (docs/log.md).
"""

COLDEST, HOTTEST = 0.01, 100.0  # temperatures that are searched

# Log-probability, in nats, below which none is told from 0: the least number of half precision.
LEAST = float(np.finfo(np.float16).min)

_HALVINGS = 50  # of the search, which leaves a factor below 1 + 1e-14

Scores = Float[np.ndarray, "queries labels"]
Labels = Int[np.ndarray, " queries"]


def with_temperature(injection: Injection, temperature: float) -> Injection:
    """The same injection with another `temperature`.

    Above 1, probabilities are less sure; at 1, they are those of the model itself. What was measured of its
    answers stays, as they do. Its command does not: that makes no temperature. Raises I2CLError on a
    temperature outside `i2cl.core.injection.TEMPERATURES`.
    """
    return replace(injection, temperature=float(temperature), command="")


def normalised(scores: Scores, temperature: float = 1.0) -> Scores:
    """Log-probabilities among the labels at a temperature, in double precision."""
    scaled = np.asarray(scores, float) / temperature
    shifted = scaled - scaled.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def likely_temperature(
    scores: Scores, gold: Labels, typical: float = TYPICAL, spread: float = SPREAD
) -> float:
    """The most probable temperature, given rows that the fit has not seen.

    It minimises the summed log-loss plus ``log(t / typical) ** 2 / (2 * spread ** 2)``: ``typical`` is the
    median of the prior, ``spread`` the standard deviation of its logarithm, infinite for the least log-loss.
    Without rows, or where no temperature changes them, it is the typical one. Scores are log-probabilities
    among the labels.
    """
    if not len(scores) or not np.ptp(scores, axis=1).any():
        return typical
    known = np.maximum(normalised(scores), LEAST)
    right = known[np.arange(len(gold)), gold]
    low, high = math.log(COLDEST), math.log(HOTTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inverse = math.exp(-middle)
        probabilities = np.exp(normalised(known * inverse))
        # Slope of the log-loss in the logarithm: negative where probabilities are sharper than answers right.
        slope = -inverse * ((probabilities * known).sum(1) - right).sum()
        sharper = slope + (middle - math.log(typical)) / spread**2 < 0
        low, high = (middle, high) if sharper else (low, middle)
    return math.exp((low + high) / 2)


def best_temperature(scores: Scores, gold: Labels) -> float:
    """The temperature with the least log-loss, between `COLDEST` and `HOTTEST`; 1 where none matters."""
    return likely_temperature(scores, gold, 1.0, math.inf)
