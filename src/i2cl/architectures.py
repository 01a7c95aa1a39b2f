"""Which modules of a decoder write to its residual stream, keyed by ``config.model_type``.

A pre-norm block computes ``r_l = r_{l-1} + a_l + m_l`` (paper, section "Preliminaries"). The two
*residual writers* are the modules whose outputs are exactly ``a_l`` (attention) and ``m_l`` (MLP).
Module names alone do not tell: ``post_attention_layernorm`` stands before the MLP in Llama and
after the attention in Gemma 2, so the table is keyed by model type and never by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from i2cl.errors import I2CLError
from i2cl.hooks import edit_inputs, edit_outputs

TOLERANCE = 1e-4
"""Largest error of the residual identity, relative to the largest change a block makes."""


@dataclass(frozen=True)
class Architecture:
    """Where the residual writers of a model type are.

    Attributes:
        model_type: ``config.model_type`` of the text model.
        layers: attribute path from the base model (``model.base_model``, or its ``language_model``
            where the model also sees images) to the list of blocks.
        attention: path from a block to the module that writes the attention output.
        mlp: path from a block to the module that writes the MLP output.
        scale: name of the config attribute by which a block multiplies what a writer returns before
            adding it, or None where it adds it as it is.
        packs: whether position ids that start again keep the queries in one row apart.
    """

    model_type: str
    layers: str
    attention: str
    mlp: str
    scale: str | None = None
    packs: bool = False

    def blocks(self, model: PreTrainedModel) -> list[nn.Module]:
        """The decoder blocks, first layer first.

        Raises:
            I2CLError: if the path ``layers`` does not lead to a list of blocks.
        """
        base = _text_model(model)
        found = self._find(base, self.layers, "layers")
        if not isinstance(found, nn.ModuleList | nn.Sequential) or not len(found):
            raise I2CLError(
                f"layers={self.layers!r} of {type(base).__name__} is {type(found).__name__}, not a list "
                "of blocks: pass the path that leads to the ModuleList of decoder blocks"
            )
        return list(found)

    def writers(self, model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
        """The residual writers, axes [layer, (mha, mlp)].

        Raises:
            I2CLError: if a path does not hold in some block.
        """
        return [
            (self._find(block, self.attention, "attention"), self._find(block, self.mlp, "mlp"))
            for block in self.blocks(model)
        ]

    def writer_scale(self, config: PreTrainedConfig) -> float:
        """What a block multiplies a writer's output by before it adds it; 1.0 for most models.

        Raises:
            I2CLError: if the config has no number under the name ``scale``.
        """
        if self.scale is None:
            return 1.0
        value = getattr(config.get_text_config(), self.scale, None)
        if not isinstance(value, int | float):
            raise I2CLError(
                f"scale={self.scale!r} is no number in the config of {self.model_type!r}: "
                "pass the name of the config attribute that scales residual writers, or scale=None"
            )
        return float(value)

    def _find(self, root: nn.Module, path: str, field: str) -> nn.Module:
        try:
            return root.get_submodule(path)
        except AttributeError:
            names = ", ".join(name for name, _ in root.named_children())
            raise I2CLError(
                f"{field}={path!r} of architecture {self.model_type!r} does not exist in "
                f"{type(root).__name__}, which has {names}: pass an Architecture with the right path"
            ) from None


# (layers, attention, mlp, scale), model types. Each row was measured with `residual_identity` on the
# tiny random models of tests/tiny.py.
_ROWS = (
    (
        ("layers", "self_attn", "mlp"),
        """cohere cohere2 gemma glm helium llama mistral mixtral nemotron olmo phi phi3 qwen2 qwen2_moe
        qwen3 qwen3_moe smollm3 stablelm starcoder2""",
    ),
    (("layers", "self_attn", "mlp", "residual_multiplier"), "granite"),
    (
        ("layers", "post_attention_layernorm", "post_feedforward_layernorm"),
        "exaone4 gemma2 gemma3_text olmo2 olmo3",
    ),
    (("layers", "post_self_attn_layernorm", "post_mlp_layernorm"), "glm4"),
    (("layers", "attention", "mlp"), "gpt_neox"),
    (("h", "attn", "mlp"), "gpt2 gpt_neo gptj"),
    (("h", "self_attention", "mlp"), "falcon"),
    (("h", "self_attention.dense", "mlp.dense_4h_to_h"), "bloom"),
    (("blocks", "attn.out_proj", "ffn.down_proj"), "mpt"),
    (("decoder.layers", "self_attn", "fc2"), "opt"),
)

_WITHOUT_PACKING = frozenset({"bloom", "falcon", "mpt", "opt"})  # they ignore position_ids; all else packs

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        model_type: replace(Architecture(model_type, *fields), packs=model_type not in _WITHOUT_PACKING)
        for model_type, fields in sorted((name, fields) for fields, names in _ROWS for name in names.split())
    }
)
"""Every model type that works without being told where its residual writers are. Read-only."""


def architecture_of(model: PreTrainedModel) -> Architecture:
    """Look up a model by the model type of its text model.

    Raises:
        I2CLError: if the model type is not in `ARCHITECTURES`.
    """
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


@dataclass(frozen=True)
class ResidualIdentity:
    """How well ``block_out - block_in = scale * (attention + mlp)`` holds.

    Attributes:
        errors: per layer, the largest absolute error over the largest absolute change that the block
            makes. What rounding in the model's own precision explains is not counted, so that one
            tolerance serves every dtype.
    """

    errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest error of any layer; not a number if any activation is not finite."""
        return float(torch.tensor(self.errors, dtype=torch.float64).max())

    @property
    def passed(self) -> bool:
        """Whether the worst error is at most `TOLERANCE`."""
        return self.worst <= TOLERANCE


