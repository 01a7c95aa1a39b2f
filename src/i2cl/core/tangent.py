"""Kernel regression with a model's tangent kernel: what a step of anchored calibration solves.

Beyond the paper's "Noisy Self-calibration": everything here happens in the space of the N x C label scores,
linear in the parameters around some point.
"""

import math
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
