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
from i2cl.models.batching import Batch
from i2cl.models.training import Backward, StepProgress, TrainConfig, train

SCHEDULE = TrainConfig(epochs=8, batch_size=16, lr=1e-3, lr_final=0.0, warmup=0.05, weight_decay=0.0)
FEWEST_STEPS = 240  # which few demonstrations take in more passes


def schedule(demonstrations: int) -> TrainConfig:
    """Passes and rates for so many demonstrations."""
    passes = math.ceil(FEWEST_STEPS / math.ceil(demonstrations / SCHEDULE.batch_size))
    return SCHEDULE.model_copy(update={"epochs": max(passes, SCHEDULE.epochs)})


def descended(
    problem: Problem, reach: float, seed: int, progress: StepProgress | None = None
) -> tuple[Float[Tensor, " parameters"], float | None, tuple[float, ...]]:
    """Where the fit ends, in units of the scale; tau, or None where the reach is 0 or no site moves the
    scores; and the mean loss in nats at the start, of each pass with its share of the prior, and at the end.
    A fit that does not lower it ends at the plain model. Raises I2CLError on a loss that is not finite.
    """
    decoder, labels = problem.questions.decoder, problem.questions.labels
    variance = problem.scaled_by_gold()
    tau = variance / reach**2 if reach > 0 else math.inf
    u = torch.nn.Parameter(torch.zeros(problem.scale.numel()))
    plain, start, count = torch.zeros_like(u), mean_loss(problem, u), len(problem.queries)
    if not 0 < tau < math.inf:
        return plain, None, (start,)
    backward = Backward([u], decoder.model.dtype)

    def loss(chosen: Sequence[int]) -> Float[Tensor, " 1"]:
        """Its value, with the gradient of batches that were run one by one, as far as memory goes."""

        def run(batch: Batch) -> tuple[Tensor, Tensor]:
            gold = problem.gold[[chosen[place] for place in batch.rows]].to(decoder.device)
            scores = labels.scores(decoder.forward(batch, edit=problem.edit(u))[:, 0].float())
            value = cross_entropy(scores, gold, reduction="sum") / len(chosen)
            decoder.pause()
            (slope,) = backward.gradients(value)
            return value.detach().cpu(), plain if slope is None else slope

        parts = [part for _, part in decoder.run_batches([problem.queries[row] for row in chosen], run)]
        value, slope = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        along = (u * slope).sum()
        return (tau / 2 * u.square().sum() / count + value + along - along.detach())[None]

    steps = schedule(count)
    (means,) = train([u], loss, steps.batches(count, seed), steps, progress)
    end = mean_loss(problem, u)
    paid = end + tau / 2 * u.square().sum().item() / count < start
    return u.detach() if paid else plain, tau, (start, *means, end)


def mean_loss(problem: Problem, u: Float[Tensor, " parameters"]) -> float:
    """Of all demonstrations, among the labels, in nats."""
    return cross_entropy(problem.scores(u.detach()).double(), problem.gold).item()
