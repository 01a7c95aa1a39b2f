"""What every compared method offers, and what several of them share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

import pydantic
from jaxtyping import Float
from torch import Tensor

from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.injection import Injection
from i2cl.scoring import Progress
from i2cl.tasks import Example, Task

M = TypeVar("M", bound=pydantic.BaseModel)


class Predictor(Protocol):
    """A method fitted to a task.

    Attributes:
        trainable_parameters: numbers that were trained.
        cached_values: numbers kept per task for prediction (paper, column "# cached param.").
    """

    @property
    def trainable_parameters(self) -> int:
        """How many numbers were trained."""
        ...

    @property
    def cached_values(self) -> int:
        """How many numbers are kept per task."""
        ...

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability, or another increasing score, of each label for each text."""
        ...


class Method(Protocol):
    """A way to classify with a frozen decoder and a few demonstrations.

    Attributes:
        name: as used on the command line.
        summary: one line on what it does.
        row: the paper's row it stands for, or "-".
        needs: what it takes beyond the demonstrations.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    row: ClassVar[str]
    needs: ClassVar[str]

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Names of the options it takes, each with its default."""
        ...

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> Self:
        """Build it from options, given as strings or values.

        Raises:
            I2CLError: on an unknown option or a value it cannot take.
        """
        ...

    def fit(self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int) -> Predictor:
        """Prepare for a task.

        Raises:
            I2CLError: if it cannot be done on this model with these demonstrations.
        """
        ...


@dataclass(frozen=True)
class InjectedPredictor:
    """Scores by an injection. Cached: one vector per layer and site (paper: 2DL)."""

    decoder: Decoder
    injection: Injection
    trainable_parameters: int

    @property
    def cached_values(self) -> int:
        """Numbers of the context vector."""
        return self.injection.context.values.numel()

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities under the injection."""
        return self.injection.scores(self.decoder, texts, progress=progress)


def option_defaults(*models: type[pydantic.BaseModel]) -> dict[str, str]:
    """Option names of several settings with their defaults, as text."""
    return {name: str(field.default) for model in models for name, field in model.model_fields.items()}


def read_options(model: type[M], options: Mapping[str, Any]) -> M:
    """Build settings from those of the options that they have.

    Raises:
        I2CLError: naming the option, the value and what is allowed.
    """
    try:
        return model.model_validate({name: options[name] for name in model.model_fields if name in options})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise I2CLError(f"option {name}={options[name]!r}: {first['msg']}") from None
