"""IA3: learned scales of queries, values and the feed-forward layer's inner activations.

Source: paper, appendix "Implementation of Baseline Methods"; Liu et al. 2022,
https://arxiv.org/abs/2205.05638 (there keys and values are scaled, in the paper queries and values).
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from i2cl.adapters import attention_targets, feed_forward_targets, has_transposed_weights
from i2cl.decoder import Decoder
from i2cl.methods.peft_base import AdapterMethod
from i2cl.training import TrainConfig

if TYPE_CHECKING:
    from peft import PeftConfig


class IA3Settings(TrainConfig):
    """The paper's learning rate of 1e-3."""

    lr: float = Field(1e-3, gt=0)


@dataclass(frozen=True)
class IA3(AdapterMethod):
    """Where query, key and value are one projection, all three are scaled."""

    name: ClassVar[str] = "ia3"
    summary: ClassVar[str] = "scales of query, value and feed-forward activations"
    row: ClassVar[str] = "IA3"
    settings = (IA3Settings,)

    training: IA3Settings = field(default_factory=IA3Settings)

    def config(self, decoder: Decoder) -> "PeftConfig":
        """Targets by name: PEFT's own table differs from family to family."""
        from peft import IA3Config

        feed_forward = feed_forward_targets(decoder)
        return IA3Config(
            target_modules=attention_targets(decoder) + feed_forward,
            feedforward_modules=feed_forward,
            fan_in_fan_out=has_transposed_weights(decoder),
        )
