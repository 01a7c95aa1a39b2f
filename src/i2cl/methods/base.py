"""The interface of a method. docs/guide/extend.md builds one on it, step by step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Any, ClassVar, Literal, Protocol, Self, get_args, get_origin, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.models.decoder import Decoder
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import Progress
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

LabelScores = Float[Tensor, "texts labels"]


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
        cls, *stored: Tensor | Prefix | None, trained: int = 0, held_out: int = 0, unlabelled: int = 0
    ) -> Self:
        """Return the cost of storing tensors and key-value caches; None costs nothing."""
        sizes = [
            (item.values, item.bytes) if isinstance(item, Prefix) else (item.numel(), item.nbytes)
            for item in stored
            if item is not None
        ]
        values, size = map(sum, zip(*sizes, strict=True)) if sizes else (0, 0)
        return cls(trained, values, size, held_out, unlabelled)

    def __add__(self, other: "Cost") -> "Cost":
        """Add two costs field by field."""
        return Cost(*map(add, astuple(self), astuple(other)))


@runtime_checkable
class Predictor(Protocol):
    """A method fitted to one task."""

    @property
    def cost(self) -> Cost:
        """Storage and data that the predictor needs."""
        ...

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Score each label for each text: log-probabilities, or other scores that increase with them.

        ``progress`` is called as texts finish. Raises I2CLError on an empty text.
        """
        ...


class Method(ABC):
    """A way to classify texts with a frozen decoder and a few demonstrations.

    Attributes:
        name: name on the command line.
        summary: description in one line.
        needs: data and packages that it requires.
        is_transductive: whether the scores of a text depend on the other texts in the same call.
        is_stochastic: whether the result depends on the sampled demonstrations or the seed. For a wrapper:
            whether it adds such a dependence.
        settings: classes of its options, which are its constructor's arguments in this order.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs: ClassVar[str] = "demonstrations"
    is_transductive: ClassVar[bool] = False
    is_stochastic: ClassVar[bool] = True
    settings: ClassVar[tuple[type[Settings], ...]] = ()

    @abstractmethod
    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Fit to a task; the same seed gives the same predictor.

        Args:
            decoder: the frozen model, which is unchanged afterwards.
            task: label words and template, and rows for methods that need more than demonstrations.
            demonstrations: labelled examples.
            seed: seed of everything random.

        Raises:
            I2CLError: if the model, the task or the demonstrations are unsuitable.
        """

    @property
    def full_name(self) -> str:
        """Name including inner methods, as `i2cl.make_methods` takes it."""
        return self.name

    @property
    def temperature_prior(self) -> tuple[float, float]:
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
    def from_options(cls, options: Mapping[str, Any], *inner: "Method") -> "Method":
        """Construct the method; options that it does not have are ignored.

        ``inner`` is the method that a wrapper wraps. Raises I2CLError on an invalid value.
        """
        own = [
            {name: options[name] for name in model.model_fields if name in options} for model in cls.settings
        ]
        return cls(*inner, *(model(**values) for model, values in zip(cls.settings, own, strict=True)))


def count_correct(predictor: Predictor, rows: Examples) -> int:
    """Return the number of rows whose label a predictor ranks first."""
    predicted = predictor.log_probs([row.text for row in rows]).argmax(-1)
    return int((predicted == torch.tensor([row.label for row in rows])).sum())


def _literal_values(annotation: Any) -> list[str]:
    """Return the values of all ``Literal`` types in an annotation."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in _literal_values(part)]
