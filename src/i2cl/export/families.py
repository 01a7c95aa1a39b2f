"""How each model type can hold an injection in its weights, keyed by ``config.model_type``.

The last linear map of a sublayer (attention or MLP) computes ``a = W h + b``. So ``lambda v + beta a`` is
``W <- beta W`` and ``b <- beta b + lambda v``. That takes a class with both biases, or conversion to one that
has them. Rows follow the modeling code of transformers 5 (https://github.com/huggingface/transformers).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from i2cl.errors import I2CLError

USE_HOOKS = "predict with hooks instead (`i2cl predict`)"
# Path from a block to a linear map; or the names of its weight tensors, followed by the name of its bias.
Linear = str | tuple[str, ...]
# Name of a tensor in the source, and a function that converts it, or None.
Piece = tuple[str, Callable[[Tensor], Tensor] | None]


def unchanged(name: str, _config: PreTrainedConfig) -> Piece:
    """Use the tensor of the same name."""
    return name, None


def from_gemma(name: str, config: PreTrainedConfig) -> Piece:
    """Convert norms, which multiply by ``1 + w``, and the embedding, which is scaled by ``sqrt(d)``.

    The LM head is not scaled. Source: https://github.com/huggingface/transformers/pull/29402.
    """
    if "norm" in name.rsplit(".", 2)[-2]:
        return name, lambda weight: (1.0 + weight.float()).to(weight.dtype)
    if name == "model.embed_tokens.weight":
        return name, lambda weight: (weight.float() * float(config.hidden_size) ** 0.5).to(weight.dtype)
    return name, None


def from_phi3(name: str, config: PreTrainedConfig) -> Piece:
    """Split the fused query-key-value and gate-up matrices."""
    head, wide = head_width(config), config.intermediate_size
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    parts = {
        "q_proj": ("qkv_proj", 0, queries),
        "k_proj": ("qkv_proj", queries, keys),
        "v_proj": ("qkv_proj", queries + keys, keys),
        "gate_proj": ("gate_up_proj", 0, wide),
        "up_proj": ("gate_up_proj", wide, wide),
    }
    module = name.rsplit(".", 2)[-2]
    if module not in parts or not name.endswith(".weight"):
        return name, None
    fused, start, length = parts[module]
    return name.replace(module, fused), lambda weight: weight.narrow(0, start, length).clone()


def from_helium(name: str, config: PreTrainedConfig) -> Piece:
    """Reorder rotary pairs, which are adjacent here and half a head apart in Llama."""
    if name.rsplit(".", 2)[-2] not in {"q_proj", "k_proj"}:
        return name, None
    half: int = config.head_dim // 2

    def halves(rows: Tensor) -> Tensor:
        pairs = rows.reshape(-1, half, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape).contiguous()

    return name, halves


@dataclass(frozen=True)
class Family:
    """How some model types are folded.

    Attributes:
        attention: path from a block of the folded model to the last linear map of its attention.
        mlp: the same of its MLP.
        switches: config fields that turn the biases on; other biases that they add are zero.
        joint: the sublayer whose bias takes both constants, in parallel blocks with only one bias.
        target: model type of the folded model, if it is another one.
        head: name of ``lm_head`` in files.
        piece: returns the source tensor that each tensor of the folded model is made from.
    """

    attention: Linear
    mlp: Linear
    switches: tuple[str, ...] = ()
    joint: Literal["", "attention", "mlp"] = ""
    target: str = ""
    head: str = "lm_head"
    piece: Callable[[str, PreTrainedConfig], Piece] = unchanged

    def config(self, source: PreTrainedConfig) -> PreTrainedConfig:
        """Return the config of the folded model."""
        if self.target:
            return _converted(source, self.target)
        fields = source.to_dict()
        fields.pop("auto_map", None)  # remote code, which the folded model does not need
        return type(source).from_dict(fields | dict.fromkeys(self.switches, True))


_LLAMA = ("self_attn.o_proj", "mlp.down_proj")
_BOTH = ("attention_bias", "mlp_bias")
# The weights of a token's experts sum to 1, so a constant added to every expert's bias counts once.
_GPT_OSS = ("mlp.experts.down_proj", "mlp.experts.down_proj_bias")
# The bias is added after the sum over experts.
_JETMOE_ATTENTION = ("self_attention.experts.output_linear.weight", "self_attention.experts.bias")

_ROWS = {
    Family(*_LLAMA, _BOTH): "arcee granite granite_swa internlm3 iquestcoder jais2 llama nemotron smollm3",
    Family(*_LLAMA, ("attention_out_bias", "mlp_bias")): "seed_oss",
    Family(*_LLAMA, ("use_bias",)): "ernie4_5",
    Family(*_LLAMA, ("attention_bias",), "attention"): "cohere cohere2 cohere_compass_text",
    Family("self_attn.o_proj", _GPT_OSS, ("attention_bias",)): "gpt_oss",
    Family(_JETMOE_ATTENTION, ("mlp.output_linear.weight", "mlp.bias")): "jetmoe",
    Family("attn.c_proj", "mlp.c_proj"): "gpt2 gpt_bigcode",
    Family("attn.attention.out_proj", "mlp.c_proj"): "gpt_neo",
    Family("attn.out_proj", "mlp.fc_out", joint="mlp"): "codegen gptj",
    Family("attention.dense", "mlp.dense_4h_to_h", ("attention_bias",), head="embed_out"): "gpt_neox",
    Family("self_attention.dense", "mlp.dense_4h_to_h"): "bloom",
    Family("self_attention.dense", "mlp.dense_4h_to_h", ("bias",)): "falcon",
    Family("self_attn.dense", "mlp.fc2"): "phi",
    Family("self_attn.dense", "mlp.dense_4h_to_h"): "persimmon",
    Family("self_attn.out_proj", "fc2"): "biogpt xglm",
    Family("multi_head_attention.dense", "ffn.2"): "ctrl",
    Family("attn.Wo", "mlp.Wo", _BOTH): "modernbert-decoder",
    Family("self_attn.out_proj", "fc2", ("enable_bias",)): "opt",
    Family("self_attn.o_proj", "mlp.c_proj", ("use_bias",)): "starcoder2",
    Family(*_LLAMA, target="llama"): "ministral mistral qwen2",
    Family(*_LLAMA, target="llama", piece=from_phi3): "phi3",
    Family(*_LLAMA, target="llama", piece=from_gemma): "gemma",
    Family(*_LLAMA, target="llama", piece=from_helium): "helium",
    Family(*_LLAMA, target="hy_v3"): "qwen3",  # without experts: Llama with norms of queries and keys
}

# Model types that can be folded. Read-only.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: row for row, names in _ROWS.items() for name in names.split()}
)

_REASONS = {
    "its blocks normalize the output of a sublayer, and no weight can add a constant after that": """
        afmoe exaone4 flex_olmo gemma2 gemma3_text glm4 hyperclovax kolibri1 olmo2 olmo3""",
    "its experts have no biases, which would hold lambda v": """
        aria_text axk1 axk2 dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1 dots3_note_text ernie4_5_moe
        exaone_moe flint glm4_moe glm4_moe_lite glm_moe_dsa granitemoe hunyuan_v1_moe hy_v3 laguna
        llama4_text mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe
        qwen3_moe solar_open""",
    "its experts, which beta would have to scale, are stored separately": "cohere2_moe",
    "its attention and MLP have no biases, and its config cannot turn them on": "mpt stablelm",
    "it has no biases, and no class with both scales queries by position": "ministral3",
    "its attention has no bias, and no class with both biases has sliding windows in some layers": "cwm",
    "its MLP has no bias, and no class with one has the same norms": "bitnet hunyuan_v1_dense olmo",
    "its MLP has no bias, and no class with one has the same attention": "diffllama vaultgemma youtu",
    "its MLP has no bias, and no class with one has its other layer types": "granitemoehybrid",
    "its MLP has no bias, and no class with one has the same activation": "apertus nanochat",
    "it has no biases, and no class with both has its partial rotary embedding": "glm",
}
# Supported model types (`i2cl.models.architectures.ARCHITECTURES`) that cannot be folded, and why. Read-only.
REFUSED: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _REASONS.items() for name in names.split()}
)


def family_of(config: PreTrainedConfig) -> Family:
    """Return how a model is folded. Raises I2CLError with the reason if it cannot be."""
    kind = config.model_type
    row = FAMILIES.get(kind)
    reason = REFUSED.get(kind) or next(_obstacles(config, row.target if row else ""), None)
    if row is not None and reason is None:
        return row
    reason = reason or f"supported are {', '.join(sorted(FAMILIES))}"
    raise I2CLError(f"a {kind!r} model cannot hold an injection in its weights: {reason}; {USE_HOOKS}")


def _obstacles(config: PreTrainedConfig, target: str) -> Iterator[str]:
    """Yield reasons why a config cannot be folded, such as a feature that the target class does not have."""
    if config.get_text_config() is not config:
        yield "it is part of a multimodal model"
    if getattr(config, "quantization_config", None):
        yield "its weights are quantized; export the unquantized checkpoint and quantize the export"
    if not target:
        return
    window, length = getattr(config, "sliding_window", None), config.max_position_embeddings
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < length and "sliding_attention" in kinds:
        sizes = f"its sliding window of {window} tokens is shorter than its context of {length}"
        yield f"{sizes}, and {target} has no sliding window"
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        yield f"its rotary embedding is partial, which {target} does not support"
    if getattr(config, "use_bidirectional_attention", None):
        yield f"its attention is bidirectional, which {target} does not support"
    if target == "llama" and config.hidden_size % config.num_attention_heads:
        yield "its width is not a multiple of its number of heads, which llama requires"


def head_width(config: PreTrainedConfig) -> int:
    """Return the dimension of each attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


