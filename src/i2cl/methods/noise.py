"""Noise vector: I2CL whose context vector is replaced by Gaussian noise (paper, "Noise Vector")."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict

from i2cl.calibration import calibrate
from i2cl.context import ContextVector, ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.methods.injection_base import InjectionMethod
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.recipe import CalibrationConfig
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
class Noise(InjectionMethod):
    """The control that tells what the context vector itself contributes."""

    name: ClassVar[str] = "noise"
    summary: ClassVar[str] = "I2CL with a Gaussian vector in place of the context vector"
    row: ClassVar[str] = "Noise vector"
    settings = (ExtractConfig, CalibrationConfig, NoiseConfig)

    vector: NoiseConfig = field(default_factory=NoiseConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Draw a vector of the context vector's shape, then calibrate as I2CL does."""
        real = extract(decoder, task, demonstrations, self.extraction, seed=seed)
        context = noise_like(real, self.vector, seed)
        injection = calibrate(decoder, task, demonstrations, context, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)


def noise_like(real: ContextVector, config: NoiseConfig, seed: int) -> ContextVector:
    """A Gaussian vector in place of a context vector."""
    own = random.Random(f"noise vector {seed}").getrandbits(63)  # calibration draws from the seed itself
    drawn = torch.randn(real.values.shape, generator=torch.Generator().manual_seed(own))
    if config.noise_vector == "matched":
        drawn = drawn / drawn.norm(dim=-1, keepdim=True) * real.values.norm(dim=-1, keepdim=True)
    return replace(real, values=drawn)
