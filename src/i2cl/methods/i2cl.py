"""Implicit in-context learning: context vector, injection, calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from i2cl.calibration import CalibrationConfig, calibrate
from i2cl.context import ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.methods.base import InjectedPredictor, option_defaults, read_options
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class I2CL:
    """A context vector injected with calibrated coefficients (paper, section "Methodology")."""

    name: ClassVar[str] = "i2cl"
    summary: ClassVar[str] = "context vector injected with calibrated coefficients"
    row: ClassVar[str] = "I2CL (ours)"
    needs: ClassVar[str] = "demonstrations"

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Settings of extraction and calibration."""
        return option_defaults(ExtractConfig, CalibrationConfig)

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> Self:
        """Settings by their flat names."""
        return cls(read_options(ExtractConfig, options), read_options(CalibrationConfig, options))

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> InjectedPredictor:
        """Extract and calibrate."""
        context = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        trained = self.calibration.parameters(decoder.layers, self.extraction.writers)
        return InjectedPredictor(decoder, injection, trained)
