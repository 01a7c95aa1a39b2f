"""A read-out on top of an injection: what else the demonstrations tell of the last hidden state.

Beyond the paper. An injection adds the same vector whatever the text; which of its directions tells the
labels apart is left to the model's own head. Here each label gets weights of the head's input as well: kernel
logistic regression on the demonstrations' states in units of their standard deviations, around the scores
that each demonstration has when the injection is fitted without it, so that only what those lack is learnt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.tangent import Tangent, best_reach, optimum, without_each
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.prefix import Prefix

REACHES = (10.0, 3.0, 1.0, 0.3, 0.0)
"""What leave-one-out chooses among, in nats; the last one is no read-out."""

FLOOR = 1e-6
"""Of a standard deviation, where a coordinate of the state is the same for all demonstrations."""


@dataclass(frozen=True, eq=False)
class States(Tangent):
    """Label scores that a read-out starts from, and the standardised states that it reads.

    Attributes:
        states: a row a demonstration, mean 0 and deviation 1 in each coordinate.
    """

    states: Float[Tensor, "n d"]

    @cached_property
    def kernel(self) -> Float[Tensor, "n_labels n_labels"]:
        """Inner products of the states, for each label by itself."""
        alike = self.states @ self.states.T
        return torch.kron(alike.contiguous(), torch.eye(self.scores.shape[1], dtype=alike.dtype))


@dataclass(frozen=True)
class ReadOut:
    """What was fitted.

    Attributes:
        rows: of each label, weights of the state and then a constant, in nats.
        reach: standard deviation of what they add, under the prior; 0 where they add nothing.
        left_out: scores of each demonstration without it, to first order.
    """

    rows: Float[Tensor, "labels d_and_1"] | None
    reach: float
    left_out: Float[Tensor, "n labels"]


def head_states(
    decoder: Decoder, queries: Sequence[Ids], *, edit: Edit | None = None, prefix: Prefix | None = None
) -> Float[Tensor, "queries d"]:
    """What the LM head is given behind each query, in float32 on the CPU; arguments as of `score`."""
    found = torch.empty(len(queries), decoder.d_model)

    def run(batch: Batch) -> Tensor:
        states: list[Tensor] = []
        decoder.forward(batch, edit=edit, prefix=prefix, states=states)
        return states[-1][:, 0].float().cpu()

    with decoder.frozen(), torch.no_grad():
        for batch, states in decoder.run_batches(queries, run, reserve=prefix.length if prefix else 0):
            found[list(batch.rows)] = states
    return found


def read_out(
    states: Float[Tensor, "n d"],
    scores: Float[Tensor, "n labels"],
    target: Float[Tensor, "n labels"],
    reach: float | None = None,
    reaches: Sequence[float] = REACHES,
) -> ReadOut:
    """Fit label weights of some states around some scores.

    Args:
        states: what the LM head is given behind each demonstration's query, injected.
        scores: of each demonstration, left out.
        target: its label's probability, 1, and the others'; or those of a teacher.
        reach: see `ReadOut`; default: what leave-one-out chooses.
        reaches: to be chosen among.
    """
    wide = states.double()
    mean, deviation = wide.mean(0), wide.std(0, correction=0) + FLOOR
    tangent = States(scores.double(), (wide - mean) / deviation)
    if tangent.tau(1.0) == 0:  # all states are the same
        return ReadOut(None, 0.0, scores)
    reach = best_reach(tangent, target, reaches) if reach is None else reach
    tau = tangent.tau(reach)
    if math.isinf(tau):
        return ReadOut(None, 0.0, scores)
    weights = optimum(tangent.scores, tangent.kernel, target, tau)
    fitted = tangent.scores + (tangent.kernel @ weights).view_as(tangent.scores)
    rows = weights.view_as(tangent.scores).T @ tangent.states / deviation
    whole = torch.cat([rows, -(rows @ mean)[:, None]], dim=1).float()
    return ReadOut(whole, reach, without_each(fitted, tangent.kernel, target, tau).float())
