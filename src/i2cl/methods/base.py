"""What every compared method offers, and what several of them share."""

import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import pydantic
import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.batching import Ids, TruncationWarning
from i2cl.decoder import Decoder
from i2cl.edits import Edit
from i2cl.errors import I2CLError
from i2cl.prefix import Prefix
from i2cl.scoring import (
    LabelTokens,
    Progress,
    encode_queries,
    label_tokens,
    next_token_log_probabilities,
    score,
)
from i2cl.tasks import Example, Task

M = TypeVar("M", bound=pydantic.BaseModel)
C = TypeVar("C", bound="Method")
Shown = tuple[tuple[str, str], ...]
"""Demonstrations as (text, label word), in the order they stand in a prompt."""


@runtime_checkable
class Predictor(Protocol):
    """A method fitted to a task."""

    @property
    def trainable_parameters(self) -> int:
        """How many numbers were trained."""
        ...

    @property
    def cached_values(self) -> int:
        """How many numbers are kept per task (paper, column "# cached param.")."""
        ...

    @property
    def cached_bytes(self) -> int:
        """How many bytes those take, in the precision they are kept in."""
        ...

    @property
    def held_out(self) -> int:
        """How many labelled examples beyond the demonstrations were used."""
        ...

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability, or another increasing score, of each label for each text."""
        ...


class Method(ABC):
    """A way to classify with a frozen decoder and a few demonstrations.

    Attributes:
        name: as used on the command line.
        summary: one line on what it does.
        row: the paper's row it stands for, or "-".
        needs: what it takes, beyond the demonstrations too.
        formula: the paper's count of cached values, with D width, L layers, M demonstration tokens,
            1/K share of tokens kept.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    row: ClassVar[str] = "-"
    needs: ClassVar[str] = "demonstrations"
    formula: ClassVar[str] = "0"
    settings: ClassVar[tuple[type[pydantic.BaseModel], ...]] = ()

    @property
    def called(self) -> str:
        """The name that makes it again."""
        return self.name

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """Names of the options it takes, each with its default."""
        return {
            name: str(field.default) for model in cls.settings for name, field in model.model_fields.items()
        }

    @classmethod
    def configured(cls: type[C], options: Mapping[str, Any]) -> C:  # noqa: PYI019 - the checks in tests know no Self
        """Build it from those of the options that it knows, given as strings or values.

        Raises:
            I2CLError: on a value that an option cannot take.
        """
        return cls(*(_read(model, options) for model in cls.settings))

    @abstractmethod
    def fit(self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int) -> Predictor:
        """Prepare for a task.

        Raises:
            I2CLError: if it cannot be done on this model with these demonstrations.
        """


class Wrapper(Method):
    """A method on top of another one, written ``below+name``.

    Attributes:
        default: the method below where none is named.
    """

    default: ClassVar[str] = "few_shot"
    formula: ClassVar[str] = "that of the method below"

    def __init__(self, below: Method | None = None) -> None:
        self._below = below

    @property
    def called(self) -> str:
        """With the method below, where that is not the default."""
        below = self.below.called
        return self.name if below == self.default else f"{below}+{self.name}"

    @property
    def below(self) -> Method:
        """The method below.

        Raises:
            I2CLError: if there is none.
        """
        if self._below is None:
            raise I2CLError(f"{self.name} stands on another method: name one, such as few_shot+{self.name}")
        return self._below


