"""Base of the prompt compressors: loading, demonstrations as text, and prediction after soft prompts."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache

from i2cl.errors import I2CLError
from i2cl.methods.base import Cost
from i2cl.methods.prompting import PromptPredictor
from i2cl.models.batching import Ids
from i2cl.models.checkpoint import checkpoint_folder, stored_tensors
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.prefix import Prefix, cache_argument
from i2cl.models.scoring import LabelScorer, require_texts
from i2cl.tasks import Examples, Task

MATCH_HINT = "use a compressor that was trained with this model"


class NoCompressorError(I2CLError):
    """The model has no compressor for the method."""


@dataclass(frozen=True)
class Compressor:
    """Parameters of a trained compressor, by name."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of_checkpoint(
        cls, decoder: Decoder, method: str, is_wanted: Callable[[str], bool], hint: str
    ) -> "Compressor":
        """Load a compressor from the model's own checkpoint.

        Args:
            decoder: the model.
            method: name of the method, for messages.
            is_wanted: selects the compressor's tensors by name.
            hint: what to do if there are none.

        Raises:
            NoCompressorError: if the checkpoint has none of these tensors.
        """
        folder = checkpoint_folder(decoder.model)
        tensors = {} if folder is None else stored_tensors(folder, is_wanted)
        if not tensors:
            raise NoCompressorError(f"the checkpoint of {decoder.name!r} has no {method} compressor: {hint}")
        return cls(tensors)

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
        sizes = zip(shape, tensor.shape, strict=False)
        if len(shape) != tensor.ndim or any(required not in {-1, size} for required, size in sizes):
            required = ", ".join("any" if size == -1 else str(size) for size in shape)
            raise I2CLError(
                f"{name} of the compressor has shape {tuple(tensor.shape)}, but this model needs "
                f"({required}): {MATCH_HINT}"
            )
        return tensor


def require_model_type(decoder: Decoder, method: str, supported: Collection[str]) -> str:
    """Return the model type. Raises NoCompressorError if the method does not support it."""
    model_type: Any = decoder.model.config.model_type
    if model_type not in supported:
        raise NoCompressorError(f"{method} supports {' and '.join(sorted(supported))}, not {model_type!r}")
    return str(model_type)


def cast(decoder: Decoder, tensor: Tensor) -> Tensor:
    """Move a tensor to the model's device and dtype."""
    return tensor.to(decoder.device, decoder.model.dtype)


def hidden_states(
    decoder: Decoder,
    vectors: Float[Tensor, "n d"],
    positions: Sequence[int] | None = None,
    cache: Cache | None = None,
) -> Float[Tensor, "n d"]:
    """Run input embeddings as one row and return the last hidden states, after the final norm.

    Gradients flow if the caller enables them.

    Args:
        decoder: the model.
        vectors: input embeddings.
        positions: position ids. Default: counting from 0.
        cache: receives keys and values.
    """
    decoder.pause()
    position_ids = torch.tensor([positions or range(len(vectors))], device=decoder.device)
    # Without a mask, transformers takes positions that are not consecutive for packed rows.
    arguments: dict[str, Any] = {
        "position_ids": position_ids,
        "attention_mask": torch.ones_like(position_ids),
    }
    model = decoder.model.base_model
    arguments |= {"use_cache": cache is not None, **cache_argument(model, cache)}
    with decoder.frozen():
        states: Tensor = model(inputs_embeds=vectors[None], **arguments).last_hidden_state
    return states[0].to(decoder.device)  # with several devices, they are on the last one


def soft_prompt_prefix(
    decoder: Decoder, vectors: Float[Tensor, "n d"], positions: Sequence[int] | None = None
) -> Prefix:
    """Run input embeddings once, as `hidden_states` does, and cache their keys and values."""
    cache = DynamicCache(config=decoder.model.config)
    hidden_states(decoder, vectors, positions, cache)
    return Prefix((), cache, len(vectors), 1 + max(positions or range(len(vectors))))


def exchanges(decoder: Decoder, task: Task, demonstrations: Examples) -> list[str]:
    """Return each demonstration with its label word and separator. Raises I2CLError if there are none."""
    if not demonstrations:
        raise I2CLError("a compressor needs demonstrations: give at least one")
    encoder, template = decoder.encoder, task.template
    return [
        template.exchange(encoder.escape(example.text), task.labels[example.label])
        for example in demonstrations
    ]


def encode_without_special_tokens(decoder: Decoder, texts: Sequence[str]) -> list[Ids]:
    """Return the token ids of texts without the tokens that the tokenizer adds at the start."""
    front = len(decoder.encoder.leading_ids)
    return [ids[front:] for ids in decoder.encoder(texts)]


@dataclass(frozen=True)
class SoftPromptPredictor(PromptPredictor):
    """Scores label words after a soft prompt and a query.

    Attributes:
        suffix: tokens after each query.
    """

    suffix: Ids = ()

    @classmethod
    def of(
        cls, decoder: Decoder, task: Task, prefix: Prefix, suffix: Ids = (), edit: Edit | None = None
    ) -> "SoftPromptPredictor":
        """Return a predictor for a task; the soft prompt includes the opening of its template."""
        scorer = LabelScorer(decoder, replace(task, template=replace(task.template, opening="")))
        return cls(scorer, prefix=prefix, edit=edit, cost=Cost.of(prefix), suffix=suffix)

    def split_by_cache(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[Ids], Prefix | None]]:
        """Yield all queries, which follow the soft prompt; texts that exceed the context are truncated."""
        require_texts(texts)
        decoder = self.scorer.decoder
        front = len(decoder.encoder.leading_ids)  # special tokens are removed from each query
        position = self.prefix.next_position if self.prefix else 0
        used = position + len(self.suffix) + self.scorer.labels.tokens_after_query - front
        limit = None if decoder.max_length is None else decoder.max_length - used
        encoded = decoder.encoder.encode(self.scorer.prompt, texts, limit)
        yield list(range(len(texts))), [ids[front:] + self.suffix for ids in encoded], self.prefix
