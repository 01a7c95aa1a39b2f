"""Prefix tuning: learned keys and values of virtual tokens in every layer.

Source: the paper's text on prompt tuning ("one extra learnable token per layer"), which its parameter
count contradicts; Li and Liang 2021, https://arxiv.org/abs/2101.00190.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from i2cl.decoder import Decoder
from i2cl.methods.peft_base import AdapterMethod
from i2cl.training import TrainConfig

if TYPE_CHECKING:
    from peft import PeftConfig


class PrefixTuningSettings(TrainConfig):
    """One virtual token a layer, learning rate 0.1 as for prompt tuning."""

    lr: float = Field(0.1, gt=0)
    virtual_tokens: int = Field(1, ge=1)


@dataclass(frozen=True)
class PrefixTuning(AdapterMethod):
    """Virtual tokens in every layer, trained directly without a reparametrising network."""

    name: ClassVar[str] = "prefix_tuning"
    summary: ClassVar[str] = "learned key and value of a virtual token in every layer"
    row: ClassVar[str] = "Prompt-tuning (as the text has it)"
    settings = (PrefixTuningSettings,)

    training: PrefixTuningSettings = field(default_factory=PrefixTuningSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """No projection."""
        from peft import PrefixTuningConfig

        return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=self.training.virtual_tokens)
