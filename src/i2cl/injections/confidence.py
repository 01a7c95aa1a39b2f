"""When an answer is sure enough to be given: its probability among the labels against a threshold."""

from collections.abc import Sequence

import numpy as np

from i2cl.errors import I2CLError


def require_confidence(least: float | None) -> None:
    """Refuse a threshold that is no probability above 0 (None is none). Raises I2CLError, naming it."""
    if least is not None and (not isinstance(least, int | float | np.number) or not 0 < least <= 1):
        raise I2CLError(f"min_confidence {least!r} is no probability: give a number above 0, up to 1")


def sure_place(probabilities: Sequence[float], least: float | None = None) -> int | None:
    """Place of the first most probable label; None where its probability is below ``least``."""
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    return best if least is None or probabilities[best] >= least else None
