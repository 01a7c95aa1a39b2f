"""Kernel regression with a model's tangent kernel: what a step of anchored calibration solves.

Beyond the paper's "Noisy Self-calibration": everything here happens in the space of label scores, linear in
the parameters around some point. Of a demonstration's scores each column is one other label's, less the gold
label's.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

NEWTON_STEPS = 50  # of the tangent's optimum, at most; it takes about six
LEAST_SLOPE = 1e-3  # of the mean: what moves the scores less is not scaled up any further
SLICE = 2**14  # parameters that are multiplied in double precision at once


@dataclass(frozen=True, eq=False)
class Tangent:
    """The columns at some theta, and how they change with it."""

    values: Float[Tensor, "n columns"]  # of each column, in nats
    jacobian: Float[Tensor, "n_columns parameters"]  # derivatives of the columns in theta / s
    weights: Float[Tensor, " n"] | None = None  # of the demonstrations' losses, in float64; None: 1 each

    @cached_property
    def kernel(self) -> Float[Tensor, "n_columns n_columns"]:
        """Inner products of the derivatives, in float64."""
        kernel = torch.zeros(len(self.jacobian), len(self.jacobian), dtype=torch.float64)
        for part in self.jacobian.split(SLICE, dim=1):
            wide = part.double()
            kernel += wide @ wide.T
        return kernel

    def spread(self) -> Float[Tensor, " parameters"]:
        """Variance over labels of the scores' derivatives, averaged over demonstrations: the diagonal of the
        Fisher information if all labels are equally probable. What all labels share does not count.
        """
        parts = self.jacobian.view(*self.values.shape, -1).split(SLICE, dim=2)
        labels = self.values.shape[1] + 1
        # The gold label's own derivative is 0, less itself.
        means = [(part.sum(1) / labels, part.square().sum(1) / labels) for part in parts]
        return torch.cat([weighted_mean(squares - mean.square(), self.weights) for mean, squares in means])


def others_of(gold: Int[Tensor, " n"], labels: int) -> Int[Tensor, "n others"]:
    """Every label but the gold one, in order."""
    every = torch.arange(labels).expand(len(gold), -1)
    return every[every != gold[:, None]].view(len(gold), labels - 1)


def directions(gold: Int[Tensor, " n"], labels: int) -> Float[Tensor, "n others labels"]:
    """How each column changes with the label scores."""
    return (one_hot(others_of(gold, labels), labels) - one_hot(gold, labels)[:, None]).float()


def columns(scores: Float[Tensor, "n labels"], gold: Int[Tensor, " n"]) -> Float[Tensor, "n others"]:
    """Values of the columns, in float64."""
    wide = scores.double()
    return wide.gather(1, others_of(gold, scores.shape[1])) - wide.gather(1, gold[:, None])


def balanced(spread: Float[Tensor, " parameters"], together: int) -> Float[Tensor, " parameters"]:
    """The scale of each parameter at which all sites move the label scores alike.
    The spread is `Tangent.spread`; ``together`` parameters of a site, in a row, share that of their mean.
    """
    size = spread.view(-1, together).mean(1).sqrt().repeat_interleave(together)
    return 1 / size.clamp_min(LEAST_SLOPE * size.mean()) if size.any() else torch.ones_like(size)


def weighted_mean(
    values: Float[Tensor, "n parameters"], weights: Float[Tensor, " n"] | None
) -> Float[Tensor, " parameters"]:
    """Average over demonstrations."""
    return values.mean(0) if weights is None else (weights / weights.sum()).to(values) @ values


def summed_loss(values: Float[Tensor, "n columns"], weights: Float[Tensor, " n"] | None = None) -> float:
    """Weighted sum of the gold labels' cross-entropy, in nats, from the columns."""
    losses = _with_gold(values).logsumexp(1)
    return float(losses.sum() if weights is None else weights @ losses)


def optimum(
    start: Float[Tensor, "n columns"],
    kernel: Float[Tensor, "n_columns n_columns"],
    tau: float,
    importance: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, " n_columns"]:
    """Solve kernel logistic regression, ``start + kernel a``, for ``a`` by damped Newton steps.

    The parameters are the Jacobian's transpose times ``a``.

    Args:
        start: values of the columns at the point of linearization, in float64.
        kernel: inner products of the columns, in float64.
        tau: strength of the prior.
        importance: weights of the demonstrations' losses, in float64; None: 1 each.
    """
    n, count = start.shape
    weights = torch.zeros(n * count, dtype=torch.float64)
    eye = torch.eye(len(weights), dtype=torch.float64)

    def objective(at: Tensor) -> tuple[Tensor, float]:
        values = start + (kernel @ at).view_as(start)
        return values, summed_loss(values, importance) + (tau / 2 * at @ kernel @ at).item()

    values, best = objective(weights)
    for _ in range(NEWTON_STEPS):
        probable = _with_gold(values).softmax(1)[:, 1:]
        curvature = torch.diag_embed(probable) - probable[:, :, None] * probable[:, None]
        if importance is not None:
            probable = importance[:, None] * probable
            curvature = importance[:, None, None] * curvature
        bent = (curvature @ kernel.view(n, count, -1)).view_as(kernel)
        move = torch.linalg.solve(tau * eye + bent, probable.flatten() + tau * weights)
        length = 1.0
        while (trial := objective(weights - length * move))[1] > best and length > 1e-3:
            length /= 2
        if trial[1] > best:
            break
        gain, best, values = best - trial[1], trial[1], trial[0]
        weights = weights - length * move
        if gain < 1e-9:
            break
    return weights


def _with_gold(values: Float[Tensor, "n columns"]) -> Float[Tensor, "n labels"]:
    """The gold label in front, which is 0 less itself."""
    return pad(values, (1, 0))
