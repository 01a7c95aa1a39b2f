"""Kernel regression with a model's tangent kernel: what a step of anchored calibration solves.

Beyond the paper's "Noisy Self-calibration": everything here happens in the space of the N x C label scores,
linear in the parameters around some point.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

NEWTON_STEPS = 50
"""Of the tangent's optimum, at most; it takes about six."""

LEAST_SLOPE = 1e-3
"""Of the mean: what moves the scores less is not scaled up any further."""


@dataclass(frozen=True, eq=False)
class Tangent:
    """The label scores at some theta, and how they change with it.

    Attributes:
        scores: of each label after each demonstration, in nats, up to a constant a row.
        jacobian: their derivatives in theta / s, up to what all labels of a row share.
    """

    scores: Float[Tensor, "n labels"]
    jacobian: Float[Tensor, "n_labels parameters"]

    @cached_property
    def kernel(self) -> Float[Tensor, "n_labels n_labels"]:
        """Inner products of the derivatives, in float64."""
        found = torch.zeros(len(self.jacobian), len(self.jacobian), dtype=torch.float64)
        for part in self.jacobian.split(2**14, dim=1):
            wide = part.double()
            found += wide @ wide.T
        return found

    def even(self, together: int = 1) -> Float[Tensor, " parameters"]:
        """The scale of each parameter at which all of them move the label scores alike.

        One over the root of the diagonal of the Fisher information, where all labels are equally probable:
        the mean over demonstrations of the variance over labels, so what all labels share counts nothing.

        Args:
            together: parameters in a row that share a scale, by the mean of their information.
        """
        n, labels = self.scores.shape
        parts = self.jacobian.view(n, labels, -1).split(2**14, dim=2)
        each = torch.cat([part.var(1, correction=0).mean(0) for part in parts])
        size = each.view(-1, together).mean(1).sqrt().repeat_interleave(together)
        return 1 / size.clamp_min(LEAST_SLOPE * size.mean()) if size.any() else torch.ones_like(size)

    def tau(self, reach: float) -> float:
        """The strength of the prior that gives the label scores of a query this standard deviation."""
        n, labels = self.scores.shape
        blocks = self.kernel.view(n, labels, n, labels).diagonal(dim1=0, dim2=2)  # (labels, labels, n)
        apart = blocks.diagonal(dim1=0, dim2=1).mean() - blocks.mean()  # what all labels share counts nothing
        return apart.item() / reach / reach if reach > 0 else math.inf


def curved(
    scores: Float[Tensor, "n labels"],
) -> tuple[Float[Tensor, "n labels"], Float[Tensor, "n_labels n_labels"]]:
    """Probabilities among the labels, and the second derivatives of the summed loss in the scores."""
    probable = scores.double().softmax(-1)
    return probable, torch.block_diag(*(torch.diag(row) - torch.outer(row, row) for row in probable))


def without_each(
    scores: Float[Tensor, "n labels"],
    kernel: Float[Tensor, "n_labels n_labels"],
    target: Float[Tensor, "n labels"],
    tau: float,
    groups: Sequence[Sequence[int]] | None = None,
) -> Float[Tensor, "n labels"]:
    """Scores of each demonstration when it is left out, from those of the optimum with all of them.

    To first order, without a refit (approximate leave-one-out: Rad and Maleki, J. R. Statist. Soc. B 82(4),
    2020).

    Args:
        scores: at the optimum.
        kernel: there.
        target: one-hot labels.
        tau: strength of the prior.
        groups: demonstrations that are left out together, such as those of one text; default: each alone.
    """
    n, labels = scores.shape
    scores = scores.double()
    probable, curvature = curved(scores)
    eye = torch.eye(n * labels, dtype=torch.float64)
    spread = torch.linalg.solve(tau * eye + kernel @ curvature, kernel)
    found = scores.clone()
    for rows in groups or [[row] for row in range(n)]:
        out = torch.arange(n * labels).view(n, labels)[list(rows)].flatten()
        own, bent = spread[out][:, out], curvature[out][:, out]
        slope = (probable - target)[list(rows)].flatten()
        less = own @ torch.linalg.solve(torch.eye(len(out), dtype=torch.float64) - bent @ own, slope)
        found[list(rows)] += less.view(-1, labels)
    return found


def best_reach(
    tangent: Tangent,
    target: Float[Tensor, "n labels"],
    reaches: Sequence[float],
    groups: Sequence[Sequence[int]] | None = None,
) -> float:
    """The reach, of some from large to small, of the best leave-one-out likelihood.

    The smaller is preferred within one standard error of the paired differences. Groups as in `without_each`.
    """
    losses = [left_out_losses(tangent, target, tangent.tau(reach), groups) for reach in reaches]
    best = min(losses, key=lambda one: one.mean().item())
    for reach, one in reversed(list(zip(reaches, losses, strict=True))):
        apart = one - best
        if apart.mean() <= apart.std(correction=0) / math.sqrt(len(apart)):
            return reach
    raise AssertionError("the best is within its own error")


def left_out_losses(
    tangent: Tangent,
    target: Float[Tensor, "n labels"],
    tau: float,
    groups: Sequence[Sequence[int]] | None = None,
) -> Float[Tensor, " n"]:
    """Loss of each demonstration when it is left out, at the tangent's optimum, in nats."""
    scores: Float[Tensor, "n labels"] = tangent.scores.double()
    if math.isfinite(tau):
        weights = optimum(scores, tangent.kernel, target, tau)
        best = scores + (tangent.kernel @ weights).view_as(scores)
        scores = without_each(best, tangent.kernel, target, tau, groups)
    return cross_entropy(scores, target, reduction="none")


def optimum(
    start: Float[Tensor, "n labels"],
    kernel: Float[Tensor, "n_labels n_labels"],
    target: Float[Tensor, "n labels"],
    tau: float,
) -> Float[Tensor, " n_labels"]:
    """Weights ``a`` at which kernel logistic regression, ``start + kernel a``, is best: damped Newton steps.

    The parameters that they stand for are the Jacobian's transpose times ``a``.
    """
    weights = torch.zeros(kernel.shape[0], dtype=torch.float64)
    eye = torch.eye(len(weights), dtype=torch.float64)

    def objective(at: Tensor) -> tuple[Tensor, float]:
        scores = start + (kernel @ at).view_as(start)
        loss = cross_entropy(scores, target, reduction="sum")
        return scores, (loss + tau / 2 * at @ kernel @ at).item()

    scores, value = objective(weights)
    for _ in range(NEWTON_STEPS):
        probable, curvature = curved(scores)
        slope = (probable - target).flatten() + tau * weights
        move = torch.linalg.solve(tau * eye + curvature @ kernel, slope)
        length = 1.0
        while (found := objective(weights - length * move))[1] > value and length > 1e-3:
            length /= 2
        if found[1] > value:
            break
        gain, value, scores = value - found[1], found[1], found[0]
        weights = weights - length * move
        if gain < 1e-9:
            break
    return weights
