"""What prompt compressors share: their tensors, the demonstrations as text, and queries behind vectors."""

import json
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor, nn

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost
from i2cl.models.batching import Ids
from i2cl.models.checkpoint import folder_of, read_tensors, stored_tensors
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.loading import REFERENCE
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import Progress, Questions, require_finite, require_texts, score
from i2cl.tasks import Examples, Task

T = TypeVar("T")

BUNDLED = Path(__file__).parent / "reference"
"""Folder of the bundled model's compressors, which `scripts/train_compressor.py` makes."""
TOGETHER = "take the compressor and the model that belong together"


class NoCompressorError(I2CLError):
    """The model has no compressor of the kind that a method needs."""


@dataclass(frozen=True)
class Compressor:
    """A trained compressor."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One of the parameters, of this shape (-1: any size); raises I2CLError if there is none."""
        if name not in self.tensors:
            raise I2CLError(f"the compressor lacks {name}: download or copy it again")
        tensor = self.tensors[name]
        pairs = zip(shape, tensor.shape, strict=False)
        if len(shape) != tensor.ndim or any(want not in {-1, size} for want, size in pairs):
            wanted = ", ".join("any" if size == -1 else str(size) for size in shape)
            shapes = f"{tuple(tensor.shape)}, this model needs ({wanted})"
            raise I2CLError(f"the compressor holds {name} as {shapes}: {TOGETHER}")
        return tensor


_MADE: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


def once(decoder: Decoder, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returned first for this key and model, as it is now; it must not hold the model."""
    made, whole = _MADE.setdefault(decoder.model, {}), (key, decoder.device, decoder.model.dtype)
    if whole not in made:
        made[whole] = make()
    return cast("T", made[whole])


def beside(decoder: Decoder, kind: str, wanted: Callable[[str], bool], cure: str) -> Compressor:
    """The compressor beside a model's own tensors in its checkpoint; raises I2CLError if it is none."""
    folder = folder_of(decoder.model)
    tensors = {} if folder is None else stored_tensors(folder, wanted)
    if not tensors:
        raise NoCompressorError(f"{decoder.name!r} holds no {kind} compressor beside its weights: {cure}")
    return Compressor(decoder.model.config.to_dict(), tensors)


def bundled(decoder: Decoder, kind: str) -> Compressor | None:
    """Our own compressor for the bundled model; None for any other model."""
    file = BUNDLED / f"{kind}.safetensors"
    if decoder.name != REFERENCE or not file.is_file():
        return None
    settings = json.loads((BUNDLED / f"{kind}.json").read_text(encoding="utf-8"))["settings"]
    return Compressor(settings, read_tensors(str(file), lambda _name: True))


def require_type(decoder: Decoder, kind: str, known: Collection[str]) -> None:
    """Refuse a model type that a compressor is not known for. Raises I2CLError naming those that are."""
    model_type = decoder.model.config.model_type
    if model_type not in known:
        raise NoCompressorError(f"{kind} is known for {' and '.join(sorted(known))}, not for {model_type!r}")


def exchanges(decoder: Decoder, task: Task, demonstrations: Examples) -> list[str]:
    """Each demonstration with its label word and the separator; raises I2CLError if there are none."""
    if not demonstrations:
        raise I2CLError("a compressor needs demonstrations: give at least one")
    encoder, template = decoder.encoder, task.template
    return [template.exchange(encoder.literal(one.text), task.labels[one.label]) for one in demonstrations]


def bare(decoder: Decoder, texts: Sequence[str]) -> list[Ids]:
    """Token ids of texts, without what the tokenizer puts in front."""
    front = len(decoder.encoder.front)
    return [ids[front:] for ids in decoder.encoder(texts)]


def asked_behind(decoder: Decoder, task: Task) -> Questions:
    """A task whose opening stands with the demonstrations, asked of a decoder."""
    return Questions(decoder, replace(task, template=replace(task.template, opening="")))


@dataclass(frozen=True)
class BehindVectors:
    """Scores label words behind queries, which stand behind vectors and before the tokens ``right``."""

    questions: Questions
    prefix: Prefix
    right: Ids = ()
    edit: Edit | None = None
    cost: Cost = field(default_factory=Cost)

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word. A text is cut where the room behind the vectors is short."""
        require_texts(texts)
        decoder, labels = self.questions.decoder, self.questions.labels
        front = len(decoder.encoder.front)  # no query has a BOS
        taken = self.prefix.behind + len(self.right) + labels.room - front
        limit = None if decoder.max_length is None else decoder.max_length - taken
        whole = decoder.encoder.fitted(self.questions.prompt, texts, limit)
        queries = [ids[front:] + self.right for ids in whole]
        scores = score(decoder, queries, labels, edit=self.edit, prefix=self.prefix, progress=progress)
        require_finite(scores, decoder)
        return scores
