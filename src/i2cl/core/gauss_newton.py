"""The Gauss-Newton solver of anchored calibration, by kernel logistic regression.

Beyond the paper. Each step linearizes the label scores in the parameters: one forward pass over the
demonstrations and one backward pass for every wrong label. The linearized problem is logistic regression with
the model's neural tangent kernel J J' (https://arxiv.org/abs/2210.05643), which has one row for every pair of
a demonstration and a wrong label, whatever the width of the model. It is solved to its optimum, with a
proximal term that grows until the step lowers the true loss as predicted (Levenberg-Marquardt).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from i2cl.core.objective import SLICE, Linearization, Objective, Solution
from i2cl.models.training import StepProgress

MAX_NEWTON_STEPS = 50  # inner steps, which solve a linearized problem; usually about six are enough
DAMPING = 8.0  # initial damping from the second step on, and its factor whenever a step is rejected
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
    point, scores, variance = objective.linearize_start()
    loss = objective.mean_loss(scores)
    tau = variance / prior_std**2 if prior_std > 0 else math.inf
    current = Step(torch.zeros(objective.size.parameters), scores, loss * objective.total_weight, 1.0, loss)
    history = [loss]
    steps = steps if 0 < tau < math.inf else 0
    for iteration in range(steps):
        damping, max_damping = 1.0, MAX_DAMPING
        if iteration:
            min_loss = settled if iteration > 1 else 0.0
            unsettled = (objective.losses(current.scores) >= min_loss).nonzero()[:, 0].tolist()
            point = objective.relinearize(point, current.parameters, current.scores, unsettled)
            damping, max_damping = DAMPING, MAX_DAMPING if unsettled else DAMPING
        accepted = gauss_newton_step(objective, point, current, tau, trust, damping, max_damping)
        if accepted is None:
            break
        gain = (current.objective - accepted.objective) / current.objective
        current = accepted
        history.append(current.loss)
        if progress is not None:
            progress(iteration + 1, steps, current.loss)
        if gain * current.damping < tolerance:  # a step damped by d gains about 1 / d of an undamped one
            break
    return Solution(current.parameters, tau if math.isfinite(tau) else None, tuple(history))


def gauss_newton_step(
    objective: Objective,
    point: Linearization,
    current: Step,
    tau: float,
    trust: float,
    damping: float = 1.0,
    max_damping: float = MAX_DAMPING,
) -> Step | None:
    """Solve the linearized problem, with more damping until the step achieves enough of the predicted gain.

    Args:
        objective: the problem.
        point: its linearization around ``current``.
        current: the last accepted step.
        tau: strength of the prior.
        trust: share of the predicted gain that the step must achieve.
        damping: initial damping; multiplied by `DAMPING` whenever a step is rejected.
        max_damping: damping beyond which no further step is tried.

    Returns:
        The accepted step, or None if all steps were rejected.
    """
    start = current.parameters
    directional = (point.jacobian @ start).double().view_as(point.differences)
    kernel = kernel_matrix(point.jacobian)
    while damping <= max_damping:
        # the sum of prior and proximal term is a quadratic with its minimum at (1 - 1 / damping) * start
        prior_share = 1 / damping
        offset = point.differences - prior_share * directional
        dual = solve_kernel_regression(offset, kernel, tau * damping, point.example_weights)
        candidate = (1 - prior_share) * start + point.jacobian.T @ dual.float()
        prior = tau / 2 * candidate.double().square().sum().item()
        change = (point.jacobian @ (candidate - start)).double()
        linearized = point.differences + change.view_as(point.differences)
        # rounding may make the predicted gain negative
        predicted_gain = max(0.0, current.objective - summed_loss(linearized, point.example_weights) - prior)
        scores = objective.scores(candidate)
        loss = objective.mean_loss(scores)
        value = loss * objective.total_weight + prior
        if value < current.objective - trust * predicted_gain:  # False for NaN
            return Step(candidate, scores, value, damping, loss)
        damping *= DAMPING
    return None


def kernel_matrix(jacobian: Float[Tensor, "n_pairs parameters"]) -> Float[Tensor, "n_pairs n_pairs"]:
    """Compute the inner products of the Jacobian's rows, in float64."""
    kernel = torch.zeros(len(jacobian), len(jacobian), dtype=torch.float64)
    for part in jacobian.split(SLICE, dim=1):
        columns = part.double()
        kernel += columns @ columns.T
    return kernel


def summed_loss(
    differences: Float[Tensor, "n wrong_labels"], weights: Float[Tensor, " n"] | None = None
) -> float:
    """Compute the weighted sum of the gold labels' cross-entropy, in nats."""
    losses = _prepend_gold(differences).logsumexp(1)
    return float(losses.sum() if weights is None else weights @ losses)


def solve_kernel_regression(
    offset: Float[Tensor, "n wrong_labels"],
    kernel: Float[Tensor, "n_pairs n_pairs"],
    tau: float,
    example_weights: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, " n_pairs"]:
    """Solve kernel logistic regression by Newton's method with backtracking.

    The model is ``offset + kernel @ dual``. The parameters are the Jacobian's transpose times the dual
    variables.

    Args:
        offset: the differences for dual variables of zero, in float64.
        kernel: the `kernel_matrix`.
        tau: strength of the prior.
        example_weights: weights of the demonstrations' losses, in float64; None: 1 each.

    Returns:
        The dual variables.
    """
    n, wrong_labels = offset.shape
    dual = torch.zeros(n * wrong_labels, dtype=torch.float64)
    eye = torch.eye(len(dual), dtype=torch.float64)

    def evaluate(dual: Tensor) -> tuple[Tensor, float]:
        differences = offset + (kernel @ dual).view_as(offset)
        prior = (tau / 2 * dual @ kernel @ dual).item()
        return differences, summed_loss(differences, example_weights) + prior

    differences, value = evaluate(dual)
    for _ in range(MAX_NEWTON_STEPS):
        gradient = _prepend_gold(differences).softmax(1)[:, 1:]
        curvature = torch.diag_embed(gradient) - gradient[:, :, None] * gradient[:, None]
        if example_weights is not None:
            gradient = example_weights[:, None] * gradient
            curvature = example_weights[:, None, None] * curvature
        # gradient and Hessian in the dual variables, both without their common factor, the kernel
        hessian = tau * eye + (curvature @ kernel.view(n, wrong_labels, -1)).view_as(kernel)
        direction = torch.linalg.solve(hessian, gradient.flatten() + tau * dual)
        step_size = 1.0
        while (trial := evaluate(dual - step_size * direction))[1] > value and step_size > 1e-3:
            step_size /= 2
        if trial[1] > value:
            break
        gain, value, differences = value - trial[1], trial[1], trial[0]
        dual = dual - step_size * direction
        if gain < 1e-9:
            break
    return dual


def _prepend_gold(differences: Float[Tensor, "n wrong_labels"]) -> Float[Tensor, "n labels"]:
    """Prepend the difference of the gold label from itself, which is 0."""
    return pad(differences, (1, 0))
