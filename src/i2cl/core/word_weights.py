"""Word weights: how much each word counts for each label, fitted together with the vectors or an adapter.

Beyond the paper, for labels that are scored by their words (`i2cl.models.label_tokens.LabelTokens`). The
weights are a linear read-out of the next-token log-probabilities. They add nothing to the cost of a query,
and an exported model stores them in the rows of its head.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.label_tokens import MIN_TOKEN_SCORE, LabelTokens
from i2cl.models.scoring import score


class WordWeights:
    """Word weights as a function of parameters that start at zero.

    The unit of the parameters is one over the root of the Fisher information where all labels are equally
    probable, averaged over all weights. Anchored calibration scales the vector of a sublayer in the same way.
    """

    def __init__(self, labels: LabelTokens, tokens: Float[Tensor, "n tokens"]) -> None:
        """``tokens`` are the `token_scores` of the demonstrations."""
        self.start, count = labels.word_weights, len(labels.sequences)
        variance = (tokens - tokens.mean(-1, keepdim=True)).square().mean().item()
        self.unit = count / math.sqrt(max(variance, 1e-12) * (count - 1))

    def at(self, parameters: Float[Tensor, "tokens labels"]) -> Float[Tensor, "tokens labels"]:
        """Return the weights. The weights of a label always sum to 1."""
        return self.start.to(parameters) + self.unit * (parameters - parameters.mean(0))

    def jacobian(
        self, tokens: Float[Tensor, "n tokens"], directions: Float[Tensor, "n wrong_labels labels"]
    ) -> Float[Tensor, "n wrong_labels parameters"]:
        """Return the derivatives with respect to the parameters of the label scores along ``directions``."""
        clamped = tokens.clamp(min=MIN_TOKEN_SCORE)
        centered = self.unit * (clamped - clamped.mean(-1, keepdim=True))
        return torch.einsum("nt,nol->notl", centered, directions).flatten(2)


def token_scores(
    decoder: Decoder, queries: Sequence[Ids], labels: LabelTokens, edit: Edit | None = None
) -> Float[Tensor, "n tokens"]:
    """Return the log-probability of every token that label scores are computed from, after each query."""
    single = LabelTokens(tuple((token,) for token in labels.tokens), full_sequences=False)
    return score(decoder, queries, single, edit=edit)
