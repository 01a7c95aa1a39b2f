"""The AdamW solver of anchored calibration, for fits whose Gauss-Newton kernel would be too large.

Beyond the paper. It minimizes the same objective as `i2cl.core.gauss_newton`, from the same start and under
the same prior. Instead of linearizing, it takes small batches over a few epochs, and stops early instead of
damping. Every label competes in each step, so time grows with the number of demonstrations and hardly with
the number of labels, and memory with neither.

Where labels are scored by their words, it also fits how much each word counts (`i2cl.core.word_weights`).
"""

import math
from collections.abc import Sequence
from random import Random

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from i2cl.core.objective import Objective, Solution
from i2cl.core.plan import adamw_schedule
from i2cl.core.weights import mean_cross_entropy
from i2cl.core.word_weights import token_scores
from i2cl.models.batching import Batch
from i2cl.models.training import Backward, StepProgress, train

MAX_MONITORED = 2048  # demonstrations whose loss is compared before and after the fit


def fit_adamw(
    objective: Objective, prior_std: float, seed: int, progress: StepProgress | None = None
) -> Solution:
    """Minimize the objective by AdamW.

    Args:
        objective: the problem; its scale is set here.
        prior_std: standard deviation of the label scores under the prior, in nats; 0 yields the plain model.
        seed: of the order of the demonstrations.
        progress: see `i2cl.models.training.train`.

    Returns:
        The solution; it is the plain model if the fit does not lower the objective.

    Raises:
        I2CLError: if the loss is not finite.
    """
    decoder, labels = objective.scorer.decoder, objective.scorer.labels
    variance = objective.scale_by_gold()
    tau = variance / prior_std**2 if prior_std > 0 else math.inf
    count = len(objective.queries)
    rows = list(objective.rows)
    monitored = Random(0).sample(rows, MAX_MONITORED) if count > MAX_MONITORED else rows
    queries, gold = [objective.queries[row] for row in monitored], objective.gold[monitored]
    importance, total = objective.weights, objective.total_weight
    monitored_weights = None if importance is None else importance[monitored]
    zeros = torch.zeros(objective.vector_size)
    tokens = token_scores(decoder, queries, labels, objective.edit(zeros))
    if labels.words:
        objective.fit_words(tokens)
        zeros = torch.zeros(objective.size.parameters)
    start = mean_cross_entropy(labels.mean(tokens), gold, monitored_weights)
    if not 0 < tau < math.inf:
        return Solution(zeros, None, (start,))
    parameters = torch.nn.Parameter(zeros.clone())
    backward = Backward([parameters], decoder.model.dtype)

    def label_scores(tokens: Float[Tensor, "rows read"]) -> Float[Tensor, "rows labels"]:
        weights = objective.word_weights(parameters)
        return labels.mean(tokens) if weights is None else tokens @ weights.to(tokens)

    def loss(chosen: Sequence[int]) -> Float[Tensor, ""]:
        """Mean loss of some demonstrations, with its gradient, in batches that fit into memory."""

        def run(batch: Batch) -> tuple[Tensor, Tensor]:
            right = objective.gold[[chosen[place] for place in batch.rows]].to(decoder.device)
            logits = decoder.forward(batch, edit=objective.edit(parameters))[:, 0].float()
            scores = label_scores(logits[:, list(labels.read)])
            if importance is None:
                value = cross_entropy(scores, right, reduction="sum") / len(chosen)
            else:
                factors = importance[[chosen[place] for place in batch.rows]].to(scores) * (count / total)
                value = factors @ cross_entropy(scores, right, reduction="none") / len(chosen)
            decoder.pause()
            (slope,) = backward.gradients(value)
            return value.detach().cpu(), torch.zeros_like(parameters) if slope is None else slope

        batch_queries = [objective.queries[row] for row in chosen]
        parts = [part for _, part in decoder.run_batches(batch_queries, run, training=True)]
        value, slope = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        # The reported value is the loss alone; the prior contributes its gradient only.
        only_gradient = (parameters * slope).sum() + tau / 2 * parameters.square().sum() / total
        return value + only_gradient - only_gradient.detach()

    schedule = adamw_schedule(count, words=bool(labels.words))
    means = train([parameters], loss, schedule.batches(count, seed), schedule, progress)
    parameters.requires_grad_(False)
    end = mean_cross_entropy(
        label_scores(token_scores(decoder, queries, labels, objective.edit(parameters))),
        gold,
        monitored_weights,
    )
    prior = tau / 2 * parameters.square().sum().item() / total
    history = (start, *means, end)
    lower = end + prior < start  # False for NaN
    return Solution(parameters if lower else zeros, tau, history)
