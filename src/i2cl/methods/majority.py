"""Majority class: predicts the most frequent label for every text, the baseline to beat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.methods.base import Cost, Method, Predictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, require_texts
from i2cl.tasks import Examples, Task


@dataclass(frozen=True)
class MajorityPredictor:
    """The same log-probabilities for every text."""

    log_frequencies: Float[Tensor, " labels"]
    cost: Cost

    def log_probs(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> Float[Tensor, "texts labels"]:
        """Return the log-frequency of each label; minus infinity for labels without a row."""
        require_texts(texts)
        if progress is not None:
            progress(len(texts))
        return self.log_frequencies.expand(len(texts), -1)


class MajorityClass(Method):
    """Predicts the label with the most training rows; ties go to the first label.

    Equivalent to scikit-learn's ``DummyClassifier(strategy="prior")``, fitted to all training rows, since
    demonstrations are balanced.
    """

    name: ClassVar[str] = "majority_class"
    summary: ClassVar[str] = "the most frequent label of the training rows, for every text"
    needs: ClassVar[str] = "training rows"
    formula: ClassVar[str] = "0"
    is_stochastic: ClassVar[bool] = False

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> Predictor:
        """Count the labels of the training rows, or of the demonstrations if the task has no rows."""
        rows = task.train or demonstrations
        counts = torch.bincount(torch.tensor([row.label for row in rows]), minlength=len(task.labels))
        return MajorityPredictor((counts / counts.sum()).log(), Cost())
