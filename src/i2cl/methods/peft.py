"""Parameter-efficient fine-tuning on the demonstrations with the PEFT library.

Source: paper, appendix "Implementation of Baseline Methods".
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from i2cl.errors import I2CLError, require_utf8
from i2cl.methods import adapters
from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.prefix import caches_only_keys_and_values

if TYPE_CHECKING:
    from peft import PeftConfig


class LoRASettings(adapters.AdapterSettings):
    """Defaults are the paper's: rank 8, alpha 32, dropout 0.05."""

    lora_rank: int = Field(8, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.05, ge=0, lt=1)


class VirtualTokenSettings(adapters.AdapterSettings):
    """Defaults are the paper's: one virtual token (per layer for prefix tuning), learning rate 0.1."""

    lr: float = Field(0.1, gt=0)  # initial learning rate of AdamW
    virtual_tokens: int = Field(1, ge=1)  # number of virtual tokens
    # Initialize with the tokens of this text, repeated as needed; random if empty. Li and Liang and Lester et
    # al. both find that initializing with words works better
    start_text: str = ""


@dataclass(frozen=True)
class LoRA(adapters.AdapterMethod):
    """LoRA on query and value projections; a fused query-key-value projection is adapted as a whole.

    Source: Hu et al. 2022, https://arxiv.org/abs/2106.09685.
    """

    name = "lora"
    summary = "low-rank updates of query and value projections"
    settings = (LoRASettings,)
    training: LoRASettings = field(default_factory=LoRASettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Return the configuration, with the names that this model family uses."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.training.lora_rank,
            lora_alpha=self.training.lora_alpha,
            lora_dropout=self.training.lora_dropout,
            target_modules=adapters.attention_targets(decoder),
            fan_in_fan_out=adapters.has_transposed_weights(decoder),
        )


