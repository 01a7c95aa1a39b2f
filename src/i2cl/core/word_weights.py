"""How much each word counts for each label: what a fit learns beside its vectors, or beside an adapter.

Beyond the paper, for labels that are scored by their words (`i2cl.models.encoding.LabelTokens`). It is a
read-out of what the model would say next. It costs a query nothing, and exports hold it in the head's rows.
"""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from i2cl.models.batching import Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.encoding import LabelTokens
from i2cl.models.scoring import score


class WordWeights:
    """The weights as a function of numbers that start at zero, in a unit of their own.
    The unit is one over the root of the Fisher information where all labels are equally probable, averaged
    over all weights: that of a site's numbers in anchored calibration.
    """

    def __init__(self, labels: LabelTokens, tokens: Float[Tensor, "n read"]) -> None:
        """``tokens``: `token_scores` of the demonstrations."""
        self.start, count = labels.weights, len(labels.ids)
        apart = (tokens - tokens.mean(-1, keepdim=True)).square().mean().item()
        self.unit = count / math.sqrt(max(apart, 1e-12) * (count - 1))

    def at(self, moved: Float[Tensor, "read labels"]) -> Float[Tensor, "read labels"]:
        """The weights there; those of a label add up to 1, as they did."""
        return self.start.to(moved) + self.unit * (moved - moved.mean(0))


def token_scores(
    decoder: Decoder, queries: Sequence[Ids], labels: LabelTokens, edit: Edit | None = None
) -> Float[Tensor, "n read"]:
    """Log-probabilities of the tokens that tell the labels, behind each query."""
    each = LabelTokens(tuple((token,) for token in labels.read), full=False)
    return score(decoder, queries, each, edit=edit)
