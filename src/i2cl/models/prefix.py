"""Cached keys and values of tokens, or of input vectors, that precede many queries."""

import copy
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from i2cl.models.batching import Ids


@dataclass(frozen=True)
class Prefix:
    """Tokens or input vectors that run once; every query reuses their keys and values."""

    ids: Ids  #: the tokens; empty for a prefix of vectors
    cache: Cache  #: keys and values for one row (transformers Cache); never changed
    length: int  #: number of tokens or vectors, before pruning
    next_position: int  #: position of the first token after it; below ``length`` if vectors share positions
    remaining: tuple[int, ...] | None = None  #: indices of the tokens that remain after pruning; None: all

    def expanded(self, rows: int) -> Cache:
        """Return a copy of the cache for a batch of ``rows``; gradients flow to the original."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]  # layers replace tensors, never edit them
        cache.batch_repeat_interleave(rows)
        return cache

    @property
    def is_pruned(self) -> bool:
        """Whether tokens were removed from the cache."""
        return self.remaining is not None and len(self.remaining) < self.length

    @property
    def values(self) -> int:
        """Number of cached values: 2 x layers x key-value width x tokens, fewer with a sliding window."""
        layers: Any = self.cache.layers
        return sum(layer.keys.numel() + layer.values.numel() for layer in layers)

    @property
    def bytes(self) -> int:
        """Size of the cached values in bytes."""
        layers: Any = self.cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def prune(self, remaining: tuple[int, ...]) -> "Prefix":
        """Return a prefix with only the tokens at these indices. The cache must hold all tokens."""
        layers: Any = self.cache.layers
        indices = list(remaining)
        tensors = [(layer.keys[:, :, indices], layer.values[:, :, indices]) for layer in layers]
        return replace(self, cache=DynamicCache(tensors), remaining=remaining)

    def arguments(self, model: PreTrainedModel, input_ids: Int[Tensor, "batch tokens"]) -> dict[str, Any]:
        """Return the model's arguments for rows after this prefix."""
        rows, width = input_ids.shape
        positions = torch.arange(width, device=input_ids.device) + self.next_position
        return {
            "use_cache": True,
            "position_ids": positions.expand(rows, -1),
            **cache_argument(model, self.expanded(rows)),
        }


def cache_argument(model: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """Return a cache as an argument of a model, by name: transformers 5.24 renames ``past_key_values``."""
    renamed = "cache" in signature(type(model).forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


def uses_alibi(config: PreTrainedConfig) -> bool:
    """Return whether a model has ALiBi, which ignores position ids: a key's index is its position."""
    return config.model_type in {"bloom", "mpt"} or (config.model_type == "falcon" and config.alibi)


def caches_only_keys_and_values(config: PreTrainedConfig) -> bool:
    """Return whether the model caches nothing but keys and values of tokens; False if unknown."""
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError, ValueError):  # a config that transformers has no cache for
        return False
    return all(type(layer) in {DynamicLayer, DynamicSlidingWindowLayer} for layer in layers)


# Config fields with the size of a window or chunk, and the type of the layers that use it.
WINDOWS = {
    "sliding_window": "sliding_attention",
    "window_size": "local",
    "attention_chunk_size": "chunked_attention",
}


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the smallest attention window of a model's layers, or None if every layer sees all tokens."""
    text_config = config.get_text_config()
    kinds = getattr(text_config, "layer_types", None)
    sizes = [
        size
        for field, kind in WINDOWS.items()
        if isinstance(size := getattr(text_config, field, None), int)
        and size > 0  # Qwen2-MoE has 0 for no window
        and (kinds is None or kind in kinds)
    ]
    return min(sizes, default=None)
