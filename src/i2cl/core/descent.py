"""Anchored calibration of demonstrations and labels that are too many for a kernel: AdamW on its objective.

Beyond the paper. The loss among the labels, the prior and its units are those of `i2cl.core.anchored`, and it
starts at the plain model too. Small batches over a few passes take the place of linearisations, and their
early end that of the damping. Every label competes in each step, so time grows with demonstrations, and
hardly with labels; memory does with neither. Thousands of demonstrations take fewer passes, in the end one.

Where labels are scored by their words, the fit also learns how much each word counts
(`i2cl.core.word_weights`).
"""

import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from i2cl.core.problem import Problem
from i2cl.core.weights import mean_cross_entropy
from i2cl.core.word_weights import WordWeights, token_scores
from i2cl.models.batching import Batch
from i2cl.models.training import Backward, StepProgress, TrainConfig, train

SCHEDULE = TrainConfig(epochs=5, batch_size=8, lr=1e-3, lr_final=0.0, warmup=0.05, weight_decay=0.0)
OF_WORDS = {"epochs": 8, "batch_size": 16}  # where the weights of words are fitted too
FEWEST_STEPS = 240  # which few demonstrations take in smaller batches, then in more passes
PASSES = 10  # that they take while batches are to be smaller
SMALLEST = 4  # demonstrations of a batch
VISITS = 12_800  # how often all demonstrations together are read, at most, as far as one pass lets it
LOOKED_AT = 2048  # demonstrations, at most, whose loss at the start and the end tells whether the fit pays


def schedule(demonstrations: int, *, words: bool = False) -> TrainConfig:
    """Passes, batches and rates for so many demonstrations, whose labels may be scored by ``words``."""
    usual = SCHEDULE.model_copy(update=OF_WORDS if words else {})
    size = usual.batch_size
    if not words:
        size = min(max(math.ceil(demonstrations * PASSES / FEWEST_STEPS), SMALLEST), size)
    passes = math.ceil(FEWEST_STEPS / math.ceil(demonstrations / size))
    epochs = max(passes, min(usual.epochs, math.ceil(VISITS / demonstrations)))
    return usual.model_copy(update={"batch_size": size, "epochs": epochs})


class Descent(NamedTuple):
    """Where a fit ends."""

    u: Float[Tensor, " parameters"]  # the vectors, in units of the scale
    weights: Float[Tensor, "read labels"] | None  # of the words' tokens, if labels are scored by these
    tau: float | None  # None where the reach is 0 or no site moves the scores
    # mean cross-entropy in nats, without the prior: at the start, on average during each pass, and at the end
    history: tuple[float, ...]


def descended(problem: Problem, reach: float, seed: int, progress: StepProgress | None = None) -> Descent:
    """Fit; what lowers no loss ends at the plain model. Raises I2CLError on a loss that is not finite."""
    decoder, labels = problem.questions.decoder, problem.questions.labels
    variance = problem.scaled_by_gold()
    tau = variance / reach**2 if reach > 0 else math.inf
    plain = torch.zeros(problem.scale.numel())
    vectors, count = len(plain), len(problem.queries)
    some = Random(0).sample(problem.every, LOOKED_AT) if count > LOOKED_AT else list(problem.every)
    looked_at, gold = [problem.queries[row] for row in some], problem.gold[some]
    importance, total = problem.weights, problem.total_weight
    weights_looked_at = None if importance is None else importance[some]
    tokens = token_scores(decoder, looked_at, labels, problem.edit(plain))
    start = mean_cross_entropy(labels.mean(tokens), gold, weights_looked_at)
    if not 0 < tau < math.inf:
        return Descent(plain, None, None, (start,))
    words = WordWeights(labels, tokens) if labels.words else None
    at = torch.nn.Parameter(torch.zeros(vectors + (words.start.numel() if words else 0)))
    backward = Backward([at], decoder.model.dtype)

    def weights() -> Float[Tensor, "read labels"] | None:
        return words.at(at[vectors:].view_as(words.start)) if words else None

    def mean(tokens: Float[Tensor, "rows read"]) -> Float[Tensor, "rows labels"]:
        """Label scores where the fit stands."""
        now = weights()
        return labels.mean(tokens) if now is None else tokens @ now.to(tokens)

    def loss(chosen: Sequence[int]) -> Float[Tensor, " 1"]:
        """Its value, with the gradient of batches that were run one by one, as far as memory goes."""

        def run(batch: Batch) -> tuple[Tensor, Tensor]:
            right = problem.gold[[chosen[place] for place in batch.rows]].to(decoder.device)
            logits = decoder.forward(batch, edit=problem.edit(at[:vectors]))[:, 0].float()
            scores = mean(logits[:, list(labels.read)])
            if importance is None:
                value = cross_entropy(scores, right, reduction="sum") / len(chosen)
            else:
                factors = importance[[chosen[place] for place in batch.rows]].to(scores) * (count / total)
                value = factors @ cross_entropy(scores, right, reduction="none") / len(chosen)
            decoder.pause()
            (slope,) = backward.gradients(value)
            return value.detach().cpu(), torch.zeros_like(at) if slope is None else slope

        queries = [problem.queries[row] for row in chosen]
        parts = [part for _, part in decoder.run_batches(queries, run, training=True)]
        value, slope = (torch.stack(each).sum(0) for each in zip(*parts, strict=True))
        # The value is the loss on the demonstrations; the prior adds its gradient alone.
        only_gradient = (at * slope).sum() + tau / 2 * at.square().sum() / total
        return (value + only_gradient - only_gradient.detach())[None]

    steps = schedule(count, words=bool(labels.words))
    (means,) = train([at], loss, steps.batches(count, seed), steps, progress)
    at.requires_grad_(False)
    moved = token_scores(decoder, looked_at, labels, problem.edit(at[:vectors]))
    end = mean_cross_entropy(mean(moved), gold, weights_looked_at)
    history = (start, *means, end)
    pays = end + tau / 2 * at.square().sum().item() / total < start  # also False for NaN
    return Descent(at[:vectors], weights(), tau, history) if pays else Descent(plain, None, tau, history)
