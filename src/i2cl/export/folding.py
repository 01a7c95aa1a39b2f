"""Fold an injection into the weights of a model.

The last linear map of a sublayer (attention or MLP) computes ``a = W h + b``. To output ``beta a + lambda v``
instead, ``W`` becomes ``beta W`` and ``b`` becomes ``beta b + lambda v``. This needs a bias: some model types
have one, some have a config field that adds one, and some are converted to an equivalent type that has one.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.precision import quantization_of

MAX_SHARD_SIZE = "5GB"  # of a file of weights
USE_HOOKS = "predict with hooks instead (`i2cl predict`)"
# Config fields that add a bias to the last linear map of a sublayer. Other biases that they add are zero.
BIAS_SWITCHES = ("attention_bias", "attention_out_bias", "bias", "enable_bias", "mlp_bias", "use_bias")
# Model types that are converted to another type that computes the same and has the biases.
CONVERSIONS = {
    "gemma": "llama",
    "ministral": "llama",
    "mistral": "llama",
    "phi3": "llama",
    "qwen2": "llama",
    "qwen3": "hy_v3",  # without experts: a Llama that normalizes queries and keys
}
# Model types with parallel blocks where only one sublayer has a bias. That bias takes both vectors, since
# the block adds the two outputs.
PARALLEL_BLOCKS = {"codegen", "cohere", "cohere2", "cohere_compass_text", "gptj"}


class FoldedStructure:
    """What of a folded model the base model's config determines: all but the values of its weights.

    Args:
        source_config: config of the base model.
        injection: fitted task.
        label_scores: with word-level scoring, change the LM head so that the logit of a label's first token
            is the label's score.

    Attributes:
        config: config of the folded model.
        model: the folded model, without memory for its weights.
        shapes: shapes of its tensors by name, without tied ones.
        constants: float32 vectors ``lambda * v`` by the name of the bias that they are added to.
        scales: beta by the names of the tensors that it multiplies.

    Raises:
        I2CLError: if such a model cannot hold the injection.
    """

    def __init__(
        self, source_config: PreTrainedConfig, injection: Injection, *, label_scores: bool = True
    ) -> None:
        require_foldable(injection)
        _require_plain(source_config)
        self.source_config = source_config
        self.config = _folded_config(source_config)
        self._changes_head = label_scores and injection.scoring == "words"
        if self._changes_head:
            self.config.tie_word_embeddings = False  # the head changes, the embedding does not
        self.model = skeleton(self.config)
        state, tied = self.model.state_dict(), self.model.all_tied_weights_keys
        self.shapes = {name: tensor.shape for name, tensor in state.items() if name not in tied}
        self.constants: dict[str, Float[Tensor, " d"]] = {}
        self.scales: dict[str, float] = {}
        self._fold(injection)

    def _fold(self, injection: Injection) -> None:
        """Fill `constants` and `scales`."""
        added, betas = added_and_scales(injection)
        shape = (self.config.num_hidden_layers, self.config.hidden_size)
        if (sizes := (added.shape[0], added.shape[2])) != shape:
            problem = f"this injection is for (layers, width) {sizes}, the model has {shape}"
            raise I2CLError(f"{problem}: fit it again")
        for layer, pair in enumerate(output_projections(self.model)):
            for sublayer, name in enumerate(pair):
                tensors = [tensor for tensor in (f"{name}.weight", f"{name}.bias") if tensor in self.shapes]
                self.scales |= dict.fromkeys(tensors, float(betas[layer, sublayer]))
                bias = f"{name}.bias"
                if bias not in self.shapes and self.config.model_type in PARALLEL_BLOCKS:
                    bias = f"{pair[1 - sublayer]}.bias"
                if bias not in self.shapes:
                    problem = (
                        f"its {('attention', 'MLP')[sublayer]} has no bias, and its config cannot add one"
                    )
                    raise _refusal(self.source_config.model_type, problem)
                self.constants[bias] = self.constants.get(bias, 0.0) + added[layer, sublayer]


class Folding(FoldedStructure):
    """The tensors of a folded model, each computed when it is read.

    Args:
        decoder: the base model.
        injection: fitted task.
        dtype: dtype of the folded weights; default: the base model's.
        force: accept other weights of the same shape than those the injection was fitted on.
        label_scores: see `FoldedStructure`.

    Attributes:
        labels: the label tokens that the injection scores.

    Raises:
        I2CLError: if the model or the injection cannot be folded, or the injection was fitted on another
            model.
    """

    def __init__(
        self,
        decoder: Decoder,
        injection: Injection,
        *,
        dtype: torch.dtype | None = None,
        force: bool = False,
        label_scores: bool = True,
    ) -> None:
        # a text classifier computes its own label scores
        self.labels = require_exportable(decoder, injection, multi_label=not label_scores)
        super().__init__(decoder.model.config, injection, label_scores=label_scores)
        self.dtype = dtype or decoder.model.dtype
        injection.require_base(decoder, force=force)
        self._source: dict[str, Tensor] = decoder.model.state_dict()
        if any(tensor.is_meta for tensor in self._source.values()):
            raise I2CLError("parts of this model are not in memory: load it without a device map")

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Compute one tensor of the folded model in float32, and round it once.

        Args:
            name: name in the state dict of the folded model.
            dtype: dtype of the result, instead of `dtype`.
        """
        source, convert = _source_of(name, self.source_config)
        if source in self._source:
            folded = self._source[source]
            folded = folded if convert is None else convert(folded)
        else:  # a bias that only the folded model has
            folded = torch.zeros(self.shapes[name])
        if self._changes_head and name.rpartition(".")[0] == lm_head_name(self.model):
            folded = self.labels.at_representatives(folded.float().movedim(0, -1)).movedim(-1, 0)
        if name in self.scales:
            folded = folded.float() * self.scales[name]
        if name in self.constants:
            folded = folded + self.constants[name].to(folded.device)
        return folded.to(dtype or self.dtype)

    def build(
        self,
        auto_class: Any,
        config: PreTrainedConfig | None = None,
        tensors: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Any:
        """Return a model with the folded weights, in evaluation mode.

        Args:
            auto_class: such as ``AutoModelForCausalLM``.
            config: config of the model, instead of `config`.
            tensors: tensors by name that replace those of the folded model.
        """
        with no_init_weights():
            model = auto_class.from_config(config or self.config, dtype=self.dtype)
        with torch.no_grad():
            for name, parameter in model.state_dict().items():
                if name not in model.all_tied_weights_keys:
                    parameter.copy_(tensors[name] if name in tensors else self.tensor(name))
        model.tie_weights()
        return model.eval()


def output_projections(model: PreTrainedModel) -> list[tuple[str, str]]:
    """Return the names of the last linear maps of attention and MLP, for each layer.

    Raises I2CLError if the model type is not supported, or a sublayer does not end with a linear map.
    """
    config, names = model.config, {module: name for name, module in model.named_modules()}
    pairs = ARCHITECTURES[config.model_type].sublayers(model)
    return [(names[_last_linear(one, config)], names[_last_linear(two, config)]) for one, two in pairs]


def _last_linear(sublayer: nn.Module, config: PreTrainedConfig) -> nn.Module:
    if "Norm" in type(sublayer).__name__:
        problem = "its blocks normalize the output of a sublayer, and no weight can add a vector after that"
        raise _refusal(config.model_type, problem)
    modules = dict(sublayer.named_modules())
    if any(re.search("expert|router", name) for name in modules):
        raise _refusal(config.model_type, "it is a mixture of experts, whose output no bias is added to")
    linear = [module for module in modules.values() if isinstance(module, nn.Linear | Conv1D)]
    # modules are registered in the order in which they run, except the queries, keys and values of Phi-3
    widths = [module.out_features if isinstance(module, nn.Linear) else module.nf for module in linear]
    return [module for module, width in zip(linear, widths, strict=True) if width == config.hidden_size][-1]


def _folded_config(source: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the folded model: of a type with biases, or with all biases turned on."""
    if (kind := source.model_type) in CONVERSIONS:
        for obstacle in _obstacles(source, CONVERSIONS[kind]):
            raise _refusal(kind, obstacle)
        return _converted_config(source, CONVERSIONS[kind])
    fields = source.to_dict()
    fields.pop("auto_map", None)  # remote code, which the folded model does not need
    return type(source).from_dict(fields | {name: True for name in BIAS_SWITCHES if name in fields})


def multimodal_refusal(kind: str) -> I2CLError:
    """Return the error for a part of a multimodal model."""
    return _refusal(kind, "it is a part of a multimodal model")


def _refusal(kind: str, reason: str) -> I2CLError:
    return I2CLError(f"a {kind!r} model cannot hold an injection in its weights: {reason}; {USE_HOOKS}")


def _obstacles(config: PreTrainedConfig, target: str) -> Iterator[str]:
    """Yield the features of a config that the target type does not have."""
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


def _converted_config(source: PreTrainedConfig, target: str) -> PreTrainedConfig:
    target_fields = AutoConfig.for_model(target).to_dict().keys() - {"architectures", "model_type"}
    fields = {name: value for name, value in source.to_dict().items() if name in target_fields}
    original = getattr(source, "original_max_position_embeddings", None)
    if original is not None and fields["rope_parameters"].get("rope_type") == "longrope":
        fields["rope_parameters"].setdefault("original_max_position_embeddings", original)
    # Gemma scales its embedding, but not its LM head
    fields["tie_word_embeddings"] = source.tie_word_embeddings and source.model_type != "gemma"
    fields |= {"attention_bias": True, "mlp_bias": True, "head_dim": _head_width(source)}
    if target == "hy_v3":
        fields["mlp_layer_types"] = ["dense"] * source.num_hidden_layers
    return AutoConfig.for_model(target, **fields)


def _head_width(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _source_of(name: str, config: PreTrainedConfig) -> tuple[str, Callable[[Tensor], Tensor] | None]:
    """Return the source tensor that a tensor of the folded model is made from, and its conversion."""
    module = name.rsplit(".", 2)[-2]
    if config.model_type == "gemma" and "norm" in module:  # its norms multiply by 1 + w
        return name, lambda weight: (1.0 + weight.float()).to(weight.dtype)
    if config.model_type == "gemma" and module == "embed_tokens":
        # Scaled by sqrt(d), unlike the LM head: https://github.com/huggingface/transformers/pull/29402
        return name, lambda weight: (weight.float() * float(config.hidden_size) ** 0.5).to(weight.dtype)
    if config.model_type == "phi3" and name.endswith(".weight"):
        head, mlp_width = _head_width(config), config.intermediate_size
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        parts = {
            "q_proj": ("qkv_proj", 0, queries),
            "k_proj": ("qkv_proj", queries, keys),
            "v_proj": ("qkv_proj", queries + keys, keys),
            "gate_proj": ("gate_up_proj", 0, mlp_width),
            "up_proj": ("gate_up_proj", mlp_width, mlp_width),
        }
        if module in parts:
            fused, start, length = parts[module]
            return name.replace(module, fused), lambda weight: weight.narrow(0, start, length)
    return name, None


def added_and_scales(
    injection: Injection,
) -> tuple[Float[Tensor, "layers sublayers d"], Float[Tensor, "layers sublayers"]]:
    """Return ``lambda * v``, added to each sublayer's output, and beta, which scales it; in float32."""
    edit = injection.affine_edit()
    return edit.shift.float().cpu(), edit.scale.float().cpu()


def fold(decoder: Decoder, injection: Injection) -> PreTrainedModel:
    """Return a plain transformers model that computes what the injected one does, without hooks.

    The result is a new model in evaluation mode on the same device, in the same dtype; some model types
    become another type that computes the same. With word-level scoring, the logit of a label's first token is
    the label's score. A label prior and a temperature are left out.

    Raises:
        I2CLError: if the model type or the injection cannot be folded.
    """
    model = Folding(decoder, injection, force=True).build(AutoModelForCausalLM)
    model.generation_config = copy.deepcopy(decoder.model.generation_config)
    return cast("PreTrainedModel", model.to(decoder.model.device))


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without memory for its weights, which has their names and shapes."""
    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))


def lm_head_name(model: PreTrainedModel) -> str:
    """Return the name of the LM head."""
    head = model.get_output_embeddings()
    return next(str(name) for name, module in model.named_modules() if module is head)


def require_exportable(decoder: Decoder, injection: Injection, *, multi_label: bool = False) -> LabelTokens:
    """Return the label tokens that an export scores.

    Raises I2CLError if the model or the injection cannot be folded, the injection scores full label
    sequences, or its task is a multi-label task and the export does not support these.
    """
    if not multi_label:
        require_single_label(injection)
    if decoder.architecture != ARCHITECTURES.get(decoder.architecture.model_type):
        raise I2CLError(f"a custom Architecture cannot be folded into weights: {USE_HOOKS}")
    _require_plain(decoder.model.config)
    require_foldable(injection)
    labels = injection.scorer(decoder).labels
    if labels.full_sequences:
        problem = "this injection scores full label sequences, but an export scores only the next token"
        raise I2CLError(f"{problem}: fit it again with scoring='words', or {USE_HOOKS}")
    return labels


def require_single_label(injection: Injection) -> None:
    """Raise I2CLError if the task is a multi-label task, for exports that do not support these."""
    injection.task.require_single_label("this export", "export a text classifier (--to classifier)")


def _require_plain(config: PreTrainedConfig) -> None:
    """Raise I2CLError if a model is a part of another one, or quantized."""
    if config.get_text_config() is not config:
        raise multimodal_refusal(config.model_type)
    if method := quantization_of(config):
        hint = "export from its unquantized checkpoint (--model FOLDER), then quantize the export"
        raise I2CLError(f"a quantized model ({method}) cannot be folded: {hint}")


def require_foldable(injection: Injection) -> None:
    """Raise I2CLError if an injection is not a constant added to sublayer outputs at all positions, or was
    fitted without the LLM.
    """
    injection.require_llm()
    if injection.extraction.hook_point != "sublayers":
        hint = f"fit it with --set sublayers=both, or {USE_HOOKS}"
        raise I2CLError(
            f"an injection into block outputs (sublayers=hidden) is not a bias of a layer: {hint}"
        )
    if injection.positions != "all":
        problem = f"a bias acts on all tokens, this injection on positions {injection.positions!r}"
        raise I2CLError(f"{problem}: fit one with positions 'all', or {USE_HOOKS}")
