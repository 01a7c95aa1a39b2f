"""Parameter-efficient fine-tuning on the demonstrations: four adapters of the PEFT library.

Source: paper, appendix "Implementation of Baseline Methods", and of each:

- `LoRA`, low-rank changes of the query and value projections: Hu et al. 2022,
  https://arxiv.org/abs/2106.09685.
- `IA3`, learned scales of queries, values and the feed-forward layer's inner activations: Liu et al.
  2022, https://arxiv.org/abs/2205.05638 (there keys and values are scaled, in the paper queries and values).
- `PromptTuning`, learned token embeddings in front of the query: Lester et al. 2021,
  https://arxiv.org/abs/2104.08691 (the paper's 4.10K parameters are one token at width 4096).
- `PrefixTuning`, learned keys and values of virtual tokens in every layer: Li and Liang 2021,
  https://arxiv.org/abs/2101.00190. It is the paper's text on prompt tuning ("one extra learnable token
  per layer"), which its parameter count contradicts.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from i2cl.errors import needs
from i2cl.methods.adapters import (
    AdapterPredictor,
    attention_targets,
    feed_forward_targets,
    fit_adapter,
    has_transposed_weights,
)
from i2cl.methods.base import Method
from i2cl.models.decoder import Decoder
from i2cl.models.training import TrainConfig
from i2cl.tasks import Example, Task

if TYPE_CHECKING:
    from peft import PeftConfig


class AdapterMethod(Method):
    """Trains an adapter on the demonstrations as single queries, with the schedule of the paper."""

    needs: ClassVar[str] = "demonstrations, the package peft"
    formula: ClassVar[str] = "as trained"
    training: TrainConfig

    @abstractmethod
    def config(self, decoder: Decoder) -> "PeftConfig":
        """The adapter for this model.

        Raises:
            I2CLError: if the model has nothing that it can adapt.
        """

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> AdapterPredictor:
        """Train, keep the adapter's tensors, take it off again.

        Raises:
            I2CLError: without the package peft, or on a loss that is not finite.
        """
        needs(self.name, "peft", "peft")
        adapter = fit_adapter(decoder, task, demonstrations, self.config(decoder), self.training, seed)
        return AdapterPredictor(decoder, task, adapter)


class AdapterSettings(TrainConfig):
    """The paper's learning rate of LoRA and IA3, 1e-3."""

    lr: float = Field(1e-3, gt=0)


class LoRASettings(AdapterSettings):
    """The paper's: rank 8, alpha 32, dropout 0.05."""

    lora_rank: int = Field(8, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.05, ge=0, lt=1)


class VirtualTokenSettings(TrainConfig):
    """The paper's: one virtual token (in every layer, if in layers), learning rate 0.1."""

    lr: float = Field(0.1, gt=0)
    virtual_tokens: int = Field(1, ge=1)


@dataclass(frozen=True)
class LoRA(AdapterMethod):
    """Where query, key and value are one projection, all three are adapted."""

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
            target_modules=attention_targets(decoder),
            fan_in_fan_out=has_transposed_weights(decoder),
        )


@dataclass(frozen=True)
class IA3(AdapterMethod):
    """Where query, key and value are one projection, all three are scaled."""

    name: ClassVar[str] = "ia3"
    summary: ClassVar[str] = "scales of query, value and feed-forward activations"
    row: ClassVar[str] = "IA3"
    settings = (AdapterSettings,)

    training: AdapterSettings = field(default_factory=AdapterSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Targets by name: PEFT's own table differs from family to family."""
        from peft import IA3Config

        feed_forward = feed_forward_targets(decoder)
        return IA3Config(
            target_modules=attention_targets(decoder) + feed_forward,
            feedforward_modules=feed_forward,
            fan_in_fan_out=has_transposed_weights(decoder),
        )


@dataclass(frozen=True)
class PromptTuning(AdapterMethod):
    """Virtual tokens at the input only, from a random start."""

    name: ClassVar[str] = "prompt_tuning"
    summary: ClassVar[str] = "learned token embedding in front of the query"
    row: ClassVar[str] = "Soft-prompt / Prompt-tuning"
    settings = (VirtualTokenSettings,)

    training: VirtualTokenSettings = field(default_factory=VirtualTokenSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Any model will do."""
        from peft import PromptTuningConfig

        return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=self.training.virtual_tokens)


@dataclass(frozen=True)
class PrefixTuning(AdapterMethod):
    """Virtual tokens in every layer, trained directly without a reparametrising network."""

    name: ClassVar[str] = "prefix_tuning"
    summary: ClassVar[str] = "learned key and value of a virtual token in every layer"
    row: ClassVar[str] = "Prompt-tuning (as the text has it)"
    settings = (VirtualTokenSettings,)

    training: VirtualTokenSettings = field(default_factory=VirtualTokenSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Any model will do."""
        from peft import PrefixTuningConfig

        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=self.training.virtual_tokens)
