"""LoRA: low-rank changes of the query and value projections.

Source: paper, appendix "Implementation of Baseline Methods"; Hu et al. 2022,
https://arxiv.org/abs/2106.09685.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from i2cl.adapters import attention_targets, has_transposed_weights
from i2cl.decoder import Decoder
from i2cl.methods.peft_base import AdapterMethod
from i2cl.training import TrainConfig

if TYPE_CHECKING:
    from peft import PeftConfig


class LoRASettings(TrainConfig):
    """The paper's: rank 8, alpha 32, dropout 0.05, learning rate 1e-3."""

    lr: float = Field(1e-3, gt=0)
    lora_rank: int = Field(8, ge=1)
    lora_alpha: int = Field(32, ge=1)
    lora_dropout: float = Field(0.05, ge=0, lt=1)


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
