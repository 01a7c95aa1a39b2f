"""Attention biases that fall off with distance (ALiBi), for caches from which tokens were taken out.

Models with such biases (Press et al. 2022, https://arxiv.org/abs/2108.12409) count the cached keys to
find out how far away each is. After some are taken out, the count is wrong: the biases must be those of
the places that the remaining keys were computed at.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from i2cl.hooks import KeywordChange, edit_keywords


@contextmanager
def keys_at(model: PreTrainedModel, blocks: list[nn.Module], places: Int[Tensor, " keys"]) -> Iterator[None]:
    """Give each key the bias of its place while the block runs; nothing to do without ALiBi.

    Args:
        model: any decoder.
        blocks: its decoder blocks.
        places: token index of every key, cached ones first.
    """
    found: dict[str, tuple[str, Any]] = {
        "bloom": ("self_attention", _bloom),
        "falcon": ("self_attention", _falcon),
        "mpt": ("attn", _mpt),
    }
    name, build = found.get(model.config.model_type, ("", None))
    if build is None or not _has_alibi(model):
        yield
        return
    change: KeywordChange = build(places)
    with edit_keywords([(block.get_submodule(name), change) for block in blocks]):
        yield


def _has_alibi(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config, "alibi", True))  # only Falcon has a choice


def _bloom(places: Int[Tensor, " keys"]) -> KeywordChange:
    def change(_module: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
        bias: Float[Tensor, "heads 1 keys"] = keywords["alibi"]
        slope = bias[..., 1:2] - bias[..., :1]
        return keywords | {"alibi": (slope * places.to(bias.device)).to(bias.dtype)}

    return change


def _mpt(places: Int[Tensor, " keys"]) -> KeywordChange:
    def change(_module: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
        bias: Float[Tensor, "heads 1 length"] = keywords["position_bias"]
        slope = bias[..., -1:] - bias[..., -2:-1]
        distance = (places - places[-1]).to(bias.device)
        return keywords | {"position_bias": slope * distance}

    return change


def _falcon(places: Int[Tensor, " keys"]) -> KeywordChange:
    """Falcon adds the scaled bias to its mask, and rounds it to bfloat16 on the way."""

    def change(module: nn.Module, keywords: dict[str, Any]) -> dict[str, Any]:
        bias: Float[Tensor, "batch heads 1 keys"] = keywords["alibi"]
        mask: Float[Tensor, "batch heads queries keys"] = keywords["attention_mask"]
        slope = (bias[..., 1:2] - bias[..., :1]).bfloat16()
        moved = (slope * places.to(bias.device)).to(bias.dtype)
        scale: Any = module.inv_norm_factor
        allowed = mask > torch.finfo(mask.dtype).min / 2
        shifted = torch.where(allowed, mask + (moved - bias) * scale, mask)
        return keywords | {"alibi": moved, "attention_mask": shifted}

    return change
