"""Anchored calibration of demonstrations and labels that are too many for a kernel: AdamW on its objective.

Beyond the paper. The loss among the labels, the prior and its units are those of `i2cl.core.anchored`, and it
starts at the plain model too. Small batches over a few passes take the place of linearisations, and their
early end that of the damping. Every label competes in each step, so time grows with demonstrations, and
hardly with labels; memory does with neither.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from i2cl.core.problem import Problem
from i2cl.models.training import LabelLikelihood, StepProgress, TrainConfig, train

SCHEDULE = TrainConfig(epochs=10, batch_size=16, lr=1.5e-3, lr_final=0.0, warmup=0.05, weight_decay=0.0)
FEWEST_STEPS = 240  # which few demonstrations take in more passes
SCALED = 256  # demonstrations, at most, whose gold labels set the units


def schedule(demonstrations: int) -> TrainConfig:
    """Passes and rates for so many demonstrations."""
    passes = math.ceil(FEWEST_STEPS / math.ceil(demonstrations / SCHEDULE.batch_size))
    return SCHEDULE.model_copy(update={"epochs": max(passes, SCHEDULE.epochs)})


def descended(
    problem: Problem, reach: float, seed: int, progress: StepProgress | None = None
) -> tuple[Float[Tensor, " parameters"], float | None, tuple[float, ...]]:
    """Where the fit ends, in units of the scale; tau, or None where the reach is 0 or no site moves the
    scores; and the mean loss in nats at the start, of each pass with its share of the prior, and at the end.
    Raises I2CLError on one that is not finite.
    """
    decoder, labels = problem.questions.decoder, problem.questions.labels
    gold: list[int] = problem.gold.tolist()
    variance = problem.scaled_by_gold(SCALED)
    tau = variance / reach**2 if reach > 0 else math.inf
    u = torch.nn.Parameter(torch.zeros(problem.scale.numel()))
    start = mean_loss(problem, u)
    if not 0 < tau < math.inf:
        return u.detach(), None, (start,)
    likelihood = LabelLikelihood(decoder, problem.queries, [labels] * len(gold), gold, among_labels=True)

    def loss(chosen: Sequence[int]) -> Float[Tensor, " 1"]:
        edit = problem.edit(u)
        right = likelihood(chosen, lambda rows: likelihood.of_rows(rows, likelihood.batch(rows), edit))
        return (tau / 2 * u.square().sum() / len(gold) - right.mean())[None]

    steps = schedule(len(gold))
    (means,) = train([u], loss, steps.batches(len(gold), seed), steps, progress, decoder.model.dtype)
    return u.detach(), tau, (start, *means, mean_loss(problem, u))


def mean_loss(problem: Problem, u: Float[Tensor, " parameters"]) -> float:
    """Of all demonstrations, among the labels, in nats."""
    return cross_entropy(problem.scores(u.detach()).double(), problem.gold).item()
