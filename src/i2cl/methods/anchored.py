"""Anchored calibration: an injection fitted around the plain model, among the label words.

Beyond the paper; see `i2cl.core.anchored`.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import pydantic

from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.encoder_bias import EmbeddingsConfig, EncoderBias
from i2cl.core.injection import Injection
from i2cl.core.weights import apply_class_weight
from i2cl.injections.temperature import SPREAD, TYPICAL
from i2cl.methods.base import Cost, Method, Predictor
from i2cl.methods.calibrated.folds import injected
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.training import StepProgress
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class Anchored(Method):
    """A vector at every writer, as far from the plain model as the demonstrations' labels pay for."""

    name: ClassVar[str] = "anchored"
    summary: ClassVar[str] = "a vector at every writer, fitted around the plain model among the label words"
    formula: ClassVar[str] = "2DL"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = (AnchoredConfig,)
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
        demonstrations: Examples,
        seed: int = 0,
        progress: StepProgress | None = None,
        scoring: Scoring = "auto",
    ) -> Injection:
        """Fit."""
        return anchor(
            decoder, task, demonstrations, self.anchoring, seed=seed, scoring=scoring, progress=progress
        )

    def like(self, injection: Injection) -> Self:
        """The same method for fewer demonstrations than those of an injection: descended if that was.
        What went into a kernel goes into one again, unless the memory has become too small.
        """
        if injection.settings.get("solved_by") != "descent":
            return self
        return replace(self, anchoring=self.anchoring.model_copy(update={"solver": "descent"}))

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Inject what `injection` finds."""
        injection = self.injection(decoder, task, demonstrations, seed)
        sites = decoder.layers * (2 if self.anchoring.writers == "both" else 1)
        weights = injection.word_weights
        trained = sites * decoder.d_model + (0 if weights is None else weights.numel())
        cost = Cost.of(injection.context.values, weights, trained=trained)
        return PromptPredictor(injection.questions(decoder), edit=injection.edit(), cost=cost)


@dataclass(frozen=True)
class AnchoredWithEmbeddings(Anchored):
    """Both models' label probabilities multiplied, in one injection; `i2cl.methods.base.Product` makes the
    same of any two methods, which no artefact holds.
    """

    name: ClassVar[str] = "anchored+sentence_embeddings"
    summary: ClassVar[str] = "anchored calibration and a sentence encoder, their probabilities multiplied"
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
        """Fit the encoder's part, then the model's, which counts as at its typical temperature.
        Raises I2CLError as `i2cl.core.encoder_bias.EncoderBias.fit`.
        """
        shown = apply_class_weight(demonstrations, task.labels, self.anchoring.class_weight)
        bias = EncoderBias.fit(self.embeddings, task, shown, str(decoder.device), scale=TYPICAL)
        injection = super().injection(decoder, task, demonstrations, seed, progress, scoring)
        settings = injection.settings | {"embeddings_c": self.embeddings.embeddings_c}
        return replace(injection, encoder_bias=bias, settings=settings, temperature=TYPICAL)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Inject what `injection` finds, at a temperature of 1."""
        return injected(self.injection(decoder, task, demonstrations, seed), decoder, task)
