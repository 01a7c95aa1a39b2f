"""Contextual calibration: divide out what another method says about texts without content.

Source: Zhao et al. 2021, https://arxiv.org/abs/2102.09690.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from i2cl.methods.base import Predictor, Wrapper
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.tasks import Example, Task

CONTENT_FREE = ("N/A", "[MASK]", "...")
"""Zhao et al. use "N/A", "[MASK]" and the empty string, for which the dots stand here."""


class ContextualCalibration(Wrapper):
    """Probabilities of another method, divided by its mean ones for content-free texts."""

    name: ClassVar[str] = "contextual_calibration"
    summary: ClassVar[str] = "another method's scores less those for content-free texts"
    needs: ClassVar[str] = "what the method below it needs"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> "ContextualPredictor":
        """Fit the method below and score the content-free texts."""
        below = self.below.fit(decoder, task, demonstrations, seed)
        prior = below.scores(CONTENT_FREE).softmax(-1).mean(0).clamp(min=1e-12).log()
        return ContextualPredictor(below, prior)


@dataclass(frozen=True)
class ContextualPredictor:
    """Scores of the method below less the prior's logarithm."""

    below: Predictor
    prior: Float[Tensor, " labels"]

    @property
    def trainable_parameters(self) -> int:
        """Those of the method below."""
        return self.below.trainable_parameters

    @property
    def cached_values(self) -> int:
        """One more per label."""
        return self.below.cached_values + self.prior.numel()

    @property
    def cached_bytes(self) -> int:
        """Those of the method below and of the prior."""
        return self.below.cached_bytes + self.prior.nbytes

    @property
    def held_out(self) -> int:
        """That of the method below."""
        return self.below.held_out

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities over the labels, calibrated and normalised again."""
        return (self.below.scores(texts, progress).log_softmax(-1) - self.prior).log_softmax(-1)


class BatchCalibration(Wrapper):
    """Probabilities of another method, divided by their mean over all texts scored together."""

    name: ClassVar[str] = "batch_calibration"
    summary: ClassVar[str] = "another method's scores less their mean over the queries"
    needs: ClassVar[str] = "what the method below it needs, and the unlabelled queries together"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> "BatchPredictor":
        """Fit the method below; the mean is only known at prediction."""
        return BatchPredictor(self.below.fit(decoder, task, demonstrations, seed))


@dataclass(frozen=True)
class BatchPredictor:
    """Scores of the method below less the logarithm of its mean probabilities."""

    below: Predictor

    @property
    def trainable_parameters(self) -> int:
        """Those of the method below."""
        return self.below.trainable_parameters

    @property
    def cached_values(self) -> int:
        """Those of the method below."""
        return self.below.cached_values

    @property
    def cached_bytes(self) -> int:
        """Those of the method below."""
        return self.below.cached_bytes

    @property
    def held_out(self) -> int:
        """That of the method below."""
        return self.below.held_out

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities over the labels, calibrated on these texts and normalised again."""
        probable = self.below.scores(texts, progress).log_softmax(-1)
        mean = probable.exp().mean(0).clamp(min=1e-12).log()
        return (probable - mean).log_softmax(-1)
