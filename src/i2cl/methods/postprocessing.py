"""Methods that post-process the label scores of another method: calibration, and products of experts.

Each is a function on scores, which `PostProcessedPredictor` applies to the scores of a fitted method.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from i2cl.errors import I2CLError
from i2cl.injections.label_prior import MIN_UNLABELLED, log_mean, prior_bias
from i2cl.injections.temperature import likely_temperature
from i2cl.methods.base import Cost, LabelScores, Method, Predictor
from i2cl.methods.cross_validation import FOLDS, cross_validate, cross_validation_error
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, add_label_bias, label_log_probs
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

CONTENT_FREE = ("N/A", "[MASK]", "...")
"""As in Zhao et al., except that "..." replaces the empty string, which cannot be classified here."""


@dataclass(frozen=True)
class PostProcessedPredictor:
    """A predictor with a function applied to its scores.

    Attributes:
        inner: the predictor.
        process: returns log-probabilities, given the scores of the predictor and the texts.
        cost: storage and data of both.
        temperature: the fitted temperature that ``process`` applies, or 1.
    """

    inner: Predictor
    process: Callable[[LabelScores, Sequence[str]], LabelScores]
    cost: Cost
    temperature: float = 1.0

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return the processed scores. Raises I2CLError as the inner predictor and ``process``."""
        return self.process(self.inner.log_probs(texts, progress), texts)


def subtract_batch_mean(scores: LabelScores) -> LabelScores:
    """Divide probabilities by their mean over the texts. Raises I2CLError for a single text."""
    if len(scores) == 1:
        raise I2CLError(
            "batch_calibration cannot classify a single text, since it subtracts the mean over the texts: "
            "give many, of all classes, or use contextual_calibration"
        )
    return add_label_bias(scores, -log_mean(scores))


def product_of_experts(first: LabelScores, second: LabelScores) -> LabelScores:
    """Multiply the label probabilities of two methods and normalize, in log space.

    A label has log-probability minus infinity if either method excludes it. Source: Hinton 2002,
    https://doi.org/10.1162/089976602760128018.
    """
    return (first.log_softmax(-1) + second.log_softmax(-1)).log_softmax(-1)


class Wrapper(Method):
    """A method that post-processes the scores of another one, written ``inner+name``."""

    default: ClassVar[str] = "few_shot"  #: name of the inner method, if none is given

    def __init__(self, inner: Method | None = None, config: Any = None) -> None:
        self._inner = inner
        self.config: Any = config or next((settings() for settings in self.settings), None)

    @property
    def inner(self) -> Method:
        """The wrapped method. Raises I2CLError if there is none."""
        if self._inner is None:
            raise I2CLError(f"{self.name} wraps another method: name one, such as few_shot+{self.name}")
        return self._inner

    @property
    def full_name(self) -> str:
        """Full name; the inner method is omitted if it is the default."""
        inner = self.inner.full_name
        return self.name if inner == self.default else f"{inner}+{self.name}"

    @property
    def temperature_prior(self) -> tuple[float, float]:
        """Same as the inner method."""
        return self.inner.temperature_prior

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit the inner method and wrap it."""
        inner = self.inner.fit(decoder, task, demonstrations, seed)
        return self.wrap(decoder, inner, task, demonstrations, seed)

    @abstractmethod
    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Post-process the scores of the inner method.

        Args:
            decoder: the frozen model.
            inner: the inner method, fitted with the other arguments.
            task: the task.
            shown: the demonstrations.
            seed: seed of everything random.

        Raises:
            I2CLError: if required data is missing.
        """


