"""Implicit in-context learning: context vector, injection, calibration."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from i2cl.calibration import CalibrationConfig, calibrate
from i2cl.context import ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.methods.base import Method
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CL(Method):
    """A context vector injected with calibrated coefficients (paper, section "Methodology")."""

    name: ClassVar[str] = "i2cl"
    summary: ClassVar[str] = "context vector injected with calibrated coefficients"
    row: ClassVar[str] = "I2CL (ours)"
    formula: ClassVar[str] = "2DL"
    settings = (ExtractConfig, CalibrationConfig)

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract and calibrate."""
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        return PromptPredictor(
            decoder,
            task,
            edit=injection.edit(),
            cached_values=context.values.numel(),
            trainable_parameters=self.calibration.parameters(decoder.layers, self.extraction.writers),
        )
