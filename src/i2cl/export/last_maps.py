"""The last linear maps of the residual writers, also of model types that no weights can fold."""

from collections.abc import Mapping
from types import MappingProxyType

from i2cl.export.families import FAMILIES, Linear

_LLAMA = ("self_attn.o_proj", "mlp.down_proj")
_UNBIASED = """apertus bitnet cwm diffllama glm hunyuan_v1_dense ministral3 olmo stablelm vaultgemma
youtu"""
_EXPERTS = ("self_attn.o_proj", "")


def _module(path: Linear) -> str:
    return path if isinstance(path, str) else ""  # experts' weights are no modules


LAST_MAPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(_UNBIASED.split(), _LLAMA)
    | dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), _EXPERTS)
    | {"mpt": ("attn.out_proj", "ffn.down_proj"), "nanochat": ("self_attn.o_proj", "mlp.fc2")}
    | {name: (_module(row.attention), _module(row.mlp)) for name, row in FAMILIES.items()}
)
"""Paths from a block to the last linear maps of attention and MLP; "" where there is none. Read-only."""
