"""What I2CL and its variants share: settings of extraction and calibration, and the injected predictor."""

from dataclasses import dataclass, field
from typing import ClassVar

import pydantic

from i2cl.context import ExtractConfig
from i2cl.decoder import Decoder
from i2cl.injection import Injection
from i2cl.methods.base import Method
from i2cl.methods.prompt_base import PromptPredictor, Shown
from i2cl.prefix import Prefix
from i2cl.recipe import CalibrationConfig
from i2cl.tasks import Task


@dataclass(frozen=True)
class InjectionMethod(Method):
    """Extracts, calibrates and injects; how exactly is up to the variant."""

    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = (ExtractConfig, CalibrationConfig)

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    def predictor(
        self,
        decoder: Decoder,
        task: Task,
        injection: Injection,
        *,
        shown: Shown = (),
        prefix: Prefix | None = None,
        held_out: int = 0,
    ) -> PromptPredictor:
        """Scores under the injection, behind demonstrations or not."""
        vectors = len(injection.classes.values) if injection.classes else 1
        return PromptPredictor(
            decoder,
            task,
            shown,
            prefix,
            injection.edit(),
            cached_values=injection.context.values.numel() + (prefix.values if prefix else 0),
            trainable_parameters=self.calibration.parameters(
                decoder.layers, self.extraction.writers, vectors
            ),
            held_out=held_out,
        )
