"""kNN prompting: nearest neighbours among next-token distributions of labelled anchors.

Source: Xu et al. 2023, https://arxiv.org/abs/2303.13824.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from i2cl.methods.base import Cost, LabelScores, Method
from i2cl.methods.prompting import PromptPredictor, few_shot_predictor
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import LabelScorer, Progress, map_batches
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

CHUNK_SIZE = 256  # texts whose distributions over the vocabulary are in memory at the same time


class KNNConfig(Settings):
    """Anchors, and the vote of the nearest ones."""

    neighbours: int = Field(3, ge=1)  # number of anchors that vote
    anchors: int = Field(32, ge=1)  # number of held-out examples; labelled data besides the demonstrations


@dataclass(frozen=True)
class KNNPrompting(Method):
    """Nearest neighbours by KL divergence; anchors and queries follow the same demonstrations."""

    name = "knn_prompting"
    summary = "nearest anchors by next-token distribution after the demonstrations"
    needs = "demonstrations, 32 held-out examples as anchors"
    settings = (KNNConfig,)
    config: KNNConfig = field(default_factory=KNNConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "KNNPredictor":
        """Compute the anchors' distributions. Raises I2CLError on too few examples or too small a context."""
        held_out = task.held_out(self.config.anchors, demonstrations, seed)
        prompt = few_shot_predictor(LabelScorer(decoder, task), demonstrations)
        anchor_log_probs = prompt.next_token_log_probs([example.text for example in held_out])
        labels = torch.tensor([example.label for example in held_out])
        cost = prompt.cost + Cost.of(anchor_log_probs, held_out=len(held_out))
        return KNNPredictor(prompt, anchor_log_probs, labels, self.config.neighbours, cost)


@dataclass(frozen=True)
class KNNPredictor:
    """Majority vote of the nearest anchors; the nearest one breaks ties."""

    prompt: PromptPredictor
    anchor_log_probs: Float[Tensor, "anchors vocab"]
    anchor_labels: Int[Tensor, " anchors"]
    neighbours: int
    cost: Cost

    def log_probs(self, texts: Sequence[str], progress: Progress | None = None) -> LabelScores:
        """Return each label's share of the votes, with half a vote added for the nearest anchor's label.

        These scores are not log-probabilities.
        """
        empty = torch.empty(0, len(self.prompt.scorer.task.labels))  # the result without texts
        return torch.cat([empty, *map_batches(self._votes, texts, CHUNK_SIZE, progress)])

    def _votes(self, texts: Sequence[str]) -> LabelScores:
        query = self.prompt.next_token_log_probs(texts)
        probabilities = query.exp()
        # KL(query || anchor), in nats
        distance = (probabilities * query).sum(-1, keepdim=True) - probabilities @ self.anchor_log_probs.T
        count = min(self.neighbours, len(self.anchor_labels))
        nearest = self.anchor_labels[distance.topk(count, largest=False).indices]
        votes = torch.zeros(len(texts), len(self.prompt.scorer.task.labels))
        votes.scatter_add_(1, nearest, torch.full(nearest.shape, 1 / count))
        return votes.scatter_add_(1, nearest[:, :1], torch.full((len(texts), 1), 0.5 / count))
