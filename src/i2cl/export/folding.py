"""Injection into weights: one rule per tensor, for a model in memory and for files alike."""

import copy
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export.families import HOOKED, Linear, family_of
from i2cl.models.architectures import ARCHITECTURES
from i2cl.models.checkpoint import CheckpointFiles
from i2cl.models.decoder import Decoder
from i2cl.models.encoding import Encoder, LabelTokens, label_tokens
from i2cl.models.fingerprint import named_weights, tensors_fingerprint
from i2cl.models.precision import quantization_of


class StateDict:
    """The weights of a model in memory, not to be changed. Raises I2CLError if some are offloaded."""

    def __init__(self, model: PreTrainedModel) -> None:
        state: dict[str, Tensor] = model.state_dict()
        if any(tensor.is_meta for tensor in state.values()):
            raise I2CLError("parts of this model are not in memory: fold its folder with export_hf instead")
        self.names: AbstractSet[str] = state.keys()
        self.read = state.__getitem__  # one by its name, on its device


Tensors = StateDict | CheckpointFiles  # the weights of a model, wherever they are


class Folding:
    """What every tensor of the folded checkpoint is."""

    def __init__(
        self,
        config: PreTrainedConfig,
        source: Tensors,
        injection: Injection,
        tokenizer: PreTrainedTokenizerBase | None = None,
        temperature: float = 1.0,
    ) -> None:
        require_plain(injection)
        self.family = family_of(config)
        self.config = self.family.config(config)  # of the result
        # whose words the head has to tell
        self.labels = None if tokenizer is None else words_of(injection, tokenizer)
        if temperature != 1 or self.labels is not None:
            self.config.tie_word_embeddings = False  # the head changes, and the embedding does not
        self.source = source  # the weights it is made from
        self.source_config = config
        empty, self._nothing = skeleton(self.config), skeleton(config)
        self._source_names = self._nothing.state_dict().keys()
        tied = empty.all_tied_weights_keys
        # of the tensors of the result, without those that are tied to another
        self.shapes = {name: tensor.shape for name, tensor in empty.state_dict().items() if name not in tied}
        # what each writer's bias gains, ``lambda * v`` in float32, by the name of the bias
        self.constants: dict[str, Float[Tensor, " d"]] = {}
        self.scales: dict[str, float] = {}  # beta by the names of the tensors that it multiplies
        self._place(injection, f"{empty.base_model_prefix}.{ARCHITECTURES[config.model_type].layers}")
        self.head: tuple[str, ...] = ()  # tensors whose rows are tokens, if the head changes
        if temperature != 1 or self.labels is not None:
            self._change_head(empty, temperature)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of new biases: that of the weights beside them."""
        return self._source_tensor(min(name for name in self.scales if name.endswith(".weight"))).dtype

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor of the result, a new one where it is not the source's own.
        ``name``: in the state dict of the result; ``dtype``: what it is rounded to, once; default: the
        source's own. Raises I2CLError if the source lacks a tensor.
        """
        source, change = self.family.piece(name, self.source_config)
        new = source not in self._source_names
        value = torch.zeros(self.shapes[name], dtype=self.dtype) if new else self._source_tensor(source)
        value = value if change is None else change(value)
        if value.shape != self.shapes[name]:
            shapes = f"{tuple(value.shape)}, and not {tuple(self.shapes[name])}"
            raise I2CLError(f"the source holds {source} as {shapes}: it is of another model")
        folded = value
        if name in self.head and self.labels is not None:
            folded = self.labels.at_first(value.float().movedim(0, -1)).movedim(-1, 0)
        if name in self.scales:
            folded = folded.float() * self.scales[name]
        if name in self.constants:
            folded = folded + self.constants[name].to(folded.device)
        return folded.to(dtype or value.dtype)

    def stored(self, name: str) -> str:
        """What files call a tensor of the result."""
        return name if self.family.target else name.replace("lm_head.", f"{self.family.head}.")

    def fingerprint(self) -> str:
        """That of the source's weights (see `i2cl.models.fingerprint.weights_fingerprint`)."""
        names = [name for name, _ in named_weights(self._nothing)]
        return tensors_fingerprint((name, self._source_tensor(name)) for name in names)

    def bias_norms(self) -> dict[str, float]:
        """L2 norm of every bias that holds a constant, as it is written."""
        return {name: float(self.tensor(name).float().norm()) for name in self.constants}

    def _source_tensor(self, name: str) -> Tensor:
        if name not in self.source.names:
            name = self._nothing.all_tied_weights_keys.get(name, name)
        if name not in self.source.names:
            cure = "it is incomplete, or of an older format (load and save it again)"
            raise I2CLError(f"the source lacks {name}: {cure}")
        return self.source.read(name)

    def _change_head(self, empty: PreTrainedModel, temperature: float) -> None:
        head = next(name for name, one in empty.named_modules() if one is empty.get_output_embeddings())
        if f"{head}.weight" not in self.shapes:
            what, cure = "no temperature can be folded into it", "leave out --temperature"
            if self.labels is not None:
                what, cure = "its labels' words cannot be folded into it", HOOKED
            raise I2CLError(
                f"a {self.config.model_type!r} model ties its head to its embedding, so that {what}: {cure}"
            )
        names = (f"{head}.weight", f"{head}.bias")
        self.head = tuple(name for name in names if name in self.shapes)
        if temperature != 1:
            self.scales |= dict.fromkeys(self.head, 1 / temperature)

    def _place(self, injection: Injection, layers: str) -> None:
        """Fill `constants` and `scales`."""
        added, scales = added_and_kept(injection)
        shape = (self.config.num_hidden_layers, self.config.hidden_size)
        if (mine := (added.shape[0], added.shape[2])) != shape:
            problem = f"this injection is for (layers, width) {mine}, the model has {shape}"
            raise I2CLError(f"{problem}: fit it again")
        paths = (_names(self.family.attention), _names(self.family.mlp))
        for layer, kept in enumerate(scales.tolist()):
            for site, path in enumerate(paths):
                home = {"attention": paths[0], "mlp": paths[1]}.get(self.family.joint, path)
                bias = f"{layers}.{layer}.{home[-1]}"
                if bias not in self.shapes:
                    raise I2CLError(f"{self.config.model_type!r} has no tensor {bias}: {HOOKED}")
                self.constants[bias] = self.constants.get(bias, torch.zeros(shape[1])) + added[layer, site]
                target = path if home == path else path[:-1]
                self.scales |= {f"{layers}.{layer}.{name}": kept[site] for name in target}


