"""Noise vector: I2CL whose context vector is replaced by Gaussian noise (paper, "Noise Vector")."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict

from i2cl.calibration import CalibrationConfig, calibrate
from i2cl.context import ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.methods.base import InjectedPredictor, option_defaults, read_options
from i2cl.tasks import Example, Task


class NoiseConfig(BaseModel):
    """How large the noise vector is.

    Attributes:
        noise_vector: entries of variance one (``standard``, released code), or the norm of the context
            vector it replaces, per layer and writer (``matched``).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    noise_vector: Literal["standard", "matched"] = "standard"


@dataclass(frozen=True)
class Noise:
    """The control that tells what the context vector itself contributes."""

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "I2CL with a Gaussian vector in place of the context vector"
    row: ClassVar[str] = "Noise vector"
    needs: ClassVar[str] = "demonstrations"

    vector: NoiseConfig = field(default_factory=NoiseConfig)
    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Size of the noise vector, and the settings of I2CL."""
        return option_defaults(NoiseConfig, ExtractConfig, CalibrationConfig)

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> Self:
        """Settings by their flat names."""
        return cls(
            read_options(NoiseConfig, options),
            read_options(ExtractConfig, options),
            read_options(CalibrationConfig, options),
        )

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> InjectedPredictor:
        """Draw a vector of the context vector's shape, then calibrate as I2CL does."""
        real = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        drawn = torch.randn(real.values.shape, generator=torch.Generator().manual_seed(seed))
        if self.vector.noise_vector == "matched":
            drawn = drawn / drawn.norm(dim=-1, keepdim=True) * real.values.norm(dim=-1, keepdim=True)
        context = replace(real, values=drawn)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        trained = self.calibration.parameters(decoder.layers, self.extraction.writers)
        return InjectedPredictor(decoder, injection, trained)
