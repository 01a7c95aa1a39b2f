"""I2CL with unseen demonstrations: coefficients from one set, context vector from another.

Source: paper, section "Linear Coefficients Are Generalizable".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from i2cl.calibration import CalibrationConfig, calibrate
from i2cl.context import ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.methods.base import Method
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CLUnseen(Method):
    """Coefficients are calibrated on the demonstrations; as many others make the vector that is injected."""

    name: ClassVar[str] = "i2cl_unseen"
    summary: ClassVar[str] = "I2CL whose injected vector comes from other demonstrations"
    row: ClassVar[str] = "Unseen demo. (figure on robustness)"
    needs: ClassVar[str] = "demonstrations, as many held-out examples"
    formula: ClassVar[str] = "2DL"
    settings = (ExtractConfig, CalibrationConfig)

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

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
        return PromptPredictor(
            decoder,
            task,
            edit=replace(injection, context=unseen).edit(),
            cached_values=unseen.values.numel(),
            trainable_parameters=self.calibration.parameters(decoder.layers, self.extraction.writers),
            held_out=len(others),
        )