@dataclass(frozen=True)
class PromptPredictor:
    """Scores label words behind a prompt: the query, after demonstrations or not, under an edit or not.

    Attributes:
        decoder: the model.
        task: gives template and label words.
        shown: demonstrations in front of the query.
        prefix: their keys and values, if they were run once beforehand.
        edit: applied to every layer, to prompt and query alike.
        cached_values: see `Predictor`.
        trainable_parameters: see `Predictor`.
        held_out: see `Predictor`.
    """

    decoder: Decoder
    task: Task
    shown: Shown = ()
    prefix: Prefix | None = None
    edit: Edit | None = None
    cached_values: int = 0
    trainable_parameters: int = 0
    held_out: int = 0

    @property
    def cached_bytes(self) -> int:
        """Keys and values in the model's precision, the rest in float32."""
        if self.prefix is None:
            return 4 * self.cached_values
        return self.prefix.bytes + 4 * (self.cached_values - self.prefix.values)

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word."""
        labels = label_tokens(self.decoder, self.task.template, self.task.labels)
        prompts = encode_prompts(self.decoder, self.task, self.shown, texts, labels)
        scores = torch.empty(len(prompts), len(labels.ids))
        for rows, queries, prefix in self._parts(prompts):
            scores[rows] = score(
                self.decoder, queries, labels, edit=self.edit, prefix=prefix, progress=progress
            )
        return scores

    def distributions(self, texts: Sequence[str]) -> Float[Tensor, "texts vocab"]:
        """Log-probability of every token behind each prompt."""
        labels = label_tokens(self.decoder, self.task.template, self.task.labels)
        prompts = encode_prompts(self.decoder, self.task, self.shown, texts, labels)
        found: dict[int, Tensor] = {}
        for rows, queries, prefix in self._parts(prompts):
            values = next_token_log_probabilities(self.decoder, queries, edit=self.edit, prefix=prefix)
            found |= dict(zip(rows, values, strict=True))
        return torch.stack([found[row] for row in range(len(prompts))])

    def _parts(self, prompts: list[Ids]) -> Iterator[tuple[list[int], list[Ids], Prefix | None]]:
        """Prompts whose text merges with the prefix's last token run whole; the others reuse the cache."""
        start = len(self.prefix.ids) if self.prefix else 0
        shared = self.prefix.ids if self.prefix else ()
        fits = [row for row, ids in enumerate(prompts) if ids[:start] == shared and len(ids) > start]
        rest = sorted(set(range(len(prompts))) - set(fits))
        if fits:
            yield fits, [prompts[row][start:] for row in fits], self.prefix
        if rest:
            yield rest, [prompts[row] for row in rest], None


def fitting(decoder: Decoder, task: Task, demonstrations: Sequence[Example]) -> Shown:
    """Demonstrations for a prompt, as many per class as fit into the context with a query behind them.

    Room is kept for a query as long as the longest demonstration. Warns where fewer are shown.

    Raises:
        I2CLError: if not even one per class fits, naming tokens needed and available.
    """
    limit = decoder.max_length
    counts = Counter(example.label for example in demonstrations)
    most = max(counts.values(), default=0)
    room = label_tokens(decoder, task.template, task.labels).room
    longest = max((example.text for example in demonstrations), key=len, default="")

    def needed(per_class: int) -> int:
        prompt = task.template.prompt(_first_of_each(task, demonstrations, per_class), longest)
        return len(decoder.encoder([prompt])[0]) + room

    if limit is None or needed(most) <= limit:
        return _first_of_each(task, demonstrations, most)
    fits = bisect_right(range(1, most + 1), limit, key=needed)
    if fits == 0:
        raise I2CLError(
            f"one demonstration per class and a query need {needed(1)} tokens, but the context "
            f"holds {limit}: use shorter demonstrations or a model with a longer context"
        )
    warnings.warn(
        f"{task.name}: {most} demonstrations per class and a query need {needed(most)} tokens, but the "
        f"context holds {limit}; showing {fits} per class",
        TruncationWarning,
        stacklevel=3,
    )
    return _first_of_each(task, demonstrations, fits)


def _first_of_each(task: Task, demonstrations: Sequence[Example], per_class: int) -> Shown:
    """Texts and label words of the first few demonstrations of each class, in the given order."""
    seen: Counter[int] = Counter()
    chosen: list[tuple[str, str]] = []
    for example in demonstrations:
        seen[example.label] += 1
        if seen[example.label] <= per_class:
            chosen.append((example.text, task.labels[example.label]))
    return tuple(chosen)


def encode_prompts(
    decoder: Decoder, task: Task, demonstrations: Shown, texts: Sequence[str], labels: LabelTokens
) -> list[Ids]:
    """Token ids of demonstrations and query, for each text.

    Raises:
        I2CLError: if the demonstrations do not fit, naming tokens needed and available.
    """
    return encode_queries(decoder, lambda text: task.template.prompt(demonstrations, text), texts, labels)


def shared_ids(decoder: Decoder, task: Task, demonstrations: Shown) -> Ids:
    """The tokens that prompts have in common, whatever the query.

    Raises:
        I2CLError: if the demonstrations do not fit, naming tokens needed and available.
    """
    labels = label_tokens(decoder, task.template, task.labels)
    probes = encode_prompts(decoder, task, demonstrations, ["a", "7"], labels)
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*probes, strict=False))
    return tuple(token for token, _ in pairs)


def _read(model: type[M], options: Mapping[str, Any]) -> M:
    try:
        return model.model_validate({name: options[name] for name in model.model_fields if name in options})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise I2CLError(f"option {name}={options[name]!r}: {first['msg']}") from None
