"""I2CL with demonstrations corrupted in one of its two stages: what each stage takes from them.

Source: paper, section "Influencing Factors of the Context Vector Generation".
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from i2cl.calibration import calibrate
from i2cl.context import ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.methods.injection_base import InjectionMethod
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.recipe import CalibrationConfig
from i2cl.tasks import Example, Task, Template


class CorruptionConfig(BaseModel):
    """What is spoilt, and for whom.

    Attributes:
        corruption: a label drawn uniformly from the task's, the true one among them (``random_label``);
            the words of each text, split at whitespace, in random order (``random_order``, the paper's
            random-token); or no words of the template (``without_format``).
        stage: the one that gets to see it. The other stage has the intact demonstrations, and queries
            the task's own template, always.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    corruption: Literal["random_label", "random_order", "without_format"] = "random_label"
    stage: Literal["vectorization", "calibration"] = "vectorization"


@dataclass(frozen=True)
class I2CLCorrupted(InjectionMethod):
    """Extracts from corrupted demonstrations and calibrates on intact ones, or the other way round."""

    name: ClassVar[str] = "i2cl_corrupted"
    summary: ClassVar[str] = "I2CL with demonstrations corrupted in one of its two stages"
    row: ClassVar[str] = "Influencing factors (figure on formation)"
    settings = (ExtractConfig, CalibrationConfig, CorruptionConfig)

    spoilt: CorruptionConfig = field(default_factory=CorruptionConfig)

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Extract and calibrate, one of them on the corrupted demonstrations."""
        intact, bad = (task, tuple(demonstrations)), corrupted(task, demonstrations, self.spoilt, seed)
        seen, learnt = (bad, intact) if self.spoilt.stage == "vectorization" else (intact, bad)
        context = extract(decoder, *seen, self.extraction, seed=seed)
        injection = calibrate(decoder, *learnt, context, self.calibration, seed=seed)
        return self.predictor(decoder, task, injection)  # the real task, whatever calibration has seen


def corrupted(
    task: Task, demonstrations: Sequence[Example], config: CorruptionConfig, seed: int
) -> tuple[Task, tuple[Example, ...]]:
    """The task and demonstrations that the chosen stage gets to see."""
    own = random.Random(f"corrupted demonstrations {seed}")  # batches are drawn from the seed itself
    if config.corruption == "without_format":
        plain = replace(Template.plain(), separator=task.template.separator)
        return replace(task, template=plain), tuple(demonstrations)
    if config.corruption == "random_label":
        return task, tuple(
            replace(example, label=own.randrange(len(task.labels))) for example in demonstrations
        )
    return task, tuple(replace(example, text=_shuffled(example.text, own)) for example in demonstrations)


def _shuffled(text: str, picker: random.Random) -> str:
    words = text.split()
    return " ".join(picker.sample(words, len(words)))
