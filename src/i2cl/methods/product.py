"""Two methods as one: their label probabilities multiplied, and normalised again.

Source: Hinton 2002, a product of experts, https://doi.org/10.1162/089976602760128018.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from i2cl.methods.base import Cost, MendedPredictor, Method, Predictor, Wrapper
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class ProductPredictor:
    """Log-probabilities of two methods, added up."""

    first: Predictor
    second: Predictor
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Log-probabilities among the labels; minus infinity for a label that either method rules out."""
        second = self.second.scores(texts).log_softmax(-1)
        return (self.first.scores(texts, progress).log_softmax(-1) + second).log_softmax(-1)


class Product(Wrapper):
    """The method below and another one, written ``below+other``; both are fitted to the same demonstrations.
    Below, the LLM, is at its typical temperature where it has no other: it is surer than right, and would
    count for too much. Scores that are no log-probabilities, such as kNN prompting's votes, count for little.
    """

    def __init__(self, below: Method, other: Method) -> None:
        super().__init__(below)
        self.other = other

    @property
    def called(self) -> str:
        """Both names."""
        return f"{self.below.called}+{self.other.called}"

    @property
    def temperatures(self) -> tuple[float, float]:
        """As measured of ``anchored+sentence_embeddings``: about as sure as right (docs/ablations.md)."""
        return 1.0, self.below.temperatures[1]

    def over(self, decoder: Decoder, below: Predictor, task: Task, shown: Examples, seed: int) -> Predictor:
        """Fit the other one."""
        other = self.other.fit(decoder, task, shown, seed)
        tempered = isinstance(below, MendedPredictor) and below.temperature != 1
        typical = 1.0 if tempered else self.below.temperatures[0]
        first = MendedPredictor(below, below.cost, temperature=typical)
        return ProductPredictor(first, other, below.cost + other.cost)
