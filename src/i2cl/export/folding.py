"""Fold an injection into the weights of a model: one rule per tensor, for models in memory and on disk."""

import copy
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export.families import USE_HOOKS, Linear, family_of
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.checkpoint import CheckpointFiles
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Encoder, LabelTokens, label_tokens
from i2cl.models.fingerprint import named_weights, tensors_fingerprint
from i2cl.models.precision import quantization_of


class StateDict:
    """The weights of a model in memory, read-only. Raises I2CLError if some are offloaded."""

    def __init__(self, model: PreTrainedModel) -> None:
        state: dict[str, Tensor] = model.state_dict()
        if any(tensor.is_meta for tensor in state.values()):
            raise I2CLError("parts of this model are not in memory: export it by its name or folder instead")
        self.names: AbstractSet[str] = state.keys()
        self.read = state.__getitem__  # returns one tensor by its name, on its device


Weights = StateDict | CheckpointFiles


class Folding:
    """The tensors of a folded model, each computed when it is read.

    Args:
        config: of the base model.
        source: weights of the base model.
        injection: fitted task.
        tokenizer: of the base model; needed to fold word-level scoring into the LM head.

    Attributes:
        config: of the folded model.
        shapes: of its tensors, without tied ones.
        constants: what is added to biases (``lambda * v``, in float32), by the name of the bias.
        scales: beta, by the names of the tensors that it multiplies.
        head: names of the LM head's tensors, if word-level scoring changes its rows.

    Raises:
        I2CLError: if the model type or the injection cannot be folded.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        source: Weights,
        injection: Injection,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        require_foldable(injection)
        self.family = family_of(config)
        self.config = self.family.config(config)
        self.labels: LabelTokens | None = None
        if tokenizer is not None and injection.scoring == "words":
            self.labels = label_tokens_of(injection, tokenizer)
            self.config.tie_word_embeddings = False  # the head changes, the embedding does not
        self.source = source
        self.source_config = config
        empty, self._empty_source = skeleton(self.config), skeleton(config)
        self._source_names = self._empty_source.state_dict().keys()
        tied = empty.all_tied_weights_keys
        self.shapes = {name: tensor.shape for name, tensor in empty.state_dict().items() if name not in tied}
        self.constants: dict[str, Float[Tensor, " d"]] = {}
        self.scales: dict[str, float] = {}
        self._fold(injection, f"{empty.base_model_prefix}.{ARCHITECTURES[config.model_type].layers}")
        self.head: tuple[str, ...] = () if self.labels is None else self._head_names(empty)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the folded weights."""
        return self._read(min(name for name in self.scales if name.endswith(".weight"))).dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Compute one tensor of the folded model in float32, and round it once.

        Args:
            name: in the state dict of the folded model.
            dtype: of the result; default: the source's.

        Raises:
            I2CLError: if the source does not have the tensor it is made from, or in another shape.
        """
        source, transform = self.family.piece(name, self.source_config)
        new = source not in self._source_names
        value = torch.zeros(self.shapes[name], dtype=self.dtype) if new else self._read(source)
        value = value if transform is None else transform(value)
        if value.shape != self.shapes[name]:
            shapes = f"{tuple(value.shape)} instead of {tuple(self.shapes[name])}"
            raise I2CLError(f"{source} has the shape {shapes}: these weights are of another model")
        folded = value
        if name in self.head and self.labels is not None:
            folded = self.labels.at_first(value.float().movedim(0, -1)).movedim(-1, 0)
        if name in self.scales:
            folded = folded.float() * self.scales[name]
        if name in self.constants:
            folded = folded + self.constants[name].to(folded.device)
        return folded.to(dtype or value.dtype)

    def stored_name(self, name: str) -> str:
        """Return the name of a tensor in files."""
        return name if self.family.target else name.replace("lm_head.", f"{self.family.head}.")

    def fingerprint(self) -> str:
        """Return the fingerprint of the source (see `i2cl.models.fingerprint.weights_fingerprint`)."""
        names = [name for name, _ in named_weights(self._empty_source)]
        return tensors_fingerprint((name, self._read(name)) for name in names)

    def nonzero_biases(self) -> list[str]:
        """Return the names of the bias tensors that hold a part of the injection."""
        return [name for name in self.constants if self.tensor(name).any()]

    def _read(self, name: str) -> Tensor:
        if name not in self.source.names:
            name = self._empty_source.all_tied_weights_keys.get(name, name)
        if name not in self.source.names:
            hint = "it is incomplete, or of an older format (load and save it again)"
            raise I2CLError(f"the base model has no tensor {name}: {hint}")
        return self.source.read(name)

    def _head_names(self, empty: PreTrainedModel) -> tuple[str, ...]:
        head = next(name for name, one in empty.named_modules() if one is empty.get_output_embeddings())
        if f"{head}.weight" not in self.shapes:
            kind = self.config.model_type
            what = (
                f"a {kind!r} model ties its LM head to its embedding, which word-level scoring would change"
            )
            raise I2CLError(f"{what}: export with --to classifier, or {USE_HOOKS}")
        return tuple(name for name in (f"{head}.weight", f"{head}.bias") if name in self.shapes)

    def _fold(self, injection: Injection, layers: str) -> None:
        """Fill `constants` and `scales`."""
        added, scales = added_and_scales(injection)
        shape = (self.config.num_hidden_layers, self.config.hidden_size)
        if (own := (added.shape[0], added.shape[2])) != shape:
            problem = f"this injection is for (layers, width) {own}, the model has {shape}"
            raise I2CLError(f"{problem}: fit it again")
        paths = (_tensor_names(self.family.attention), _tensor_names(self.family.mlp))
        for layer, betas in enumerate(scales.tolist()):
            for sublayer, path in enumerate(paths):
                home = {"attention": paths[0], "mlp": paths[1]}.get(self.family.joint, path)
                bias = f"{layers}.{layer}.{home[-1]}"
                if bias not in self.shapes:
                    raise I2CLError(f"{self.config.model_type!r} has no tensor {bias}: {USE_HOOKS}")
                previous = self.constants.get(bias, torch.zeros(shape[1]))
                self.constants[bias] = previous + added[layer, sublayer]
                scaled = path if home == path else path[:-1]
                self.scales |= {f"{layers}.{layer}.{name}": betas[sublayer] for name in scaled}


def added_and_scales(
    injection: Injection,
) -> tuple[Float[Tensor, "layers sublayers d"], Float[Tensor, "layers sublayers"]]:
    """Return ``lambda * v``, added to each sublayer's output, and beta, which scales it; in float32."""
    edit = injection.affine_edit()
    return edit.shift.float().cpu(), edit.scale.float().cpu()


