"""Anchored calibration as a method: vectors fitted around the plain model, among the label words.

Beyond the paper; see `i2cl.core.anchored`.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import pydantic

from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.injection import Injection
from i2cl.core.weights import apply_class_weight
from i2cl.encoders import EmbeddingsConfig, EncoderBias
from i2cl.injections.temperature import SPREAD, TYPICAL_TEMPERATURE
from i2cl.methods.base import Cost, Method, Predictor
from i2cl.methods.calibrated.folds import injected
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.training import StepProgress
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class Anchored(Method):
    """A vector for every sublayer, fitted to the demonstrations' labels."""

    name: ClassVar[str] = "anchored"
    summary: ClassVar[str] = (
        "a vector for every sublayer, fitted around the plain model among the label words"
    )
    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = (AnchoredConfig,)
    anchoring: AnchoredConfig = field(default_factory=AnchoredConfig)

    @property
    def temperatures(self) -> tuple[float, float]:
        """Typical best temperature, as measured, and the spread of its logarithm."""
        return TYPICAL_TEMPERATURE, SPREAD

    @property
    def rounds(self) -> int:
        """Maximum number of progress updates."""
        return self.anchoring.steps

    def injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Fit an injection; see `i2cl.core.anchored.anchor`."""
        return anchor(
            decoder, task, demonstrations, self.anchoring, seed=seed, scoring=scoring, progress=progress
        )

    def like(self, injection: Injection) -> Self:
        """Return the method with the solver that made an injection, for refits to fewer demonstrations.

        Gauss-Newton needs no such request: a smaller fit uses it as well, unless memory has become scarce.
        """
        if injection.settings.get("solved_by") != "adamw":
            return self
        return replace(self, anchoring=self.anchoring.model_copy(update={"solver": "adamw"}))

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit an injection and predict with it."""
        injection = self.injection(decoder, task, demonstrations, seed)
        sites = decoder.layers * (2 if self.anchoring.writers == "both" else 1)
        weights = injection.word_weights
        trained = sites * decoder.d_model + (0 if weights is None else weights.numel())
        cost = Cost.of(injection.context.values, weights, trained=trained)
        return PromptPredictor(
            injection.scorer(decoder), edit=injection.edit(), injection=injection, cost=cost
        )


@dataclass(frozen=True)
class AnchoredWithEmbeddings(Anchored):
    """Product of experts of anchored calibration and a sentence encoder, stored as one injection.

    `i2cl.methods.base.Product` combines any two methods in the same way, but cannot be stored.
    """

    name: ClassVar[str] = "anchored+sentence_embeddings"
    summary: ClassVar[str] = "product of anchored calibration and a sentence-encoder classifier"
    needs: ClassVar[str] = "demonstrations, sentence-transformers, a second model"
    formula: ClassVar[str] = "2DL, (d+1) per label"
    settings = (AnchoredConfig, EmbeddingsConfig)
    embeddings: EmbeddingsConfig = field(default_factory=EmbeddingsConfig)

    def injection(
        self,
        decoder: Decoder,
        task: Task,
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Fit the encoder's classifier, then the vectors, which count at their typical temperature.

        Raises I2CLError as `i2cl.encoders.EncoderBias.fit`.
        """
        shown = apply_class_weight(demonstrations, task.labels, self.anchoring.class_weight)
        bias = EncoderBias.fit(self.embeddings, task, shown, str(decoder.device), scale=TYPICAL_TEMPERATURE)
        injection = super().injection(decoder, task, demonstrations, seed, progress, scoring)
        settings = injection.settings | {"embeddings_c": self.embeddings.embeddings_c}
        return injection.with_head(encoder=bias, temperature=TYPICAL_TEMPERATURE).with_report(
            settings=settings
        )

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit an injection and predict with it, at a temperature of 1."""
        return injected(self.injection(decoder, task, demonstrations, seed), decoder, task)