def added_and_kept(
    injection: Injection,
) -> tuple[Float[Tensor, "layers writers d"], Float[Tensor, "layers writers"]]:
    """What each writer is given, ``lambda * v``, and how much it keeps of its own, beta: in float32."""
    amounts, kept = injection.coefficients.float().cpu().unbind(-1)
    return amounts[..., None] * injection.context.values.float().cpu(), kept


def at_temperature(injection: Injection) -> Injection:
    """What an injection is to a model whose logits are divided by its temperature already."""
    bias = injection.label_bias and tuple(value / injection.temperature for value in injection.label_bias)
    return replace(injection, label_bias=bias, temperature=1.0)


def fold(model: Decoder | PreTrainedModel, injection: Injection) -> PreTrainedModel:
    """A plain transformers model that computes what the injected one does, without hooks.
    The result is a new model in evaluation mode on the same device; some families become another that
    computes the same. The source is not changed. Arithmetic is in float32, the result has the source's dtype.
    Labels that are scored by their words are so by their first tokens in the result's head. Raises I2CLError
    if the family or the injection cannot be folded, saying why and what to do instead.
    """
    tokenizer = None
    if isinstance(model, Decoder):
        require_known(model)
        tokenizer, model = model.tokenizer, model.model
    require_unquantized(model.config)
    require_unbiased(injection)
    if tokenizer is None and injection.scoring == "words":
        raise I2CLError("labels scored by their words take a tokenizer to find: give a Decoder of the model")
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


def _names(linear: Linear) -> tuple[str, ...]:
    return (f"{linear}.weight", f"{linear}.bias") if isinstance(linear, str) else linear


def skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    """A model without weights, which knows their names and shapes."""
    with torch.device("meta"):
        return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))


def require_known(decoder: Decoder) -> None:
    """Refuse a decoder whose writers are not those of the table. Raises I2CLError, saying so."""
    if decoder.architecture != ARCHITECTURES.get(decoder.architecture.model_type):
        raise I2CLError(f"an Architecture of your own cannot be folded into weights: {HOOKED}")


def require_unquantized(config: PreTrainedConfig) -> None:
    """Refuse (I2CLError) weights that are no plain numbers: beta would have to be folded into their codes."""
    if method := quantization_of(config):
        cure = "export from its unquantized checkpoint (--model FOLDER), then quantize the export"
        raise I2CLError(f"a quantized model ({method}) cannot be folded: {cure}")


def require_plain(injection: Injection) -> None:
    """Refuse an injection that is no bias of the residual writers. Raises I2CLError with a cure."""
    if injection.context.config.site != "writers":
        cure = f"fit one with writers 'both', or {HOOKED}"
        raise I2CLError(f"an injection into block outputs (writers 'hidden') is no bias of a writer: {cure}")
    if injection.encoder_bias is not None:
        what = "weights hold no sentence encoder, and this injection takes one"
        raise I2CLError(f"{what}: fit it with --method anchored, or {HOOKED}")
    if injection.positions != "all":
        what = f"a bias acts on all tokens, this injection on positions {injection.positions!r}"
        raise I2CLError(f"{what}: fit one with positions 'all', or {HOOKED}")


def words_of(injection: Injection, tokenizer: PreTrainedTokenizerBase) -> LabelTokens | None:
    """The labels' tokens of an injection that scores labels by their words; else None."""
    if injection.scoring != "words":
        return None
    task, weights = injection.task, injection.word_weights
    labels = label_tokens(Encoder.of(tokenizer), task.template, task.labels, "words")
    return labels if weights is None else labels.weighted(weights)


def require_named(injection: Injection, *, named: bool) -> None:
    """Refuse (I2CLError) to export labels that tokens stand for where nothing names these tokens."""
    if injection.scoring == "words" and not named:
        raise I2CLError("a token stands for each label, which the golden values name: leave out --no-golden")


def require_unbiased(injection: Injection) -> None:
    """Refuse a label prior where nothing can hold one. Raises I2CLError, saying what else to do."""
    if injection.label_bias is not None:
        raise I2CLError(
            "a label prior is added to label scores, which weights do not hold: leave it out with "
            "--drop-prior (in Python: without_label_prior) and send its numbers as logit_bias, export --to "
            f"hf, whose generation config holds it, or {HOOKED}"
        )
