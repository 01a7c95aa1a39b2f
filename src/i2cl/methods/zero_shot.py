"""Zero-shot: the query alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from i2cl.decoder import Decoder
from i2cl.methods.base import Method
from i2cl.methods.prompt_base import PromptPredictor
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class ZeroShot(Method):
    """Scores label words after the query, with nothing else."""

    name: ClassVar[str] = "zero_shot"
    summary: ClassVar[str] = "the query alone"
    row: ClassVar[str] = "Zero-shot"
    needs: ClassVar[str] = "nothing"

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> PromptPredictor:
        """Nothing is fitted."""
        return PromptPredictor(decoder, task)
