"""Prompt tuning: learned token embeddings in front of the query.

Source: paper, appendix "Implementation of Baseline Methods" (its 4.10K parameters are one token at
width 4096); Lester et al. 2021, https://arxiv.org/abs/2104.08691.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from i2cl.decoder import Decoder
from i2cl.methods.peft_base import AdapterMethod
from i2cl.training import TrainConfig

if TYPE_CHECKING:
    from peft import PeftConfig


class PromptTuningSettings(TrainConfig):
    """The paper's: one virtual token, learning rate 0.1."""

    lr: float = Field(0.1, gt=0)
    virtual_tokens: int = Field(1, ge=1)


@dataclass(frozen=True)
class PromptTuning(AdapterMethod):
    """Virtual tokens at the input only."""

    name: ClassVar[str] = "prompt_tuning"
    summary: ClassVar[str] = "learned token embedding in front of the query"
    row: ClassVar[str] = "Soft-prompt / Prompt-tuning"
    settings = (PromptTuningSettings,)

    training: PromptTuningSettings = field(default_factory=PromptTuningSettings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Random start."""
        from peft import PromptTuningConfig

        return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=self.training.virtual_tokens)
