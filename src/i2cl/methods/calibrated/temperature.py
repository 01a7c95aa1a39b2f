"""Another method's label probabilities at a temperature that refits choose; its answers stay."""

from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from i2cl.injections.temperature import likely_temperature
from i2cl.methods.base import Cost, MendedPredictor, Predictor, Wrapper
from i2cl.methods.calibrated.folds import FOLDS, folded, unmeasurable
from i2cl.models.decoder import Decoder
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task


class TemperatureConfig(Settings):
    """How the rows are made that a temperature is chosen on."""

    refits: int = Field(FOLDS, ge=2)  # of the method below, each without one part of the demonstrations


class Temperature(Wrapper):
    """The method below, with probabilities about as sure as its answers are right.
    Refits that have not seen a demonstration say how sure it was answered, and whether rightly;
    `i2cl.injections.temperature.likely_temperature` makes one number of that. With one example a class there
    is nothing to refit, and probabilities stay.
    """

    name: ClassVar[str] = "temperature"
    summary: ClassVar[str] = "another method's probabilities at a temperature that refits choose"
    needs: ClassVar[str] = "what the method below it needs, and its time again for each refit"
    settings = (TemperatureConfig,)

    def over(self, decoder: Decoder, below: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Refit the method below, and choose."""
        parts = self.config.refits
        if unmeasurable(task, shown, parts, seed):
            return below
        refit = partial(self.below.fit, decoder, task, seed=seed)
        scores = folded(task, shown, refit, parts, seed).scores([example.text for example in shown])
        gold = np.array([example.label for example in shown])
        chosen = likely_temperature(scores.numpy(), gold, *self.below.temperatures)
        cost = below.cost + Cost(cached_values=1, cached_bytes=8)
        return MendedPredictor(below, cost, temperature=chosen)
