"""kNN prompting: nearest neighbours among next-token distributions of labelled anchors.

Source: Xu et al. 2023, https://arxiv.org/abs/2303.13824.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from i2cl.methods.base import Cost, Method
from i2cl.methods.prompts import PromptPredictor, few_shot_prompt
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Progress, Questions, in_parts
from i2cl.models.training import Settings
from i2cl.tasks import Examples, Task

AT_ONCE = 256  # texts whose distributions over the whole vocabulary are held together


class KNNConfig(Settings):
    """The vote."""

    neighbours: int = Field(3, ge=1)  # how many anchors vote
    # held-out examples to vote; they are labelled data beyond the demonstrations
    anchors: int = Field(32, ge=1)
    # from the query's distribution to the anchor's, KL(query || anchor), as the paper's equation reads; or
    # KL(anchor || query), as its released code computes
    divergence: Literal["query_anchor", "anchor_query"] = "query_anchor"


@dataclass(frozen=True)
class KNNPrompting(Method):
    """Anchors and queries stand behind the same demonstrations; the distance is a KL divergence."""

    name: ClassVar[str] = "knn_prompting"
    summary: ClassVar[str] = "nearest anchors by next-token distribution behind the demonstrations"
    needs: ClassVar[str] = "demonstrations, 32 held-out examples as anchors"
    formula: ClassVar[str] = "2MDL + anchors x vocabulary"
    settings = (KNNConfig,)
    config: KNNConfig = field(default_factory=KNNConfig)

    def fit(self, decoder: Decoder, task: Task, demonstrations: Examples, seed: int) -> "KNNPredictor":
        """Keep each anchor's distribution. Raises I2CLError on too few examples, or too small a context."""
        held_out = task.held_out(self.config.anchors, demonstrations, seed)
        prompt = few_shot_prompt(Questions(decoder, task), demonstrations)
        kept = prompt.distributions([example.text for example in held_out])
        labels = torch.tensor([example.label for example in held_out])
        cost = prompt.cost + Cost.of(kept, held_out=len(held_out))
        return KNNPredictor(prompt, kept, labels, self.config, cost)


@dataclass(frozen=True)
class KNNPredictor:
    """A vote of the nearest anchors; the nearest one breaks ties."""

    prompt: PromptPredictor
    kept: Float[Tensor, "anchors vocab"]
    labels: Int[Tensor, " anchors"]
    config: KNNConfig
    cost: Cost

    def scores(self, texts: Sequence[str], progress: Progress | None = None) -> Float[Tensor, "texts labels"]:
        """Share of the votes, plus a tie-break smaller than one vote for the nearest anchor's label."""
        none = torch.empty(0, len(self.prompt.questions.task.labels))
        return torch.cat([none, *in_parts(self._votes, texts, AT_ONCE, progress)])

    def _votes(self, texts: Sequence[str]) -> Float[Tensor, "texts labels"]:
        query = self.prompt.distributions(texts)
        of_anchor = self.config.divergence == "anchor_query"
        distance = divergence(self.kept, query).T if of_anchor else divergence(query, self.kept)
        count = min(self.config.neighbours, len(self.labels))
        nearest = self.labels[distance.topk(count, largest=False).indices]
        votes = torch.zeros(len(texts), len(self.prompt.questions.task.labels))
        votes.scatter_add_(1, nearest, torch.full(nearest.shape, 1 / count))
        return votes.scatter_add_(1, nearest[:, :1], torch.full((len(texts), 1), 0.5 / count))


def divergence(
    first: Float[Tensor, "rows vocab"], second: Float[Tensor, "columns vocab"]
) -> Float[Tensor, "rows columns"]:
    """KL divergence from each of the first distributions to each of the second, in nats, from their logs."""
    return (first.exp() * first).sum(-1, keepdim=True) - first.exp() @ second.T
