"""Calibration of another method's label probabilities: contextual, label prior, batch and temperature."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from i2cl.errors import I2CLError
from i2cl.injections.label_prior import MIN_UNLABELLED, log_mean, prior_bias
from i2cl.injections.temperature import likely_temperature
from i2cl.methods.base import CalibratedPredictor, Cost, Predictor, Wrapper
from i2cl.methods.calibrated.folds import FOLDS, folded, unmeasurable
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, add_label_bias
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

CONTENT_FREE = ("N/A", "[MASK]", "...")
"""Zhao et al. use "N/A", "[MASK]" and the empty string, which the dots replace here."""


class ContextualCalibration(Wrapper):
    """Divides probabilities by their mean for content-free texts.

    Source: Zhao et al. 2021, https://arxiv.org/abs/2102.09690.
    """

    name: ClassVar[str] = "contextual_calibration"
    summary: ClassVar[str] = "another method's scores minus those for content-free texts"
    needs: ClassVar[str] = "what the inner method needs"
    is_stochastic: ClassVar[bool] = False

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Score the content-free texts."""
        bias = -log_mean(inner.log_probs(CONTENT_FREE))
        return CalibratedPredictor(inner, inner.cost + Cost.of(bias), bias)


class LabelPriorConfig(Settings):
    """Settings of a label prior."""

    unlabelled: int = Field(64, ge=1)  # maximum number of texts


class LabelPrior(Wrapper):
    """Divides another method's probabilities by their mean over unlabelled training texts.

    The mean is stored, so unlike batch calibration this can classify a single query. It assumes that all
    classes are about equally frequent.
    """

    name: ClassVar[str] = "label_prior"
    summary: ClassVar[str] = "another method's scores minus their mean over unlabelled texts, stored"
    needs: ClassVar[str] = "what the inner method needs, and unlabelled texts"
    settings = (LabelPriorConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Score unlabelled texts; raises I2CLError if too few remain beside the demonstrations."""
        texts = task.unlabelled(self.config.unlabelled, shown, seed)
        fewest = min(MIN_UNLABELLED, self.config.unlabelled)
        if len(texts) < fewest:
            lack = f"training texts beside the demonstrations, task {task.name!r} has {len(texts)}"
            raise I2CLError(f"label_prior needs {fewest} {lack}: add some, or use contextual_calibration")
        bias = prior_bias(None, inner.log_probs(texts))
        return CalibratedPredictor(inner, inner.cost + Cost.of(bias, unlabelled=len(texts)), bias)


class BatchCalibration(Wrapper):
    """Divides another method's probabilities by their mean over all texts that are scored together.

    This assumes that these texts are about equally distributed over the classes. Source: Zhou et al. 2024,
    https://arxiv.org/abs/2309.17249.
    """

    name: ClassVar[str] = "batch_calibration"
    summary: ClassVar[str] = "another method's scores minus their mean over the queries"
    needs: ClassVar[str] = "what the inner method needs, and the unlabelled queries together"
    transductive: ClassVar[bool] = True
    is_stochastic: ClassVar[bool] = False

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Nothing more to fit: the mean is only known at prediction."""
        return BatchPredictor(inner, inner.cost)


@dataclass(frozen=True)
class BatchPredictor:
    """Scores of the wrapped method minus the log of its mean probabilities."""

    inner: Predictor
    cost: Cost

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Compute log-probabilities of the labels. Raises I2CLError on a single text."""
        if len(texts) == 1:
            raise I2CLError(
                "batch_calibration cannot classify a single text, since it subtracts the mean over the "
                "texts: give many, of all classes, or use contextual_calibration"
            )
        scores = self.inner.log_probs(texts, progress)
        return add_label_bias(scores, -log_mean(scores))


class TemperatureConfig(Settings):
    """Settings of temperature scaling."""

    refits: int = Field(FOLDS, ge=2)  # folds of the cross-validation that chooses the temperature


class Temperature(Wrapper):
    """Temperature scaling of another method, chosen by k-fold cross-validation on the demonstrations.

    See `i2cl.injections.temperature.likely_temperature`. With one example per class, cross-validation is not
    possible, and probabilities stay as they are.
    """

    name: ClassVar[str] = "temperature"
    summary: ClassVar[str] = "another method's probabilities at a temperature chosen by cross-validation"
    needs: ClassVar[str] = "what the inner method needs, and its time again for each refit"
    settings = (TemperatureConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Cross-validate the wrapped method and choose the temperature."""
        parts = self.config.refits
        if unmeasurable(task, shown, parts, seed):
            return inner
        refit = partial(self.inner.fit, decoder, task, seed=seed)
        scores = folded(task, shown, refit, parts, seed).log_probs([example.text for example in shown])
        gold = np.array([example.label for example in shown])
        chosen = likely_temperature(scores.numpy(), gold, *self.inner.temperatures)
        cost = inner.cost + Cost(cached_values=1, cached_bytes=8)
        return CalibratedPredictor(inner, cost, temperature=chosen)
