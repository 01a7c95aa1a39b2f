"""Helpers of the prompt compressors: loading, demonstrations as text, and prediction after soft prompts."""

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
from i2cl.models.checkpoint import checkpoint_folder, read_tensors, stored_tensors
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.loading import REFERENCE
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import LabelScorer, Progress, require_finite, require_texts, score
from i2cl.tasks import Examples, Task

T = TypeVar("T")

BUNDLED = Path(__file__).parent / "reference"
"""Folder of the bundled model's compressors, written by `scripts/train_compressor.py`."""
MATCH_HINT = "use a compressor that was trained with this model"


class NoCompressorError(I2CLError):
    """The model has no compressor for the method."""


@dataclass(frozen=True)
class Compressor:
    """Settings and parameters of a trained compressor."""

    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a parameter.

        Args:
            name: its name.
            shape: required shape; -1 for any size.

        Raises:
            I2CLError: if it is missing or has another shape.
        """
        if name not in self.tensors:
            raise I2CLError(f"the compressor has no tensor {name}: download or copy it again")
        tensor = self.tensors[name]
        pairs = zip(shape, tensor.shape, strict=False)
        if len(shape) != tensor.ndim or any(required not in {-1, size} for required, size in pairs):
            required = ", ".join("any" if size == -1 else str(size) for size in shape)
            raise I2CLError(
                f"{name} of the compressor has shape {tuple(tensor.shape)}, but this model needs "
                f"({required}): {MATCH_HINT}"
            )
        return tensor


_CACHE: WeakKeyDictionary[nn.Module, dict[Hashable, Any]] = WeakKeyDictionary()


def cached_for_model(decoder: Decoder, key: Hashable, make: Callable[[], T]) -> T:
    """Return ``make()``, cached for this key and model, its device and dtype.

    The value must not reference the model, which would then never be freed.
    """
    values, full_key = _CACHE.setdefault(decoder.model, {}), (key, decoder.device, decoder.model.dtype)
    if full_key not in values:
        values[full_key] = make()
    return cast("T", values[full_key])


def checkpoint_compressor(
    decoder: Decoder, kind: str, wanted: Callable[[str], bool], hint: str
) -> Compressor:
    """Load a compressor from the model's own checkpoint.

    Args:
        decoder: the model.
        kind: name of the method, for messages.
        wanted: selects the compressor's tensors by name.
        hint: what to do if there are none.

    Raises:
        I2CLError: if the checkpoint has none of these tensors.
    """
    folder = checkpoint_folder(decoder.model)
    tensors = {} if folder is None else stored_tensors(folder, wanted)
    if not tensors:
        raise NoCompressorError(f"the checkpoint of {decoder.name!r} has no {kind} compressor: {hint}")
    return Compressor(decoder.model.config.to_dict(), tensors)


def bundled_compressor(decoder: Decoder, kind: str) -> Compressor | None:
    """Load the compressor of the bundled model; None for any other model."""
    file = BUNDLED / f"{kind}.safetensors"
    if decoder.name != REFERENCE or not file.is_file():
        return None
    settings = json.loads((BUNDLED / f"{kind}.json").read_text(encoding="utf-8"))["settings"]
    return Compressor(settings, read_tensors(str(file), lambda _name: True))


def require_type(decoder: Decoder, kind: str, known: Collection[str]) -> None:
    """Raise I2CLError if the model type has no compressor of this kind."""
    model_type = decoder.model.config.model_type
    if model_type not in known:
        raise NoCompressorError(f"{kind} supports {' and '.join(sorted(known))}, not {model_type!r}")


def exchanges(decoder: Decoder, task: Task, demonstrations: Examples) -> list[str]:
    """Return each demonstration with its label word and separator. Raises I2CLError if there are none."""
    if not demonstrations:
        raise I2CLError("a compressor needs demonstrations: give at least one")
    encoder, template = decoder.encoder, task.template
    return [template.exchange(encoder.literal(one.text), task.labels[one.label]) for one in demonstrations]


def encode_without_special_tokens(decoder: Decoder, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of texts without the tokens that the tokenizer adds at the start."""
    front = len(decoder.encoder.front)
    return [ids[front:] for ids in decoder.encoder(texts)]


def questions_without_opening(decoder: Decoder, task: Task) -> LabelScorer:
    """Return the task's queries without the opening of the template, which precedes the demonstrations."""
    return LabelScorer(decoder, replace(task, template=replace(task.template, opening="")))


@dataclass(frozen=True)
class SoftPromptPredictor:
    """Scores label words after a soft prompt and a query.

    Attributes:
        scorer: queries without the template's opening.
        prefix: cached keys and values of the soft prompt.
        right: tokens after each query.
        edit: edit of the activations.
        cost: storage that it needs.
    """

    scorer: LabelScorer
    prefix: Prefix
    right: Ids = ()
    edit: Edit | None = None
    cost: Cost = field(default_factory=Cost)

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Return the log-probability of each label word; texts that exceed the context are truncated."""
        require_texts(texts)
        decoder, labels = self.scorer.decoder, self.scorer.labels
        front = len(decoder.encoder.front)  # special tokens are removed from each query
        used = self.prefix.next_position + len(self.right) + labels.room - front
        limit = None if decoder.max_length is None else decoder.max_length - used
        encoded = decoder.encoder.fitted(self.scorer.prompt, texts, limit)
        queries = [ids[front:] + self.right for ids in encoded]
        scores = score(decoder, queries, labels, edit=self.edit, prefix=self.prefix, progress=progress)
        require_finite(scores, decoder)
        return scores
