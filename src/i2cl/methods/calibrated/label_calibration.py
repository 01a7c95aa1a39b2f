"""Another method's label probabilities, mended by those of nothing, by their mean, or by a temperature."""

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
"""Zhao et al. use "N/A", "[MASK]" and the empty string, for which the dots stand here."""


class ContextualCalibration(Wrapper):
    """Divides by the mean for content-free texts. Source: Zhao et al., https://arxiv.org/abs/2102.09690."""

    name: ClassVar[str] = "contextual_calibration"
    summary: ClassVar[str] = "another method's scores less those for content-free texts"
    needs: ClassVar[str] = "what the inner method needs"
    is_stochastic: ClassVar[bool] = False

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Score the content-free texts."""
        bias = -log_mean(inner.scores(CONTENT_FREE))
        return CalibratedPredictor(inner, inner.cost + Cost.of(bias), bias)


class LabelPriorConfig(Settings):
    """What a label prior is the mean over."""

    unlabelled: int = Field(64, ge=1)  # texts, at most


class LabelPrior(Wrapper):
    """Probabilities of another method, divided by its mean ones over texts without labels, once and for all.
    Unlike batch calibration it serves a single query. It takes for granted that a method which says one class
    more often than others is wrong in that, so classes are to be about equally frequent.
    """

    name: ClassVar[str] = "label_prior"
    summary: ClassVar[str] = "another method's scores less their mean over unlabelled texts, stored"
    needs: ClassVar[str] = "what the inner method needs, and unlabelled texts"
    settings = (LabelPriorConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Score unlabelled texts; raises I2CLError if too few remain beside the demonstrations."""
        texts = task.unlabelled(self.config.unlabelled, shown, seed)
        fewest = min(MIN_UNLABELLED, self.config.unlabelled)
        if len(texts) < fewest:
            lack = f"training texts beside the demonstrations, task {task.name!r} has {len(texts)}"
            raise I2CLError(f"label_prior needs {fewest} {lack}: add some, or use contextual_calibration")
        bias = prior_bias(None, inner.scores(texts))
        return CalibratedPredictor(inner, inner.cost + Cost.of(bias, unlabelled=len(texts)), bias)


class BatchCalibration(Wrapper):
    """Probabilities of another method, divided by their mean over all texts scored together.
    That takes for granted that these texts belong to all classes about equally often: a text among many of
    its own class is pushed away from it. Source: Zhou et al. 2024, https://arxiv.org/abs/2309.17249.
    """

    name: ClassVar[str] = "batch_calibration"
    summary: ClassVar[str] = "another method's scores less their mean over the queries"
    needs: ClassVar[str] = "what the inner method needs, and the unlabelled queries together"
    transductive: ClassVar[bool] = True
    is_stochastic: ClassVar[bool] = False

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Nothing more to fit: the mean is only known at prediction."""
        return BatchPredictor(inner, inner.cost)


@dataclass(frozen=True)
class BatchPredictor:
    """Scores of the method below less the logarithm of its mean probabilities."""

    inner: Predictor
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities over the labels, calibrated on these texts; raises I2CLError on a single one."""
        if len(texts) == 1:
            why = "since it subtracts the mean over the texts"
            cure = "give many, of all classes, or use contextual_calibration"
            raise I2CLError(f"batch_calibration cannot classify one text by itself, {why}: {cure}")
        scores = self.inner.scores(texts, progress)
        return add_label_bias(scores, -log_mean(scores))


class TemperatureConfig(Settings):
    """How the rows are made that a temperature is chosen on."""

    refits: int = Field(FOLDS, ge=2)  # of the method below, each without one part of the demonstrations


class Temperature(Wrapper):
    """The method below, with probabilities about as sure as its answers are right.
    Refits that have not seen a demonstration say how sure it was answered, and whether rightly;
    `i2cl.injections.temperature.likely_temperature` makes one number of that. With one example a class there
    is nothing to refit, and probabilities stay.
    """

    name: ClassVar[str] = "temperature"
    summary: ClassVar[str] = "another method's probabilities at a temperature that refits choose"
    needs: ClassVar[str] = "what the inner method needs, and its time again for each refit"
    settings = (TemperatureConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Refit the method below, and choose."""
        parts = self.config.refits
        if unmeasurable(task, shown, parts, seed):
            return inner
        refit = partial(self.inner.fit, decoder, task, seed=seed)
        scores = folded(task, shown, refit, parts, seed).scores([example.text for example in shown])
        gold = np.array([example.label for example in shown])
        chosen = likely_temperature(scores.numpy(), gold, *self.inner.temperatures)
        cost = inner.cost + Cost(cached_values=1, cached_bytes=8)
        return CalibratedPredictor(inner, cost, temperature=chosen)