class ContextualCalibration(Wrapper):
    """Divides probabilities by their mean for content-free texts.

    Source: Zhao et al. 2021, https://arxiv.org/abs/2102.09690.
    """

    name = "contextual_calibration"
    summary = "another method's scores minus those for content-free texts"
    needs = "what the inner method needs"
    is_stochastic = False

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Score the content-free texts."""
        bias = -log_mean(inner.log_probs(CONTENT_FREE))
        cost = inner.cost + Cost.of(bias)
        return PostProcessedPredictor(inner, lambda scores, _: label_log_probs(scores, bias), cost)


class LabelPriorConfig(Settings):
    """Settings of a label prior."""

    unlabelled: int = Field(64, ge=1)  # maximum number of texts


class LabelPrior(Wrapper):
    """Divides another method's probabilities by their mean over unlabelled training texts.

    The mean is stored, so unlike batch calibration this can classify a single query. It assumes that all
    classes are about equally frequent.
    """

    name = "label_prior"
    summary = "another method's scores minus their mean over unlabelled texts, stored"
    needs = "what the inner method needs, and unlabelled texts"
    settings = (LabelPriorConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Score unlabelled texts. Raises I2CLError if too few remain beside the demonstrations."""
        texts = task.unlabelled(self.config.unlabelled, shown, seed)
        min_texts = min(MIN_UNLABELLED, self.config.unlabelled)
        if len(texts) < min_texts:
            raise I2CLError(
                f"label_prior needs {min_texts} training texts beside the demonstrations, task {task.name!r} "
                f"has {len(texts)}: add some, or use contextual_calibration"
            )
        bias = prior_bias(None, inner.log_probs(texts))
        cost = inner.cost + Cost.of(bias, unlabelled=len(texts))
        return PostProcessedPredictor(inner, lambda scores, _: label_log_probs(scores, bias), cost)


class BatchCalibration(Wrapper):
    """Divides another method's probabilities by their mean over all texts that are scored together.

    This assumes that these texts are about equally distributed over the classes. Source: Zhou et al. 2024,
    https://arxiv.org/abs/2309.17249.
    """

    name = "batch_calibration"
    summary = "another method's scores minus their mean over the queries"
    needs = "what the inner method needs, and the unlabelled queries together"
    is_transductive = True
    is_stochastic = False

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Return a predictor that subtracts the mean of each call; nothing more is fitted."""
        return PostProcessedPredictor(inner, lambda scores, _: subtract_batch_mean(scores), inner.cost)


class TemperatureConfig(Settings):
    """Settings of temperature scaling."""

    refits: int = Field(FOLDS, ge=2)  # folds of the cross-validation that chooses the temperature


class Temperature(Wrapper):
    """Temperature scaling of another method, chosen by k-fold cross-validation on the demonstrations.

    See `i2cl.injections.temperature.likely_temperature`. With one example per class, cross-validation is not
    possible, and probabilities are unchanged. If only some classes have one example, the temperature is
    fitted to the rows of the others.
    """

    name = "temperature"
    summary = "another method's probabilities at a temperature chosen by cross-validation"
    needs = "what the inner method needs, and its time again for each refit"
    settings = (TemperatureConfig,)

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Cross-validate the inner method and choose the temperature."""
        folds = self.config.refits
        if cross_validation_error(task, shown, folds, seed):
            return inner
        refit = partial(self.inner.fit, decoder, task, seed=seed)
        held_out = cross_validate(task, shown, refit, folds, seed)
        scored = [example for example in shown if example.text in held_out.fold_of]
        scores = held_out.log_probs([example.text for example in scored]).numpy()
        gold = np.array([example.label for example in scored])
        temperature = likely_temperature(scores, gold, *self.inner.temperature_prior)
        cost = inner.cost + Cost(cached_values=1, cached_bytes=8)
        return PostProcessedPredictor(
            inner, lambda scores, _: label_log_probs(scores, temperature=temperature), cost, temperature
        )


class Product(Wrapper):
    """Product of experts of two methods fitted to the same demonstrations, written ``inner+other``.

    The inner method runs at its typical temperature unless a temperature was fitted: an overconfident LLM
    would dominate the product. Scores that are not log-probabilities, such as the votes of kNN prompting,
    have little influence.
    """

    def __init__(self, inner: Method, other: Method) -> None:
        super().__init__(inner)
        self.other = other

    @property
    def full_name(self) -> str:
        """Full names of both methods, joined by a plus sign."""
        return f"{self.inner.full_name}+{self.other.full_name}"

    @property
    def temperature_prior(self) -> tuple[float, float]:
        """A median of 1, since products with tempered scores are well calibrated (docs/ablations.md)."""
        return 1.0, self.inner.temperature_prior[1]

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Fit the other method and multiply the probabilities."""
        other = self.other.fit(decoder, task, shown, seed)
        is_calibrated = isinstance(inner, PostProcessedPredictor) and inner.temperature != 1
        temperature = 1.0 if is_calibrated else self.inner.temperature_prior[0]

        def multiply(scores: LabelScores, texts: Sequence[str]) -> LabelScores:
            tempered = label_log_probs(scores, temperature=temperature)
            return product_of_experts(tempered, other.log_probs(texts))

        return PostProcessedPredictor(inner, multiply, inner.cost + other.cost)