def fold(model: Decoder | PreTrainedModel, injection: Injection) -> PreTrainedModel:
    """Return a plain transformers model that computes what the injected one does, without hooks.

    The result is a new model in evaluation mode on the same device, in the source's dtype; some model types
    become another type that computes the same. The source is not changed. With word-level scoring, the
    result's logit of a label's first token is the label's score.

    Raises:
        I2CLError: if the model type or the injection cannot be folded, or has a label prior.
    """
    tokenizer = None
    if isinstance(model, Decoder):
        require_known_architecture(model)
        tokenizer, model = model.tokenizer, model.model
    require_unquantized(model.config)
    if injection.label_bias is not None:
        what = "a folded model has no place for a label prior"
        raise I2CLError(f"{what}: fold without_label_prior(injection), or use export_classifier")
    if tokenizer is None and injection.scoring == "words":
        raise I2CLError("word-level scoring needs the tokenizer: pass a Decoder instead of a model")
    folding = Folding(model.config, StateDict(model), injection, tokenizer)
    with no_init_weights():
        made: Any = AutoModelForCausalLM.from_config(folding.config, dtype=folding.dtype)
    with torch.no_grad():
        state = made.state_dict()
        for name in folding.shapes:
            state[name].copy_(folding.tensor(name))
    made.tie_weights()
    made.generation_config = copy.deepcopy(model.generation_config)
    return cast("PreTrainedModel", made.to(model.device).eval())


def _tensor_names(linear: Linear) -> tuple[str, ...]:
    return (f"{linear}.weight", f"{linear}.bias") if isinstance(linear, str) else linear


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model without memory for its weights, which has their names and shapes."""
    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))


def label_tokens_of(injection: Injection, tokenizer: PreTrainedTokenizerBase) -> LabelTokens:
    """Return the label tokens that an injection scores."""
    task, weights = injection.task, injection.word_weights
    labels = label_tokens(Encoder.of(tokenizer), task.template, task.labels, injection.scoring)
    return labels if weights is None else labels.weighted(weights)


def require_known_architecture(decoder: Decoder) -> None:
    """Raise I2CLError if the architecture of a decoder is not the registered one."""
    if decoder.architecture != ARCHITECTURES.get(decoder.architecture.model_type):
        raise I2CLError(f"a custom Architecture cannot be folded into weights: {USE_HOOKS}")


def require_unquantized(config: PreTrainedConfig) -> None:
    """Raise I2CLError if weights are quantized: beta would have to be folded into their codes."""
    if method := quantization_of(config):
        hint = "export from its unquantized checkpoint (--model FOLDER), then quantize the export"
        raise I2CLError(f"a quantized model ({method}) cannot be folded: {hint}")


def require_foldable(injection: Injection) -> None:
    """Raise I2CLError if an injection is not a constant added to sublayer outputs at all positions."""
    if injection.context.config.site != "writers":
        hint = f"fit one with writers 'both', or {USE_HOOKS}"
        raise I2CLError(
            f"an injection into block outputs (writers 'hidden') is not a bias of a layer: {hint}"
        )
    if injection.encoder_bias is not None:
        what = "this injection uses a sentence encoder, which weights cannot hold"
        raise I2CLError(f"{what}: fit it with --method anchored, or {USE_HOOKS}")
    if injection.positions != "all":
        what = f"a bias acts on all tokens, this injection on positions {injection.positions!r}"
        raise I2CLError(f"{what}: fit one with positions 'all', or {USE_HOOKS}")
