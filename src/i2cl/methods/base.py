"""Interfaces of methods and predictors, and helpers that several methods share."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, runtime_checkable

import numpy as np
import pydantic
import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.context import require_demonstrations
from i2cl.errors import I2CLError
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Scoring
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import Progress, label_log_probs, require_texts
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

M = TypeVar("M", bound=pydantic.BaseModel)


@dataclass(frozen=True)
class Cost:
    """Storage and data that a predictor needs; costs can be added."""

    trained: int = 0  #: number of trained parameters
    cached_values: int = 0  #: numbers stored per task (paper, column "# cached param.")
    cached_bytes: int = 0  #: size of these numbers in bytes, in their own precision
    held_out: int = 0  #: labelled examples used besides the demonstrations
    unlabelled: int = 0  #: unlabelled texts used

    @classmethod
    def of(
        cls, *kept: Tensor | Prefix | None, trained: int = 0, held_out: int = 0, unlabelled: int = 0
    ) -> "Cost":
        """Return the cost of storing tensors and key-value caches; None costs nothing."""
        sizes = [
            (item.values, item.bytes) if isinstance(item, Prefix) else (item.numel(), item.nbytes)
            for item in kept
            if item is not None
        ]
        values, size = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
        return cls(trained, values, size, held_out, unlabelled)

    def __add__(self, other: "Cost") -> "Cost":
        """Add two costs field by field."""
        return Cost(*map(add, astuple(self), astuple(other)))


@runtime_checkable
class Predictor(Protocol):
    """A method fitted to one task."""

    @property
    def cost(self) -> Cost:
        """Storage and data that it needs."""
        ...

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Score each label for each text: log-probabilities, or other scores that increase with them."""
        ...


@dataclass(frozen=True)
class CalibratedPredictor:
    """Another predictor with a label bias (in nats) added to its scores, then a temperature applied."""

    inner: Predictor
    cost: Cost
    bias: Float[Tensor, " labels"] | None = None
    temperature: float = 1.0

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Return calibrated log-probabilities, normalized over the labels."""
        return label_log_probs(self.inner.log_probs(texts, progress), self.bias, self.temperature)


@dataclass(frozen=True)
class ProductPredictor:
    """Product of experts: the label probabilities of two predictors, multiplied and normalized."""

    first: Predictor
    second: Predictor
    cost: Cost

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Return log-probabilities over the labels; minus infinity if either predictor excludes a label."""
        second = self.second.log_probs(texts).log_softmax(-1)
        return (self.first.log_probs(texts, progress).log_softmax(-1) + second).log_softmax(-1)


class ScoringConfig(Settings):
    """Label scoring; see `i2cl.models.encoding.Scoring`."""

    scoring: Scoring = "auto"


class Method(ABC):
    """A way to classify texts with a frozen decoder and a few demonstrations.

    Attributes:
        name: name on the command line.
        summary: description in one line.
        row: the corresponding row of the paper's table, or "-".
        needs: data and packages that it requires.
        formula: the paper's formula for the number of cached values, where D is the model's width, L the
            number of layers, M the number of demonstration tokens and 1/K the share of tokens kept.
        transductive: whether the scores of a text depend on the other texts in the same call.
        is_stochastic: whether the result depends on the sampled demonstrations or the seed. For a wrapper:
            whether it adds such a dependence to that of its inner method.
        settings: classes of its options.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    row: ClassVar[str] = "-"
    needs: ClassVar[str] = "demonstrations"
    formula: ClassVar[str] = "0"
    transductive: ClassVar[bool] = False
    is_stochastic: ClassVar[bool] = True
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = ()

    @property
    def called(self) -> str:
        """Full name, including inner methods, as `make_methods` takes it."""
        return self.name

    @property
    def temperatures(self) -> tuple[float, float]:
        """Prior of the best temperature: its median, and the standard deviation of its logarithm.

        The default is a wide prior, for methods without measurements; see
        `i2cl.injections.temperature.likely_temperature`.
        """
        return 1.5, 1.0

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Return each option's name with its default, followed by the other values of an enumeration."""
        return {
            name: "|".join(dict.fromkeys([str(field.default), *_literal_values(field.annotation)]))
            for model in cls.settings
            for name, field in model.model_fields.items()
        }

    @classmethod
    def configured(cls, options: Mapping[str, Any], *inner: "Method") -> "Method":
        """Construct the method; options that it does not have are ignored.

        Args:
            options: values by name.
            inner: for a wrapper, the method to wrap.

        Raises:
            I2CLError: on an invalid value.
        """
        return cls(*inner, *(_validate(model, options) for model in cls.settings))

    @property
    def joint(self) -> bool:
        """Whether `fit_many` is faster than separate calls of `fit`."""
        return False

    @abstractmethod
    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit to a task. Raises I2CLError if the model or the demonstrations are unsuitable."""

    def fit_many(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Examples], seeds: Sequence[int]
    ) -> Sequence[Predictor]:
        """Fit once per seed, each to its own demonstrations; equal to separate calls of `fit` up to rounding.

        Raises:
            I2CLError: as `fit`.
        """
        pairs = zip(demonstrations, seeds, strict=True)
        return [self.fit(decoder, task, shown, seed) for shown, seed in pairs]


def require_two_classes(method: str, task: Task, demonstrations: Examples) -> None:
    """Raise I2CLError unless there are demonstrations of at least two classes."""
    require_demonstrations(task, demonstrations)
    if len({example.label for example in demonstrations}) < 2:
        raise I2CLError(f"{method} needs demonstrations of at least two classes: add some")


@dataclass(frozen=True)
class ClassifierPredictor:
    """A fitted scikit-learn classifier.

    Attributes:
        features: computes the classifier's input from texts.
        model: the classifier; its classes are label indices.
        labels: number of labels of the task.
        cost: storage that it needs.
    """

    features: Callable[[Sequence[str], Progress | None], Float[np.ndarray, "texts _"] | Sequence[str]]
    model: Any
    labels: int
    cost: Cost

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Return log-probabilities; minus infinity for labels without a demonstration.

        Raises:
            I2CLError: on an empty text.
        """
        require_texts(texts)
        features = self.features(texts, progress)
        scores = torch.full((len(features), self.labels), -torch.inf)
        if len(features):
            probabilities = torch.from_numpy(self.model.predict_log_proba(features))
            scores[:, self.model.classes_.tolist()] = probabilities.float()
        return scores


