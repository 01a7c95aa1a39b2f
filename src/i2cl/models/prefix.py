"""Cached keys and values of tokens, or of input vectors, in front of many queries."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from i2cl.models.batching import Ids
from i2cl.models.edits import held


@dataclass(frozen=True)
class Prefix:
    """Tokens or input vectors that run once; every query reuses their keys and values."""

    ids: Ids  #: the tokens; empty if it is made of vectors
    cache: Cache  #: keys and values for one row (transformers Cache); never changed
    length: int  #: number of tokens or vectors it was made of
    behind: int  #: position of the first token after it; less than ``length`` where vectors share positions
    kept: tuple[int, ...] | None = None  #: places of the tokens that the cache still holds; None: all

    def expanded(self, rows: int) -> Cache:
        """Return a copy of the cache for a batch of ``rows``; gradients flow to the original."""
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]  # layers replace tensors, never edit them
        cache.batch_repeat_interleave(rows)
        return cache

    @property
    def thinned(self) -> bool:
        """Whether the cache lost some of its tokens."""
        return self.kept is not None and len(self.kept) < self.length

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

    def kept_at(self, places: tuple[int, ...]) -> "Prefix":
        """Return a prefix with only the tokens at ``places``. The cache must hold all tokens."""
        return replace(self, cache=_changed(self.cache, lambda one: one[:, :, list(places)]), kept=places)

    def in_front_of(
        self, input_ids: Int[Tensor, "batch tokens"]
    ) -> tuple[dict[str, Any], Int[Tensor, " keys"]]:
        """Return the model's arguments for rows after this prefix, and the position of every key they see."""
        (rows, width), seen = input_ids.shape, self.behind
        cached = range(seen) if self.kept is None else self.kept
        keys = torch.tensor([*cached, *range(seen, seen + width)], device=input_ids.device)
        places = keys[-width:].expand(rows, -1)
        return {"use_cache": True, "past_key_values": self.expanded(rows), "position_ids": places}, keys


def holds_keys_alone(config: PreTrainedConfig) -> bool:
    """Return whether a cache of this model holds only keys and values of tokens; False if unknown."""
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
        and size > 0  # Qwen2-MoE says 0 for none
        and (kinds is None or kind in kinds)
    ]
    return min(sizes, default=None)


def _changed(cache: Cache, change: Callable[[Tensor], Tensor]) -> DynamicCache:
    layers: Any = cache.layers
    return DynamicCache([(change(layer.keys), change(layer.values)) for layer in layers])


def keys_at(
    model: PreTrainedModel, blocks: Sequence[nn.Module], places: Int[Tensor, " keys"]
) -> AbstractContextManager[None]:
    """Give each key, cached ones first, the ALiBi bias of its position while the block runs."""
    name, change = _ALIBI.get(model.config.model_type, ("", None))
    if change is None or not getattr(model.config, "alibi", True):  # optional in Falcon only
        return nullcontext()
    return held(
        block.get_submodule(name).register_forward_pre_hook(partial(change, places), with_kwargs=True)
        for block in blocks
    )


def _bloom(places: Int[Tensor, " keys"], _module: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    bias: Float[Tensor, "heads 1 keys"] = keywords["alibi"]
    slope = bias[..., 1:2] - bias[..., :1]
    return args, keywords | {"alibi": (slope * places.to(bias.device)).to(bias.dtype)}


def _mpt(places: Int[Tensor, " keys"], _module: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    bias: Float[Tensor, "heads 1 length"] = keywords["position_bias"]
    slope = bias[..., -1:] - bias[..., -2:-1]
    return args, keywords | {"position_bias": slope * (places - places[-1]).to(bias.device)}


def _falcon(places: Int[Tensor, " keys"], module: nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    """Change the mask: Falcon adds the scaled bias to it, rounded to bfloat16."""
    bias: Float[Tensor, "batch heads 1 keys"] = keywords["alibi"]
    mask: Float[Tensor, "batch heads queries keys"] = keywords["attention_mask"]
    slope = (bias[..., 1:2] - bias[..., :1]).bfloat16()
    moved = (slope * places.to(bias.device)).to(bias.dtype)
    scale: Any = module.inv_norm_factor
    allowed = mask > torch.finfo(mask.dtype).min / 2
    shifted = torch.where(allowed, mask + (moved - bias) * scale, mask)
    return args, keywords | {"alibi": moved, "attention_mask": shifted}


_ALIBI = {"bloom": ("self_attention", _bloom), "falcon": ("self_attention", _falcon), "mpt": ("attn", _mpt)}
