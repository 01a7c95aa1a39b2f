"""What every compared method offers, and what several of them share."""

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
    """What a predictor takes, time aside; costs add up."""

    trained: int = 0  #: how many numbers were trained
    cached_values: int = 0  #: how many numbers are kept per task (paper, column "# cached param.")
    cached_bytes: int = 0  #: how many bytes those take, in the precision they are kept in
    held_out: int = 0  #: how many labelled examples beyond the demonstrations were used
    unlabelled: int = 0  #: how many texts without labels were used

    @classmethod
    def of(
        cls, *kept: Tensor | Prefix | None, trained: int = 0, held_out: int = 0, unlabelled: int = 0
    ) -> "Cost":
        """The cost of keeping these tensors and caches."""
        sizes = [
            (one.values, one.bytes) if isinstance(one, Prefix) else (one.numel(), one.nbytes)
            for one in kept
            if one is not None
        ]
        values, size = (sum(column) for column in zip(*sizes, strict=True)) if sizes else (0, 0)
        return cls(trained, values, size, held_out, unlabelled)

    def __add__(self, other: "Cost") -> "Cost":
        """Both together."""
        return Cost(*map(add, astuple(self), astuple(other)))


@runtime_checkable
class Predictor(Protocol):
    """A method fitted to a task."""

    @property
    def cost(self) -> Cost:
        """What it takes."""
        ...

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability, or another increasing score, of each label for each text."""
        ...


@dataclass(frozen=True)
class MendedPredictor:
    """Scores of the method below plus a number for each label, in nats, then divided by a temperature."""

    below: Predictor
    cost: Cost
    bias: Float[Tensor, " labels"] | None = None
    temperature: float = 1.0

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities over the labels, calibrated and normalised again."""
        return label_log_probs(self.below.scores(texts, progress), self.bias, self.temperature)


@dataclass(frozen=True)
class ProductPredictor:
    """Log-probabilities of two methods, added up."""

    first: Predictor
    second: Predictor
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities among the labels; minus infinity for a label that either method rules out."""
        second = self.second.scores(texts).log_softmax(-1)
        return (self.first.scores(texts, progress).log_softmax(-1) + second).log_softmax(-1)


class ScoringConfig(Settings):
    """How labels are scored; see `i2cl.models.encoding.Scoring`."""

    scoring: Scoring = "auto"


class Method(ABC):
    """A way to classify with a frozen decoder and a few demonstrations.

    Attributes:
        name: as used on the command line.
        summary: one line on what it does.
        row: the paper's row it stands for, or "-".
        needs: what it takes, beyond the demonstrations too.
        formula: the paper's count of cached values, with D width, L layers, M demonstration tokens,
            1/K share of tokens kept.
        transductive: whether a text's scores depend on the texts that are scored with it.
        drawn: whether demonstrations or the seed change what it makes; of a wrapper, beyond the method below.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    row: ClassVar[str] = "-"
    needs: ClassVar[str] = "demonstrations"
    formula: ClassVar[str] = "0"
    transductive: ClassVar[bool] = False
    drawn: ClassVar[bool] = True
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = ()

    @property
    def called(self) -> str:
        """The name that makes it again."""
        return self.name

    @property
    def temperatures(self) -> tuple[float, float]:
        """Typical best temperature of its probabilities, and the spread of its logarithm.
        Wide, where nothing was measured; see `i2cl.injections.temperature.likely_temperature`.
        """
        return 1.5, 1.0

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Names of the options it takes, each with its default and then any other words it can be."""
        return {
            name: "|".join(dict.fromkeys([str(field.default), *_words(field.annotation)]))
            for model in cls.settings
            for name, field in model.model_fields.items()
        }

    @classmethod
    def configured(cls, options: Mapping[str, Any], *below: "Method") -> "Method":
        """Build it from the options that it knows; a wrapper, on a method. Raises I2CLError on bad values."""
        return cls(*below, *(_read(model, options) for model in cls.settings))

    @property
    def joint(self) -> bool:
        """Whether `fit_many` takes less time than one `fit` after the other."""
        return False

    @abstractmethod
    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Prepare for a task. Raises I2CLError where this model and these demonstrations do not allow it."""

    def fit_many(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Examples], seeds: Sequence[int]
    ) -> Sequence[Predictor]:
        """What `fit` makes of each seed and its demonstrations, to rounding; raises I2CLError as `fit`."""
        pairs = zip(demonstrations, seeds, strict=True)
        return [self.fit(decoder, task, shown, seed) for shown, seed in pairs]


def require_two_classes(method: str, task: Task, demonstrations: Examples) -> None:
    """Refuse demonstrations that are not of two classes, or are none (I2CLError)."""
    require_demonstrations(task, demonstrations)
    if len({example.label for example in demonstrations}) < 2:
        raise I2CLError(f"{method} needs demonstrations of at least two classes: add some")


