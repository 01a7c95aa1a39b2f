"""Zero-shot: the query alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jaxtyping import Float
from torch import Tensor

from i2cl.decoder import Decoder
from i2cl.scoring import Progress, encode_queries, label_tokens, score
from i2cl.tasks import Example, Task


@dataclass(frozen=True)
class ZeroShot:
    """Scores label words after the query, with nothing else."""

    name: ClassVar[str] = "zero_shot"
    summary: ClassVar[str] = "the query alone"
    row: ClassVar[str] = "Zero-shot"
    needs: ClassVar[str] = "nothing"

    @classmethod
    def options(cls) -> Mapping[str, str]:
        """None."""
        return {}

    @classmethod
    def configured(cls, options: Mapping[str, Any]) -> Self:
        """There is nothing to set."""
        return cls()

    def fit(
        self, decoder: Decoder, task: Task, demonstrations: Sequence[Example], seed: int
    ) -> "ZeroShotPredictor":
        """Nothing is fitted."""
        return ZeroShotPredictor(decoder, task)


@dataclass(frozen=True)
class ZeroShotPredictor:
    """The plain model."""

    decoder: Decoder
    task: Task
    trainable_parameters: int = 0
    cached_values: int = 0

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probability of each label word after each query."""
        labels = label_tokens(self.decoder, self.task.template, self.task.labels)
        queries = encode_queries(self.decoder, self.task.template.query, texts, labels)
        return score(self.decoder, queries, labels, progress=progress)
