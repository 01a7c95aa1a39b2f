"""The objective of a multi-label task: the logistic loss of each label.

Beyond the paper. Every pair of an example and a label is a classification with two answers: the label's score
against a threshold. The score is the log-odds of the label's words against a reference word
(`i2cl.models.label_tokens.LabelTokens`). The threshold is chosen under the plain model so that the label is
on average as probable as it is frequent among the examples. The solvers see these pairs as examples with one
wrong answer each: their cross-entropy is the logistic loss, whose Hessian in the scores is diagonal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

from i2cl.core.objective import Linearization, Objective, score_variance
from i2cl.core.plan import FitSize
from i2cl.errors import LONE_SURROGATE, I2CLError
from i2cl.tasks import Examples, Task

MAX_FREQUENCY = 0.95  # of a label, for the thresholds; the minimum is 1 minus this


@dataclass(eq=False)
class MultiLabelObjective(Objective):
    """The loss of anchored calibration for a multi-label task.

    Attributes:
        bias: minus the threshold of each label's score, in nats; set by `start_scores`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        labels = len(self.scorer.labels.sequences)
        self.gold = torch.from_numpy(indicators(self.demonstrations, labels)).float()
        self.bias = torch.zeros(labels)

    @property
    def size(self) -> FitSize:
        """Size of the fit. The reference is one more label, so that every label forms a pair."""
        size = super().size
        return replace(size, labels=size.labels + 1)

    @property
    def signs(self) -> Float[Tensor, "n labels"]:
        """-1 where an example has the label, 1 where it does not."""
        return 1 - 2 * self.gold

    def start_scores(self, tokens: Float[Tensor, "n tokens"]) -> Float[Tensor, "n labels"]:
        """Set the bias, and return the label scores under the plain model."""
        scores = self.scorer.labels.scores_from_tokens(tokens)
        self.bias = frequency_bias(scores, self.gold)
        return scores + self.bias

    def scores(self, parameters: Float[Tensor, " parameters"]) -> Float[Tensor, "n labels"]:
        """Compute the label scores of all demonstrations, with the bias."""
        return super().scores(parameters) + self.bias

    def label_scores(
        self, tokens: Float[Tensor, "n tokens"], parameters: Float[Tensor, " parameters"]
    ) -> Float[Tensor, "n labels"]:
        """Compute label scores from log-probabilities or logits of the tokens, with the bias."""
        return super().label_scores(tokens, parameters) + self.bias.to(tokens)

    def losses(self, scores: Float[Tensor, "n labels"]) -> Float[Tensor, " n"]:
        """Return the loss of each demonstration, summed over the labels, in nats."""
        return softplus(self.signs * scores).sum(1)

    def mean_loss(self, scores: Float[Tensor, "chosen labels"], rows: Sequence[int] | None = None) -> float:
        """Return the weighted mean loss of some demonstrations, by default of all, in nats."""
        rows = list(self.rows if rows is None else rows)
        losses = softplus(self.signs[rows].double() * scores.double()).sum(1)
        weights = self.relative_weights(rows, losses)
        return float(weights @ losses / weights.sum())

    def batch_loss(self, scores: Float[Tensor, "chosen labels"], rows: Sequence[int]) -> Float[Tensor, ""]:
        """Return the summed loss of some demonstrations, in nats; weights count relative to their mean."""
        losses = softplus(self.signs[rows].to(scores) * scores).sum(1)
        return self.relative_weights(rows, losses) @ losses

    def _directions(self) -> Float[Tensor, "n labels labels"]:
        return torch.diag_embed(self.signs)

    def _gold_directions(self) -> Float[Tensor, "n labels"]:
        """Return the derivative of one label's score per example; the labels take turns."""
        labels = self.gold.shape[1]
        return torch.eye(labels)[torch.arange(len(self.gold)) % labels] / 2

    def _score_variance(self, jacobian: Float[Tensor, "n labels parameters"]) -> Float[Tensor, " parameters"]:
        return score_variance(jacobian.flatten(0, 1)[:, None], self._pair_weights)

    def _linearization(
        self, scores: Float[Tensor, "n labels"], jacobian: Float[Tensor, "n labels parameters"]
    ) -> Linearization:
        differences = (self.signs * scores).double().view(-1, 1)
        return Linearization(differences, jacobian.flatten(0, 1), self._pair_weights)

    @property
    def _pair_weights(self) -> Float[Tensor, " pairs"] | None:
        return (
            None
            if self.example_weights is None
            else self.example_weights.repeat_interleave(self.gold.shape[1])
        )


def indicators(rows: Examples, labels: int) -> Bool[np.ndarray, "rows labels"]:
    """Return the label indicator matrix: which labels each row has."""
    matrix = np.zeros((len(rows), labels), dtype=bool)
    for index, row in enumerate(rows):
        matrix[index, list(row.ids)] = True
    return matrix


def frequency_bias(
    scores: Float[Tensor, "rows labels"], gold: Float[Tensor, "rows labels"]
) -> Float[Tensor, " labels"]:
    """Return the bias at which a label's mean score is the log-odds of its frequency among the rows."""
    frequency = gold.mean(0).clamp(1 - MAX_FREQUENCY, MAX_FREQUENCY)
    return frequency.logit() - scores.mean(0)


def require_multi_label(task: Task, demonstrations: Examples) -> None:
    """Check that a multi-label task can be fitted to its demonstrations.

    Raises:
        I2CLError: without demonstrations, on one without a list of labels, with an unknown label or a text
            that is not valid Unicode, or if a label is on all or on none of them.
    """
    if not demonstrations:
        raise I2CLError("no demonstrations: give at least one")
    for number, example in enumerate(demonstrations, start=1):
        if example.labels is None or not set(example.labels) <= set(range(len(task.labels))):
            raise I2CLError(f"demonstration {number} has no valid list of labels: use Example.multi_label")
        if LONE_SURROGATE.search(example.text):
            raise I2CLError(f"demonstration {number} contains a lone surrogate: repair its text")
    counts = [sum(label in example.ids for example in demonstrations) for label in range(len(task.labels))]
    for word, count in zip(task.labels, counts, strict=True):
        if count in {0, len(demonstrations)}:
            quantifier, preposition = ("all", "without") if count else ("no", "with")
            raise I2CLError(
                f"{quantifier} demonstrations have the label {word!r}, so it cannot be learned: add rows "
                f"{preposition} it, or leave the label out"
            )
