"""The Gauss-Newton solver of anchored calibration, by kernel logistic regression.

Beyond the paper. Each step linearizes the label scores in the parameters: one forward pass over the
demonstrations and one backward pass for every wrong label. The linearized problem is logistic regression with
the model's tangent kernel J J' (https://arxiv.org/abs/2210.05643), which has one row for every pair of a
demonstration and a wrong label, however wide the model is. It is solved to its optimum, with a proximal term
that grows where the step does not lower the true loss as predicted (Levenberg-Marquardt).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from i2cl.core.objective import SLICE, Linearization, Objective, Solution
from i2cl.models.training import StepProgress

MAX_NEWTON_STEPS = 50  # of the linearized problem; it takes about six
DAMPING = 8.0  # factor on the proximal term, first used in the second step, and whenever a step is retried
MAX_DAMPING = 1e6


class Step(NamedTuple):
    """An accepted step."""

    parameters: Float[Tensor, " parameters"]
    scores: Float[Tensor, "n labels"]
    objective: float  # summed loss with the prior, in nats
    damping: float  # strength of the proximal term, in units of the prior
    loss: float  # mean cross-entropy among the labels, in nats


def fit_gauss_newton(
    objective: Objective,
    prior_std: float,
    steps: int,
    *,
    tolerance: float = 0.02,
    trust: float = 0.25,
    settled: float = 0.1,
    progress: StepProgress | None = None,
) -> Solution:
    """Minimize the objective in a few damped Gauss-Newton steps.

    Args:
        objective: the problem; its units are set here.
        prior_std: standard deviation of the label scores under the prior, in nats; 0 yields the plain model.
        steps: maximum number of linearizations.
        tolerance: relative gain of an undamped step below which the solver stops.
        trust: share of the predicted gain that a step must achieve to be accepted.
        settled: loss in nats below which a demonstration is no longer differentiated, from the third step on.
        progress: called after each step.

    Raises:
        I2CLError: if scores or derivatives are not finite.
    """
    point, scores, variance = objective.first()
    loss = objective.mean_loss(scores)
    tau = variance / prior_std**2 if prior_std > 0 else math.inf
    at = Step(torch.zeros(objective.size.parameters), scores, loss * objective.total_weight, 1.0, loss)
    history = [loss]
    steps = steps if 0 < tau < math.inf else 0
    for number in range(steps):
        damping, max_damping = 1.0, MAX_DAMPING
        if number:
            chosen = (
                (objective.losses(at.scores) >= (settled if number > 1 else 0.0)).nonzero()[:, 0].tolist()
            )
            point = objective.relinearize(point, at.parameters, at.scores, chosen)
            damping, max_damping = DAMPING, MAX_DAMPING if chosen else DAMPING
        accepted = gauss_newton_step(objective, point, at, tau, trust, damping, max_damping)
        if accepted is None:
            break
        gain = (at.objective - accepted.objective) / at.objective
        at = accepted
        history.append(at.loss)
        if progress is not None:
            progress(number + 1, steps, at.loss)
        if gain * at.damping < tolerance:  # a step damped by d gains about 1 / d of an undamped one
            break
    return Solution(at.parameters, tau if math.isfinite(tau) else None, tuple(history))


def gauss_newton_step(
    objective: Objective,
    point: Linearization,
    at: Step,
    tau: float,
    trust: float,
    damping: float = 1.0,
    max_damping: float = MAX_DAMPING,
) -> Step | None:
    """Solve the linearized problem, with more damping until the step achieves enough of the predicted gain.

    Returns:
        The accepted step, or None if there is none up to ``max_damping``.
    """
    start = at.parameters
    directional = (point.jacobian @ start).double().view_as(point.differences)
    kernel = kernel_matrix(point.jacobian)
    while damping <= max_damping:
        # prior and proximal term add up to a quadratic with center (1 - 1 / damping) * start
        prior_share = 1 / damping
        offset = point.differences - prior_share * directional
        dual = solve_kernel_regression(offset, kernel, tau * damping, point.example_weights)
        moved = (1 - prior_share) * start + point.jacobian.T @ dual.float()
        prior = tau / 2 * moved.double().square().sum().item()
        change = (point.jacobian @ (moved - start)).double()
        linearized = point.differences + change.view_as(point.differences)
        # rounding may make it negative
        predicted = max(0.0, at.objective - summed_loss(linearized, point.example_weights) - prior)
        scores = objective.scores(moved)
        loss = objective.mean_loss(scores)
        value = loss * objective.total_weight + prior
        if value < at.objective - trust * predicted:  # False for NaN
            return Step(moved, scores, value, damping, loss)
        damping *= DAMPING
    return None


def kernel_matrix(jacobian: Float[Tensor, "n_pairs parameters"]) -> Float[Tensor, "n_pairs n_pairs"]:
    """Compute the inner products of the derivatives, in float64."""
    kernel = torch.zeros(len(jacobian), len(jacobian), dtype=torch.float64)
    for part in jacobian.split(SLICE, dim=1):
        wide = part.double()
        kernel += wide @ wide.T
    return kernel


def summed_loss(differences: Float[Tensor, "n others"], weights: Float[Tensor, " n"] | None = None) -> float:
    """Compute the weighted sum of the gold labels' cross-entropy, in nats."""
    losses = _with_gold(differences).logsumexp(1)
    return float(losses.sum() if weights is None else weights @ losses)


def solve_kernel_regression(
    start: Float[Tensor, "n others"],
    kernel: Float[Tensor, "n_pairs n_pairs"],
    tau: float,
    example_weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, " n_pairs"]:
    """Solve kernel logistic regression, ``start + kernel a``, for ``a`` by damped Newton steps.

    The parameters are the Jacobian's transpose times ``a``.

    Args:
        start: the differences at the point of linearization, in float64.
        kernel: inner products of the differences' derivatives, in float64.
        tau: strength of the prior.
        example_weights: weights of the demonstrations' losses, in float64; None: 1 each.
    """
    n, others = start.shape
    dual = torch.zeros(n * others, dtype=torch.float64)
    eye = torch.eye(len(dual), dtype=torch.float64)

    def objective(at: Tensor) -> tuple[Tensor, float]:
        differences = start + (kernel @ at).view_as(start)
        return differences, summed_loss(differences, example_weights) + (tau / 2 * at @ kernel @ at).item()

    differences, best = objective(dual)
    for _ in range(MAX_NEWTON_STEPS):
        gradient = _with_gold(differences).softmax(1)[:, 1:]
        curvature = torch.diag_embed(gradient) - gradient[:, :, None] * gradient[:, None]
        if example_weights is not None:
            gradient = example_weights[:, None] * gradient
            curvature = example_weights[:, None, None] * curvature
        hessian = tau * eye + (curvature @ kernel.view(n, others, -1)).view_as(kernel)
        move = torch.linalg.solve(hessian, gradient.flatten() + tau * dual)
        length = 1.0
        while (trial := objective(dual - length * move))[1] > best and length > 1e-3:
            length /= 2
        if trial[1] > best:
            break
        gain, best, differences = best - trial[1], trial[1], trial[0]
        dual = dual - length * move
        if gain < 1e-9:
            break
    return dual


def _with_gold(differences: Float[Tensor, "n others"]) -> Float[Tensor, "n labels"]:
    """Put the gold label's own difference, which is 0, in front."""
    return pad(differences, (1, 0))
