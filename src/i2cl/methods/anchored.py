"""Anchored calibration: an injection fitted around the plain model, among the label words.

Beyond the paper; see `i2cl.core.anchored`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from i2cl.core.anchored import AnchoredConfig, PriorScale, anchor, require_few
from i2cl.core.context import ContextVector, ExtractConfig, extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.errors import I2CLError
from i2cl.injections.temperature import SPREAD, TYPICAL
from i2cl.methods.base import Cost, Method
from i2cl.methods.controls import CorruptionConfig, NoiseConfig, corrupted, noise_like
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.scoring import Questions
from i2cl.models.training import StepProgress
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class Anchored(Method):
    """A vector at every writer, as far from the plain model as the demonstrations' labels pay for."""

    name: ClassVar[str] = "anchored"
    summary: ClassVar[str] = "a vector at every writer, fitted around the plain model among the label words"
    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[BaseModel], ...]] = (ExtractConfig, AnchoredConfig)

    extraction: ExtractConfig = field(default_factory=ExtractConfig)
    anchoring: AnchoredConfig = field(default_factory=AnchoredConfig)

    @property
    def temperatures(self) -> tuple[float, float]:
        """As measured."""
        return TYPICAL, SPREAD

    @property
    def rounds(self) -> int:
        """How often progress is told, at most."""
        return self.anchoring.steps

    def injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Sequence[Example],
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Extract, and fit."""
        require_few(task, demonstrations)
        return anchor(
            decoder,
            task,
            demonstrations,
            self.context(decoder, task, demonstrations, seed),
            self.anchoring,
            seed=seed,
            scoring=scoring,
            progress=progress,
        )

    def context(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> ContextVector:
        """What lambda multiplies, and may set the scale: the demonstrations' context vector."""
        return extract(decoder, task, demonstrations, self.extraction, seed=seed)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Inject what `injection` finds."""
        injection = self.injection(decoder, task, demonstrations, seed)
        layers = CalibrationConfig(layers=self.anchoring.anchored_layers)
        sites = int(layers.active(decoder.layers, self.extraction.writers).sum())
        trained = sites * (2 if self.anchoring.free == "scalars" else decoder.d_model)
        cost = Cost.of(injection.context.values, trained=trained)
        return PromptPredictor(Questions(decoder, task), edit=injection.edit(), cost=cost)


class ControlConfig(BaseModel):
    """What stands in for the context vector.

    Attributes:
        stand_in: the context vector of the same texts under labels drawn at random (``random_labels``), or
            Gaussian noise of the context vector's norm at each layer and writer (``noise``), for what takes
            more of it than its norms.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stand_in: Literal["random_labels", "noise"] = "random_labels"


class ControlledConfig(AnchoredConfig):
    """Anchored calibration on the context vector's scale, without which there is little to control."""

    prior_scale: PriorScale = "context"


@dataclass(frozen=True)
class AnchoredControl(Anchored):
    """The control that tells what the context vector contributes to anchored calibration."""

    name: ClassVar[str] = "anchored_control"
    summary: ClassVar[str] = "anchored calibration with something else in place of the context vector"
    settings = (ExtractConfig, ControlledConfig, ControlConfig)

    anchoring: ControlledConfig = field(default_factory=ControlledConfig)
    control: ControlConfig = field(default_factory=ControlConfig)

    def __post_init__(self) -> None:
        """Refuse a control that is anchored calibration itself.

        Raises:
            I2CLError: if the fit takes nothing of the context vector, or its norms alone, as noise has.
        """
        chosen, noise = self.anchoring, self.control.stand_in == "noise"
        same = chosen.free == "vectors" and chosen.prior_lambda == 0
        if same and (noise or chosen.told_by_slopes):
            what = "stand_in=noise" if noise else f"prior_scale={chosen.prior_scale}"
            raise I2CLError(
                f"anchored_control with {what} is anchored calibration itself: "
                "add free=scalars or a prior_lambda" + ("" if noise else ", or take prior_scale=context")
            )

    def context(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> ContextVector:
        """The vector that stands in."""
        if self.control.stand_in == "random_labels":
            drawn = CorruptionConfig(corruption="random_label")
            return super().context(decoder, *corrupted(task, demonstrations, drawn, seed), seed)
        real = super().context(decoder, task, demonstrations, seed)
        return noise_like(real, NoiseConfig(noise_vector="matched"), seed)