@dataclass(frozen=True)
class ClassifierPredictor:
    """Scores by a fitted scikit-learn classifier, from what ``features`` makes of texts."""

    features: Callable[[Sequence[str], Progress | None], Float[np.ndarray, "texts _"] | Sequence[str]]
    model: Any
    labels: int
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label, minus infinity if never seen; raises I2CLError on an empty text."""
        require_texts(texts)
        features = self.features(texts, progress)
        scores = torch.full((len(features), self.labels), -torch.inf)
        if len(features):
            probabilities = torch.from_numpy(self.model.predict_log_proba(features))
            scores[:, self.model.classes_.tolist()] = probabilities.float()
        return scores


def head_cost(head: Any, *more: Float[np.ndarray, " numbers"]) -> Cost:
    """What a logistic regression trains and keeps, and what is kept beside it."""
    trained, *rest = (torch.from_numpy(one) for one in (head.coef_, head.intercept_, *more))
    return Cost.of(trained, *rest, trained=trained.numel() + rest[0].numel())


def right_answers(predictor: Predictor, rows: Examples) -> int:
    """How many rows a predictor answers rightly."""
    best = predictor.scores([row.text for row in rows]).argmax(-1)
    return int((best == torch.tensor([row.label for row in rows])).sum())


class Wrapper(Method):
    """A method on top of another one, written ``below+name``."""

    default: ClassVar[str] = "few_shot"
    formula: ClassVar[str] = "that of the method below"

    def __init__(self, below: Method | None = None, config: Any = None) -> None:
        self._below = below
        self.config: Any = config or next((settings() for settings in self.settings), None)

    @property
    def called(self) -> str:
        """With the method below, where that is not the default."""
        below = self.below.called
        return self.name if below == self.default else f"{below}+{self.name}"

    @property
    def temperatures(self) -> tuple[float, float]:
        """As the method below."""
        return self.below.temperatures

    @property
    def below(self) -> Method:
        """The method below. Raises I2CLError if there is none."""
        if self._below is None:
            raise I2CLError(f"{self.name} stands on another method: name one, such as few_shot+{self.name}")
        return self._below

    @property
    def joint(self) -> bool:
        """As the method below."""
        return self.below.joint

    @abstractmethod
    def over(self, decoder: Decoder, below: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """What it makes of the method below once that is fitted; raises I2CLError if it lacks something."""

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit the method below, and stand on it."""
        below = self.below.fit(decoder, task, demonstrations, seed)
        return self.over(decoder, below, task, demonstrations, seed)

    def fit_many(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Examples], seeds: Sequence[int]
    ) -> Sequence[Predictor]:
        """Fit the method below to every seed, and stand on each."""
        fitted = self.below.fit_many(decoder, task, demonstrations, seeds)
        each = zip(fitted, demonstrations, seeds, strict=True)
        return [self.over(decoder, below, task, shown, seed) for below, shown, seed in each]


class Product(Wrapper):
    """The method below and another one, written ``below+other``; both are fitted to the same demonstrations.
    Their label probabilities are multiplied: https://doi.org/10.1162/089976602760128018 (Hinton 2002).
    Below, the LLM, is at its typical temperature where it has no other: it is surer than right, and would
    count for too much. Scores that are no log-probabilities, such as kNN prompting's votes, count for little.
    """

    def __init__(self, below: Method, other: Method) -> None:
        super().__init__(below)
        self.other = other

    @property
    def called(self) -> str:
        """Both names."""
        return f"{self.below.called}+{self.other.called}"

    @property
    def temperatures(self) -> tuple[float, float]:
        """As measured of ``anchored+sentence_embeddings``: about as sure as right (docs/ablations.md)."""
        return 1.0, self.below.temperatures[1]

    def over(self, decoder: Decoder, below: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Fit the other one."""
        other = self.other.fit(decoder, task, shown, seed)
        tempered = isinstance(below, MendedPredictor) and below.temperature != 1
        typical = 1.0 if tempered else self.below.temperatures[0]
        first = MendedPredictor(below, below.cost, temperature=typical)
        return ProductPredictor(first, other, below.cost + other.cost)


def _words(annotation: Any) -> list[str]:
    """What a literal type, alone or in a union, allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for part in get_args(annotation) for word in _words(part)]


def _read(model: type[M], options: Mapping[str, Any]) -> M:
    given = {name: options[name] for name in model.model_fields if name in options}
    try:
        settings = model.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # options that do not go together
            raise I2CLError(message) from None
        name = str(first["loc"][0])
        raise I2CLError(f"option {name}={repr(options[name])[:200]}: {message}") from None
    for name in given:
        value = getattr(settings, name)
        if isinstance(value, float) and not math.isfinite(value):  # which JSON cannot hold
            raise I2CLError(f"option {name}={options[name]!r}: give a finite number")
    return settings
