"""Parameter-efficient fine-tuning on the demonstrations: four adapters of the PEFT library.

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
from i2cl.models.prefix import holds_keys_alone

if TYPE_CHECKING:
    from peft import PeftConfig


class LoRASettings(adapters.AdapterSettings):
    """The paper's: rank 8, alpha 32, dropout 0.05."""

    lora_rank: int = Field(8, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.05, ge=0, lt=1)


class VirtualTokenSettings(adapters.AdapterSettings):
    """The paper's: one virtual token (in every layer, if in layers), learning rate 0.1."""

    lr: float = Field(0.1, gt=0)  # first learning rate of AdamW
    virtual_tokens: int = Field(1, ge=1)  # how many
    # they start as the tokens of this text, again and again from its first on; drawn at random if empty. Li
    # and Liang and Lester et al. both find that real words are the better start
    start_text: str = ""


@dataclass(frozen=True)
class LoRA(adapters.AdapterMethod):
    """Adapts a fused query, key and value whole. Source: Hu et al. 2022, https://arxiv.org/abs/2106.09685."""

    name: ClassVar[str] = "lora"
    summary: ClassVar[str] = "low-rank changes of query and value projections"
    row: ClassVar[str] = "LoRA"
    settings = (LoRASettings,)
    training: LoRASettings = field(default_factory=LoRASettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Targets by name, as they are called in this family."""
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
    """Where query, key and value are one projection, all three are scaled. Source: Liu et al. 2022,
    https://arxiv.org/abs/2205.05638 (there keys and values are scaled, in the paper queries and values).
    """

    name: ClassVar[str] = "ia3"
    summary: ClassVar[str] = "scales of query, value and feed-forward activations"
    row: ClassVar[str] = "IA3"
    settings = (adapters.AdapterSettings,)
    training: adapters.AdapterSettings = field(default_factory=adapters.AdapterSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Targets by name: PEFT's own table differs from family to family."""
        from peft import IA3Config

        feed_forward = adapters.feed_forward_targets(decoder)
        return IA3Config(
            target_modules=adapters.attention_targets(decoder) + feed_forward,
            feedforward_modules=feed_forward,
            fan_in_fan_out=adapters.has_transposed_weights(decoder),
        )


class VirtualTokenMethod(adapters.AdapterMethod):
    """Trains virtual tokens in front of the query."""

    kind: ClassVar[str]
    training: VirtualTokenSettings

    def config(self, decoder: Decoder) -> "PeftConfig":
        """PEFT is told a model's sizes, whose names it does not know in every family.
        Raises I2CLError on virtual tokens that leave a query no place, or a model that caches other things.
        """
        import peft

        count, most = self.training.virtual_tokens, decoder.max_length
        if most is not None and count >= most:
            raise I2CLError(f"virtual_tokens is {count}, but the context holds {most} tokens: take fewer")
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
        """Heads and their width, of what is trained."""

    def start(self, decoder: Decoder) -> dict[str, Tensor] | None:
        """What the tokens of `start_text` are to the model; raises I2CLError on a text without any."""
        text = self.training.start_text
        if not text:
            return None
        require_utf8(text, "start_text")
        ids = decoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise I2CLError(f"start_text {text!r} has no token: give a longer one")
        tokens = tuple(islice(cycle(ids), self.training.virtual_tokens))
        return {"prompt_embeddings": self.embeddings(decoder, tokens)}

    @abstractmethod
    def embeddings(self, decoder: Decoder, ids: Ids) -> Float[Tensor, "tokens numbers"]:
        """The numbers that stand for these tokens."""


@dataclass(frozen=True)
class PromptTuning(VirtualTokenMethod):
    """Virtual tokens at the input only, from a random start unless a text is given. Source: Lester et al.
    2021, https://arxiv.org/abs/2104.08691 (the paper's 4.10K parameters are one token at width 4096).
    """

    name: ClassVar[str] = "prompt_tuning"
    summary: ClassVar[str] = "learned token embedding in front of the query"
    row: ClassVar[str] = "Soft-prompt / Prompt-tuning"
    kind: ClassVar[str] = "PromptTuningConfig"
    settings = (VirtualTokenSettings,)
    training: VirtualTokenSettings = field(default_factory=VirtualTokenSettings)

    def shape(self, decoder: Decoder) -> tuple[int, int]:
        """Heads are asked for, and not used."""
        return 1, decoder.embed((0,)).shape[-1]

    def embeddings(self, decoder: Decoder, ids: Ids) -> Float[Tensor, "tokens d"]:
        """Input embeddings."""
        return decoder.embed(ids).float().cpu()


@dataclass(frozen=True)
class PrefixTuning(VirtualTokenMethod):
    """Virtual tokens in every layer, trained directly without a reparametrising network.
    Source: Li and Liang 2021, https://arxiv.org/abs/2101.00190. It is the paper's text on prompt tuning ("one
    extra learnable token per layer"), which its parameter count contradicts.
    """

    name: ClassVar[str] = "prefix_tuning"
    summary: ClassVar[str] = "learned key and value of a virtual token in every layer"
    row: ClassVar[str] = "Prompt-tuning (as the text has it)"
    kind: ClassVar[str] = "PrefixTuningConfig"
    settings = (VirtualTokenSettings,)
    training: VirtualTokenSettings = field(default_factory=VirtualTokenSettings)

    def shape(self, decoder: Decoder) -> tuple[int, int]:
        """Of the keys and values of every layer; raises I2CLError where they differ, or more is cached."""
        held = self.cached(decoder, (0,)) if holds_keys_alone(decoder.model.config) else []
        shapes = {(each.shape[0], each.shape[2]) for each in held}
        config = decoder.model.config
        if len(held) == 2 * decoder.layers and len(shapes) == 1:
            ((heads, width),) = shapes
            known = getattr(config, "num_key_value_heads", None), getattr(config, "head_dim", None)
            if known[0] in {None, heads} and (known[0] is None or known[1] in {None, width}):
                return heads, width  # PEFT asks these names, where a model has them
        cure = "its layers do not all cache keys and values of one shape; take lora or prompt_tuning"
        raise I2CLError(f"{self.name} cannot run on {config.model_type!r}: {cure}")

    def cached(self, decoder: Decoder, ids: Ids) -> list[Float[Tensor, "heads tokens width"]]:
        """Keys and values of some tokens at the first positions, layer by layer."""
        cache: Any = decoder.prefix(ids).cache
        return [held[0].float().cpu() for layer in cache.layers for held in (layer.keys, layer.values)]

    def embeddings(self, decoder: Decoder, ids: Ids) -> Float[Tensor, "tokens numbers"]:
        """Keys and values at the first places, in PEFT's order; raises I2CLError if a window keeps fewer."""
        held = self.cached(decoder, ids)
        if any(each.shape[1] != len(ids) for each in held):
            most = f"some layers see only {decoder.window} tokens at a time"
            raise I2CLError(f"virtual_tokens is {len(ids)}, but {most}: take fewer")
        return torch.stack(held).permute(2, 0, 1, 3).flatten(1)