_COPIED = """attention_dropout bos_token_id dtype eos_token_id hidden_act hidden_size initializer_range
intermediate_size max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
pad_token_id rms_norm_eps rope_parameters use_cache vocab_size"""


def _converted(source: PreTrainedConfig, target: str) -> PreTrainedConfig:
    fields = {name: value for name, value in source.to_dict().items() if name in _COPIED.split()}
    original = getattr(source, "original_max_position_embeddings", None)
    if original is not None and fields["rope_parameters"].get("rope_type") == "longrope":
        fields["rope_parameters"].setdefault("original_max_position_embeddings", original)
    tied = source.tie_word_embeddings and source.model_type != "gemma"  # only its embedding is scaled
    fields |= dict.fromkeys(_BOTH, True) | {"head_dim": head_width(source), "tie_word_embeddings": tied}
    if target == "hy_v3":
        fields["mlp_layer_types"] = ["dense"] * source.num_hidden_layers
    return AutoConfig.for_model(target, **fields)


_UNBIASED = "apertus bitnet cwm diffllama glm hunyuan_v1_dense ministral3 olmo stablelm vaultgemma youtu"


def _module(path: Linear) -> str:
    return path if isinstance(path, str) else ""  # experts are tensors, not modules


# Paths from a block to the last linear maps of attention and MLP, for more model types than can be folded;
# "" if it has none. Read-only.
LAST_MAPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(_UNBIASED.split(), _LLAMA)
    | dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), ("self_attn.o_proj", ""))
    | {"mpt": ("attn.out_proj", "ffn.down_proj"), "nanochat": ("self_attn.o_proj", "mlp.fc2")}
    | {name: (_module(row.attention), _module(row.mlp)) for name, row in FAMILIES.items()}
)
