"""Where a tensor of a folded checkpoint comes from, where the class changes: one function a family."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Piece:
    """One tensor of the source and what becomes of it.

    Attributes:
        source: its name there.
        change: applied to it, in its own dtype; None leaves it as it is.
    """

    source: str
    change: Callable[[Tensor], Tensor] | None = None


def same(name: str, _config: PreTrainedConfig) -> Piece:
    """The tensor of the same name."""
    return Piece(name)


def from_gemma(name: str, config: PreTrainedConfig) -> Piece:
    """Norms that multiply by ``1 + w``, and an embedding that is scaled by the root of the width.

    The head is not scaled. Source: https://github.com/huggingface/transformers/pull/29402.
    """
    if "norm" in name.rsplit(".", 2)[-2]:
        return Piece(name, lambda weight: (1.0 + weight.float()).to(weight.dtype))
    if name == "model.embed_tokens.weight":
        scale = float(config.hidden_size) ** 0.5
        return Piece(name, lambda weight: (weight.float() * scale).to(weight.dtype))
    return Piece(name)


def from_phi3(name: str, config: PreTrainedConfig) -> Piece:
    """Queries, keys and values in one matrix, gate and up in another."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    parts = {
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, keys),
        "v_proj": ("qkv_proj", queries + keys, keys),
        "gate_proj": ("gate_up_proj", 0, config.intermediate_size),
        "up_proj": ("gate_up_proj", config.intermediate_size, config.intermediate_size),
    }
    module = name.rsplit(".", 2)[-2]
    if module not in parts or not name.endswith(".weight"):
        return Piece(name)
    fused, start, length = parts[module]
    return Piece(name.replace(module, fused), lambda weight: weight.narrow(0, start, length).clone())


def from_helium(name: str, config: PreTrainedConfig) -> Piece:
    """Rotary pairs that lie side by side; Llama's lie half a head apart."""
    if name.rsplit(".", 2)[-2] not in {"q_proj", "k_proj"}:
        return Piece(name)
    head: int = config.head_dim
    return Piece(name, lambda rows: _halves(rows, head))


def _halves(rows: Float[Tensor, "rows ..."], head: int) -> Float[Tensor, "rows ..."]:
    pairs = rows.reshape(-1, head // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape).contiguous()
