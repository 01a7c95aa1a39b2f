"""Abstain from a prediction whose probability is below a confidence threshold."""

import numpy as np

from i2cl.errors import I2CLError


def require_confidence(threshold: float | None) -> None:
    """Raise I2CLError unless a threshold is above 0 and at most 1, or None."""
    if threshold is not None and (
        not isinstance(threshold, int | float | np.number) or not 0 < threshold <= 1
    ):
        raise I2CLError(f"min_confidence {threshold!r} is not a probability: give a number above 0, up to 1")