def head_cost(head: Any, *stored: Float[np.ndarray, " numbers"]) -> Cost:
    """Return the cost of a fitted logistic regression, and of arrays stored with it."""
    weights, intercept, *rest = map(torch.from_numpy, (head.coef_, head.intercept_, *stored))
    return Cost.of(weights, intercept, *rest, trained=weights.numel() + intercept.numel())


def count_correct(predictor: Predictor, rows: Examples) -> int:
    """Return the number of rows whose label a predictor ranks first."""
    best = predictor.log_probs([row.text for row in rows]).argmax(-1)
    return int((best == torch.tensor([row.label for row in rows])).sum())


class Wrapper(Method):
    """A method that post-processes the scores of another one, written ``inner+name``."""

    default: ClassVar[str] = "few_shot"
    formula: ClassVar[str] = "same as the inner method"

    def __init__(self, inner: Method | None = None, config: Any = None) -> None:
        self._inner = inner
        self.config: Any = config or next((settings() for settings in self.settings), None)

    @property
    def called(self) -> str:
        """Full name; the inner method is omitted if it is the default."""
        inner = self.inner.called
        return self.name if inner == self.default else f"{inner}+{self.name}"

    @property
    def temperatures(self) -> tuple[float, float]:
        """Same as the inner method."""
        return self.inner.temperatures

    @property
    def inner(self) -> Method:
        """The wrapped method. Raises I2CLError if there is none."""
        if self._inner is None:
            raise I2CLError(f"{self.name} wraps another method: name one, such as few_shot+{self.name}")
        return self._inner

    @property
    def joint(self) -> bool:
        """Same as the inner method."""
        return self.inner.joint

    @abstractmethod
    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Post-process the scores of the fitted inner method.

        Args:
            decoder: the frozen model.
            inner: the inner method, fitted to ``shown``.
            task: the task.
            shown: the demonstrations.
            seed: seed of everything random.

        Raises:
            I2CLError: if required data is missing.
        """

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit the inner method and wrap it."""
        inner = self.inner.fit(decoder, task, demonstrations, seed)
        return self.wrap(decoder, inner, task, demonstrations, seed)

    def fit_many(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Examples], seeds: Sequence[int]
    ) -> Sequence[Predictor]:
        """Fit the inner method once per seed and wrap each result."""
        fitted = self.inner.fit_many(decoder, task, demonstrations, seeds)
        each = zip(fitted, demonstrations, seeds, strict=True)
        return [self.wrap(decoder, inner, task, shown, seed) for inner, shown, seed in each]


class Product(Wrapper):
    """Product of experts of two methods fitted to the same demonstrations, written ``inner+other``.

    Source: Hinton 2002, https://doi.org/10.1162/089976602760128018. The inner method runs at its typical
    temperature unless it has been calibrated: an overconfident LLM would dominate the product. Scores that
    are not log-probabilities, such as the votes of kNN prompting, have little influence.
    """

    def __init__(self, inner: Method, other: Method) -> None:
        super().__init__(inner)
        self.other = other

    @property
    def called(self) -> str:
        """Both names."""
        return f"{self.inner.called}+{self.other.called}"

    @property
    def temperatures(self) -> tuple[float, float]:
        """A median of 1: ``anchored+sentence_embeddings`` is well calibrated (docs/ablations.md)."""
        return 1.0, self.inner.temperatures[1]

    def wrap(self, decoder: Decoder, inner: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Fit the other method and multiply the probabilities."""
        other = self.other.fit(decoder, task, shown, seed)
        calibrated = isinstance(inner, CalibratedPredictor) and inner.temperature != 1
        temperature = 1.0 if calibrated else self.inner.temperatures[0]
        first = CalibratedPredictor(inner, inner.cost, temperature=temperature)
        return ProductPredictor(first, other, inner.cost + other.cost)


def _literal_values(annotation: Any) -> list[str]:
    """Return the values of all ``Literal`` types in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _literal_values(part)]


def _validate(model: type[M], options: Mapping[str, Any]) -> M:
    given = {name: options[name] for name in model.model_fields if name in options}
    try:
        settings = model.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # an invalid combination of options
            raise I2CLError(message) from None
        name = str(first["loc"][0])
        raise I2CLError(f"option {name}={repr(options[name])[:200]}: {message}") from None
    for name in given:
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):  # not valid in JSON
            raise I2CLError(f"option {name}={options[name]!r}: give a finite number")
    return settings