def residual_identity(
    model: PreTrainedModel, architecture: Architecture, input_ids: Int[Tensor, "batch tokens"]
) -> ResidualIdentity:
    """Run the base model once and test that the two writers are all that each block adds.

    The model is to be in evaluation mode: dropout counts as an error. The order of the two writers is
    not tested, since their sum does not show it.

    Raises:
        I2CLError: if a path is wrong, or leads to a module that is never run or has another width.
    """
    kept = _captured(model, architecture, input_ids)
    scale = architecture.writer_scale(model.config)
    errors = []
    for layer, block in enumerate(architecture.blocks(model)):
        for part in _PARTS:
            value = kept.get((layer, part))
            if value is None or value.numel() != kept[layer, "input"].numel():
                what = "was never run" if value is None else f"has shape {tuple(value.shape)}"
                raise I2CLError(
                    f"{part!r} of layer {layer} {what}: pass an Architecture whose paths lead to modules "
                    f"of {type(block).__name__} that write to its residual stream"
                )
        errors.append(_error(*(kept[layer, part] for part in _PARTS), scale=scale))
    return ResidualIdentity(tuple(errors))


_PARTS = ("input", "attention", "mlp", "output")


def _captured(
    model: PreTrainedModel, architecture: Architecture, input_ids: Int[Tensor, "batch tokens"]
) -> dict[tuple[int, str], Tensor]:
    kept: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, part: str) -> Callable[[Tensor], None]:
        def look(value: Tensor) -> None:
            kept[layer, part] = value.detach().to("cpu", copy=True)  # Falcon adds in place

        return look

    blocks = list(enumerate(architecture.blocks(model)))
    inputs = [(block, keep(layer, "input")) for layer, block in blocks]
    outputs = [(block, keep(layer, "output")) for layer, block in blocks]
    for layer, (attention, mlp) in enumerate(architecture.writers(model)):
        outputs += [(attention, keep(layer, "attention")), (mlp, keep(layer, "mlp"))]
    with torch.no_grad(), edit_inputs(inputs), edit_outputs(outputs):
        model.base_model(input_ids=input_ids, use_cache=False)
    return kept


def _error(
    before: Float[Tensor, "batch tokens d"],
    attention: Float[Tensor, "..."],
    mlp: Float[Tensor, "..."],
    after: Float[Tensor, "batch tokens d"],
    *,
    scale: float,
) -> float:
    # Adding up rounds each of at most four intermediate results by half an epsilon of its size.
    rounding = 2 * torch.finfo(after.dtype).eps
    start, end = before.double(), after.double()
    first, second = (scale * writer.double().reshape(start.shape) for writer in (attention, mlp))  # OPT: 2-D
    change = end - start
    error = (change - first - second).abs() - rounding * (start.abs() + first.abs() + second.abs())
    largest = change.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float(error.clamp(min=0).max() / largest)


def _text_model(model: PreTrainedModel) -> nn.Module:
    """The base model, or its language model where the model also sees images."""
    base: Any = model.base_model
    wrapped = getattr(base, "language_model", None)
    return wrapped if isinstance(wrapped, nn.Module) else base
