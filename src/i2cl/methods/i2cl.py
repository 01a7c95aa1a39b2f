"""Implicit in-context learning: context vector, injection, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from i2cl.calibration import calibrate
from i2cl.context import extract
from i2cl.decoder import Decoder
from i2cl.methods.injection_base import InjectionMethod
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CL(InjectionMethod):
    """A context vector injected with calibrated coefficients (paper, section "Methodology")."""

    name: ClassVar[str] = "i2cl"
    summary: ClassVar[str] = "context vector injected with calibrated coefficients"
    row: ClassVar[str] = "I2CL (ours)"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract and calibrate."""
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)
