"""I2CL with unseen demonstrations: coefficients from one set, context vector from another.

Source: paper, section "Linear Coefficients Are Generalizable".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from i2cl.calibration import calibrate
from i2cl.context import extract
from i2cl.decoder import Decoder
from i2cl.methods.injection_base import InjectionMethod
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CLUnseen(InjectionMethod):
    """Coefficients are calibrated on the demonstrations; as many others make the vector that is injected."""

    name: ClassVar[str] = "i2cl_unseen"
    summary: ClassVar[str] = "I2CL whose injected vector comes from other demonstrations"
    row: ClassVar[str] = "Unseen demo. (figure on robustness)"
    needs: ClassVar[str] = "demonstrations, as many held-out examples"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Calibrate on one set, extract from the other.

        Raises:
            I2CLError: if the training split has too few further examples.
        """
        others = task.held_out(len(demonstrations), demonstrations, seed)
        seen = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, seen, self.calibration, seed=seed)
        unseen = extract(decoder, task, others, self.extraction, seed=seed)
        return self.predictor(decoder, task, replace(injection, context=unseen), held_out=len(others))
