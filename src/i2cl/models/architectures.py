"""Locations of the sublayers of a decoder, keyed by ``config.model_type``.

A pre-norm block computes ``r_l = r_{l-1} + a_l + m_l`` (paper, section "Preliminaries"). Its two
*sublayers* are the modules whose outputs are exactly ``a_l`` (attention) and ``m_l`` (MLP).
Module names alone are ambiguous: ``post_attention_layernorm`` is before the MLP in Llama and after the
attention in Gemma 2. So the table is keyed by model type.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from i2cl.errors import I2CLError

if TYPE_CHECKING:  # `i2cl ls architectures` does not import PyTorch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """Locations of the sublayers of a model type.

    Attributes:
        model_type: ``config.model_type`` of the text model.
        layers: attribute path from the base model (``model.base_model``, or ``language_model`` in multimodal
            models) to the list of blocks.
        attention: path from a block to the module that writes the attention output.
        mlp: path from a block to the module that writes the MLP output.
        scale: config attribute with the factor that a block applies to the sublayers' outputs, or None for 1.
        packs: whether queries can be packed into one row, separated by position ids that restart at 0.
    """

    model_type: str
    layers: str
    attention: str
    mlp: str
    scale: str | None = None
    packs: bool = False

    def blocks(self, model: "PreTrainedModel") -> "list[nn.Module]":
        """Return the decoder blocks in order. Raises I2CLError if ``layers`` is not their path."""
        from torch import nn

        base: Any = model.base_model
        if isinstance(getattr(base, "language_model", None), nn.Module):  # multimodal model
            base = base.language_model
        stack = self._find(base, self.layers, "layers")
        if not isinstance(stack, nn.ModuleList | nn.Sequential) or not len(stack):
            raise I2CLError(
                f"layers={self.layers!r} of {type(base).__name__} is {type(stack).__name__}, not a list "
                "of blocks: pass the path that leads to the ModuleList of decoder blocks"
            )
        return list(stack)

    def sublayers(self, model: "PreTrainedModel") -> "list[tuple[nn.Module, nn.Module]]":
        """Return the (attention, MLP) sublayers of each layer.

        Raises:
            I2CLError: if a path does not exist.
        """
        return [
            (self._find(block, self.attention, "attention"), self._find(block, self.mlp, "mlp"))
            for block in self.blocks(model)
        ]

    def sublayer_scale(self, config: "PreTrainedConfig") -> float:
        """Return the factor that a block applies to the sublayers' outputs; 1.0 for most models.

        Raises:
            I2CLError: if the config attribute ``scale`` is not a number.
        """
        if self.scale is None:
            return 1.0
        value = getattr(config.get_text_config(), self.scale, None)
        if not isinstance(value, int | float):
            raise I2CLError(
                f"scale={self.scale!r} is not a number in the config of {self.model_type!r}: pass the "
                "attribute that scales sublayers, or scale=None"
            )
        return float(value)

    def _find(self, root: "nn.Module", path: str, field: str) -> "nn.Module":
        try:
            return root.get_submodule(path)
        except AttributeError:
            names = ", ".join(name for name, _ in root.named_children())
            raise I2CLError(
                f"{field}={path!r} of architecture {self.model_type!r} does not exist in "
                f"{type(root).__name__}, which has {names}: pass an Architecture with the right path"
            ) from None


# (layers, attention, mlp, scale), model types. Each row was checked with `residual_identity` on tiny random
# models (tests/tiny.py).
_ROWS = (
    (
        ("layers", "self_attn", "mlp"),
        """apertus arcee aria_text axk1 axk2 bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm
        deepseek_v2 deepseek_v3 deepseek_v32 diffllama dots1 dots3_note_text ernie4_5 ernie4_5_moe
        exaone_moe flint gemma glm glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss helium hunyuan_v1_dense
        hunyuan_v1_moe hy_v3 internlm3 iquestcoder jais2 laguna llama mellum mimo_v2_flash minimax_m2
        minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat nemotron olmo olmoe persimmon phi
        phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
        vaultgemma youtu""",
    ),
    (("layers", "self_attn", "mlp", "residual_multiplier"), "granite granite_swa"),
    (("layers", "self_attn", "block_sparse_moe", "residual_multiplier"), "granitemoe"),
    (("layers", "self_attn", "shared_mlp", "residual_multiplier"), "granitemoehybrid"),
    (
        ("layers", "post_attention_layernorm", "post_feedforward_layernorm"),
        "exaone4 flex_olmo gemma2 gemma3_text olmo2 olmo3",
    ),
    (("layers", "post_attention_layernorm", "post_mlp_layernorm"), "afmoe"),
    (("layers", "post_norm1", "post_norm2", "residual_multiplier"), "hyperclovax"),
    (("layers", "post_self_attn_layernorm", "post_mlp_layernorm"), "glm4 kolibri1"),
    (("layers", "attention", "mlp"), "gpt_neox"),
    (("layers", "attn", "mlp"), "modernbert-decoder"),
    (("layers", "self_attention", "mlp"), "jetmoe"),
    (("layers", "self_attn", "fc2"), "biogpt xglm"),
    (("model.layers", "self_attn", "feed_forward"), "llama4_text"),
    (("h", "attn", "mlp"), "codegen gpt2 gpt_bigcode gpt_neo gptj"),
    (("h", "multi_head_attention", "ffn"), "ctrl"),
    (("h", "self_attention", "mlp"), "falcon"),
    (("h", "self_attention.dense", "mlp.dense_4h_to_h"), "bloom"),
    (("blocks", "attn.out_proj", "ffn.down_proj"), "mpt"),
    (("blocks", "norm_attn_norm.attn", "ffn"), "dbrx"),
    (("decoder.layers", "self_attn", "fc2"), "opt"),
)

# These ignore position ids, or attend to the whole row regardless of them; all others can be packed.
_WITHOUT_PACKING = "afmoe biogpt bloom falcon gpt_oss granitemoehybrid minimax_m3_vl_text mpt opt xglm"

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        name: replace(Architecture(name, *fields), packs=name not in _WITHOUT_PACKING.split())
        for name, fields in sorted((name, fields) for fields, names in _ROWS for name in names.split())
    }
)
"""Model types that work without an explicit `Architecture`. Read-only."""


def architecture_of(model: "PreTrainedModel") -> Architecture:
    """Look up the architecture of a model. Raises I2CLError on an unknown model type."""
    model_type = model.config.get_text_config().model_type
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    raise I2CLError(
        f"unknown model type {model_type!r} (known: `i2cl ls architectures`): find the two modules of a "
        "block that write to its residual stream, test them with `i2cl check MODEL --layers layers "
        "--attention self_attn --mlp mlp`, and pass them as Decoder.from_pretrained(..., "
        f'architecture=Architecture(model_type="{model_type}", layers="layers", attention="self_attn", '
        'mlp="mlp"))'
    )
