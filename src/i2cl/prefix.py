"""Keys and values of tokens that many queries share."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, DynamicCache

from i2cl.batching import Ids


@dataclass(frozen=True)
class Prefix:
    """Tokens run once, whose keys and values every query then reuses.

    Attributes:
        ids: the tokens; a query's positions start behind all of them.
        cache: keys and values for one row (transformers Cache); never changed.
        kept: places of the tokens that the cache still holds, or None for all.
    """

    ids: Ids
    cache: Cache
    kept: tuple[int, ...] | None = None

    def expanded(self, rows: int) -> Cache:
        """A cache of its own for a batch of ``rows``; gradients flow to this one."""
        cache: Any = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in cache.layers]  # layers replace tensors, never edit them
        cache.batch_repeat_interleave(rows)
        own: Cache = cache
        return own

    @property
    def thinned(self) -> bool:
        """Whether tokens were taken out of the cache."""
        return self.kept is not None and len(self.kept) < len(self.ids)

    @property
    def values(self) -> int:
        """Numbers cached: 2 x layers x key-value width x tokens, fewer where a layer keeps a window only."""
        layers: Any = self.cache.layers
        return sum(layer.keys.numel() + layer.values.numel() for layer in layers)

    @property
    def bytes(self) -> int:
        """Bytes of those numbers."""
        layers: Any = self.cache.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def kept_at(self, places: tuple[int, ...]) -> "Prefix":
        """The same with only the tokens at ``places``. Needs a cache that holds all tokens."""
        cache = DynamicCache()
        layers: Any = self.cache.layers
        for number, layer in enumerate(layers):
            index = torch.tensor(places, device=layer.keys.device)
            cache.update(layer.keys.index_select(2, index), layer.values.index_select(2, index), number)
        return Prefix(self.ids, cache, places)

    def key_places(self, width: int, device: torch.device) -> Int[Tensor, " keys"]:
        """Token index of every key that ``width`` more tokens attend to."""
        seen = len(self.ids)
        cached = range(seen) if self.kept is None else self.kept
        return torch.tensor([*cached, *range(seen, seen + width)], device=device)
