"""The AdamW solver of anchored calibration, for fits whose Gauss-Newton kernel would be too large.

Beyond the paper. It minimizes the same objective as `i2cl.core.gauss_newton`, from the same start and under
the same prior. Instead of linearizing, it takes small batches for a fixed number of epochs. A backward pass
covers all labels, so time grows with the number of demonstrations and hardly with the number of labels;
memory stops growing at `i2cl.core.plan.MAX_UNIT_EXAMPLES` demonstrations.

Where labels are scored by their words, it also fits how much each word counts (`i2cl.core.word_weights`).
"""

import math
from collections.abc import Sequence
from functools import partial
from random import Random

import torch
from jaxtyping import Float
from torch import Tensor

from i2cl.core.objective import Objective, Solution
from i2cl.core.plan import adamw_schedule
from i2cl.core.word_weights import token_scores
from i2cl.models.batching import Batch
from i2cl.models.training import Backward, StepProgress, train

MAX_MONITORED = 2048  # demonstrations whose loss is compared before and after the fit


def fit_adamw(
    objective: Objective, prior_std: float, seed: int, progress: StepProgress | None = None
) -> Solution:
    """Minimize the objective by AdamW.

    Args:
        objective: the problem; its units are set here.
        prior_std: standard deviation of the label scores under the prior, in nats; 0 yields the plain model.
        seed: of the order of the demonstrations.
        progress: see `i2cl.models.training.train`.

    Returns:
        The solution; it is the plain model if the fit does not lower the objective.

    Raises:
        I2CLError: if the loss is not finite.
    """
    decoder, labels = objective.scorer.decoder, objective.scorer.labels
    variance = objective.set_unit_by_gold()
    tau = variance / prior_std**2 if prior_std > 0 else math.inf
    count = len(objective.queries)
    rows = list(objective.rows)
    monitored = Random(0).sample(rows, MAX_MONITORED) if count > MAX_MONITORED else rows
    queries = [objective.queries[row] for row in monitored]
    zeros = torch.zeros(objective.vector_size)
    tokens = token_scores(decoder, queries, labels, objective.edit(zeros))
    if labels.word_tokens:
        objective.fit_words(tokens)
        zeros = torch.zeros(objective.size.parameters)
    start_loss = objective.mean_loss(objective.start_scores(tokens), monitored)
    if not 0 < tau < math.inf:
        return Solution(zeros, None, (start_loss,))
    loss = _Loss(objective, torch.nn.Parameter(zeros.clone()), tau)
    parameters = loss.parameters
    schedule = adamw_schedule(count, word_level=bool(labels.word_tokens))
    epoch_losses = train([parameters], loss, schedule.batches(count, seed), schedule, progress)
    parameters.requires_grad_(False)
    tokens = token_scores(decoder, queries, labels, objective.edit(parameters))
    end_loss = objective.mean_loss(objective.label_scores(tokens, parameters), monitored)
    prior = tau / 2 * parameters.square().sum().item() / objective.total_weight
    has_improved = end_loss + prior < start_loss  # False for NaN
    return Solution(parameters if has_improved else zeros, tau, (start_loss, *epoch_losses, end_loss))


class _Loss:
    """Mean loss of some demonstrations, in batches that fit into memory.

    The value is the loss alone, which is what progress shows. The gradient includes the prior.
    """

    def __init__(self, objective: Objective, parameters: torch.nn.Parameter, tau: float) -> None:
        self.objective = objective
        self.decoder, self.labels = objective.scorer.decoder, objective.scorer.labels
        self.parameters = parameters
        self.tau = tau
        self.backward = Backward([parameters], self.decoder.model.dtype)

    def __call__(self, chosen: Sequence[int]) -> Float[Tensor, ""]:
        queries = [self.objective.queries[row] for row in chosen]
        run = partial(self._loss_and_gradient, chosen)
        parts = [part for _, part in self.decoder.run_batches(queries, run, training=True)]
        value, gradient = (torch.stack(addends).sum(0) for addends in zip(*parts, strict=True))
        prior = self.tau / 2 * self.parameters.square().sum() / self.objective.total_weight
        surrogate = (self.parameters * gradient).sum() + prior  # has the gradient of loss and prior
        return value + surrogate - surrogate.detach()

    def _loss_and_gradient(self, chosen: Sequence[int], batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute a batch's share of the mean loss of the chosen demonstrations, and its gradient."""
        objective, rows = self.objective, [chosen[index] for index in batch.rows]
        logits = self.decoder.forward(batch, edit=objective.edit(self.parameters))[:, 0].float()
        scores = objective.label_scores(logits[:, list(self.labels.tokens)], self.parameters)
        value = objective.batch_loss(scores, rows) / len(chosen)
        self.decoder.pause()
        (gradient,) = self.backward.gradients(value)
        return value.detach().cpu(), torch.zeros_like(self.parameters) if gradient is None else gradient