@dataclass(frozen=True)
class IA3(adapters.AdapterMethod):
    """IA3 on query, value and MLP activations; a fused query-key-value projection is scaled as a whole.

    Source: Liu et al. 2022, https://arxiv.org/abs/2205.05638, who scale keys and values; the I2CL paper says
    queries and values.
    """

    name = "ia3"
    summary = "learned scaling of query, value and feed-forward activations"
    settings = (adapters.AdapterSettings,)
    training: adapters.AdapterSettings = field(default_factory=adapters.AdapterSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Return the configuration, with explicit names: PEFT's defaults differ between model families."""
        from peft import IA3Config

        feed_forward = adapters.feed_forward_targets(decoder)
        return IA3Config(
            target_modules=adapters.attention_targets(decoder) + feed_forward,
            feedforward_modules=feed_forward,
            fan_in_fan_out=adapters.has_transposed_weights(decoder),
        )


class VirtualTokenMethod(adapters.AdapterMethod):
    """Trains virtual tokens that precede the query."""

    kind: ClassVar[str]
    training: VirtualTokenSettings

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Return the configuration, with explicit sizes: PEFT does not find them in all model families.

        Raises:
            I2CLError: if the virtual tokens fill the context, or as `shape`.
        """
        import peft

        count, limit = self.training.virtual_tokens, decoder.max_length
        if limit is not None and count >= limit:
            raise I2CLError(f"virtual_tokens is {count}, but the context holds {limit} tokens: use fewer")
        heads, width = self.shape(decoder)
        config: PeftConfig = getattr(peft, self.kind)(
            task_type="CAUSAL_LM",
            num_virtual_tokens=count,
            num_layers=decoder.layers,
            num_attention_heads=heads,
            token_dim=heads * width,
        )
        return config

    @abstractmethod
    def shape(self, decoder: Decoder) -> tuple[int, int]:
        """Return the number of heads and the width per head of the trained embeddings."""

    def start(self, decoder: Decoder) -> dict[str, Tensor] | None:
        """Return the embeddings of ``start_text``, if there is one.

        Raises:
            I2CLError: if the text has no tokens.
        """
        text = self.training.start_text
        if not text:
            return None
        require_utf8(text, "start_text")
        ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise I2CLError(f"start_text {text!r} has no tokens: give a longer text")
        tokens = tuple(islice(cycle(ids), self.training.virtual_tokens))
        return {"prompt_embeddings": self.embeddings(decoder, tokens)}

    @abstractmethod
    def embeddings(self, decoder: Decoder, ids: Ids) -> Float[Tensor, "tokens numbers"]:
        """Return the values that the virtual tokens start from."""


@dataclass(frozen=True)
class PromptTuning(VirtualTokenMethod):
    """Virtual tokens at the input only, initialized at random unless a text is given.

    Source: Lester et al. 2021, https://arxiv.org/abs/2104.08691. The I2CL paper's 4.10K parameters are one
    token of width 4096.
    """

    name = "prompt_tuning"
    summary = "learned token embedding in front of the query"
    kind = "PromptTuningConfig"
    settings = (VirtualTokenSettings,)
    training: VirtualTokenSettings = field(default_factory=VirtualTokenSettings)

    def shape(self, decoder: Decoder) -> tuple[int, int]:
        """Return one head of the embedding width; PEFT only uses their product."""
        return 1, decoder.embed((0,)).shape[-1]

    def embeddings(self, decoder: Decoder, ids: Ids) -> Float[Tensor, "tokens d"]:
        """Return the input embeddings of tokens, in float32 on the CPU."""
        return decoder.embed(ids).float().cpu()


@dataclass(frozen=True)
class PrefixTuning(VirtualTokenMethod):
    """Virtual tokens in every layer, trained directly without a reparametrization network.

    Source: Li and Liang 2021, https://arxiv.org/abs/2101.00190. This is what the I2CL paper's text calls
    prompt tuning ("one extra learnable token per layer"), although its parameter count contradicts it.
    """

    name = "prefix_tuning"
    summary = "learned key and value of a virtual token in every layer"
    kind = "PrefixTuningConfig"
    settings = (VirtualTokenSettings,)
    training: VirtualTokenSettings = field(default_factory=VirtualTokenSettings)

    def shape(self, decoder: Decoder) -> tuple[int, int]:
        """Return the number and width of key-value heads.

        Raises:
            I2CLError: if they differ between layers, or the model caches more than keys and values.
        """
        config = decoder.model.config
        tensors = self.cached(decoder, (0,)) if caches_only_keys_and_values(config) else []
        shapes = {(tensor.shape[0], tensor.shape[2]) for tensor in tensors}
        if len(tensors) == 2 * decoder.layers and len(shapes) == 1:
            ((heads, width),) = shapes
            # PEFT uses these config fields, where a model has them, instead of the sizes that it is given
            known = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
            if known[0] in {None, heads} and (known[0] is None or known[1] in {None, width}):
                return heads, width
        raise I2CLError(
            f"{self.name} does not support {config.model_type!r}, whose layers do not all cache keys and "
            "values of one shape: use lora or prompt_tuning"
        )

    def cached(self, decoder: Decoder, ids: Ids) -> list[Float[Tensor, "heads tokens width"]]:
        """Return the keys and values of tokens at the first positions, layer by layer."""
        cache: Any = decoder.prefix(ids).cache
        return [tensor[0].float().cpu() for layer in cache.layers for tensor in (layer.keys, layer.values)]

    def embeddings(self, decoder: Decoder, ids: Ids) -> Float[Tensor, "tokens numbers"]:
        """Return the keys and values of tokens at the first positions, in PEFT's order.

        Raises:
            I2CLError: if a sliding window is shorter than the tokens.
        """
        tensors = self.cached(decoder, ids)
        if any(tensor.shape[1] != len(ids) for tensor in tensors):
            limit = f"some layers attend to only {decoder.window} tokens"
            raise I2CLError(f"virtual_tokens is {len(ids)}, but {limit}: use fewer")
        return torch.stack(tensors).permute(2, 0, 1, 3).flatten(1)
