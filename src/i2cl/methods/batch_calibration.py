"""Batch calibration: divide out the mean prediction over the queries themselves.

Source: Zhou et al. 2024, https://arxiv.org/abs/2309.17249.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from i2cl.decoder import Decoder
from i2cl.methods.base import Predictor, Wrapper
from i2cl.scoring import Progress
from i2cl.tasks import Example, Task


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
