"""Last step of anchored calibration: one more vector makes the labels more probable than other tokens.

Beyond the paper. The loss of anchored calibration compares the labels with each other only. Another token may
still be more probable than all of them, and greedy decoding would print it. One more vector at the last
sublayer, which only the final norm and the LM head follow, changes that. It is orthogonal to every direction
in which the logits of two labels differ, so the norm scales these differences by one positive factor and the
most probable label stays the same. This is exact for an RMSNorm and approximate for a LayerNorm with a bias;
the answers on the demonstrations are checked. Within the remaining space, the vector maximizes the labels'
total probability after the demonstrations' queries, with a ridge penalty on its length.

It costs one forward pass over the demonstrations, and ten to thirty forward and backward passes of the final
norm and the LM head.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from i2cl.models.batching import Batch, Ids, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import AffineEdit, Edit, Replay
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.scoring import stack_rows
from i2cl.models.training import Backward

RIDGE = 0.001  # nats per mean(u^2), where the vector is u times the root mean square of the residual stream
MAX_EVALUATIONS = 60
# The search ends at this mean loss, or at an iteration that gains less, both in nats. On other texts, twice
# as many evaluations would add at most half a point to the labels' probability.
TARGET_LOSS = 1e-3
MIN_GAIN = 1e-4
MIN_NORM = 1e-3  # share of the stream's norm below which a vector that still changes an answer is dropped
BATCH_ROWS = 128  # rows that run together; each has the logits of a whole vocabulary


class LabelMass(NamedTuple):
    """The vector and its effect on the demonstrations."""

    # added to the output of the last block; zero if no vector raises the probability
    vector: Float[Tensor, " d"]
    before: float  # mean total probability of the labels' first tokens
    after: float  # the same with the vector


def raise_label_mass(
    decoder: Decoder, queries: Sequence[Ids], labels: LabelTokens, edit: AffineEdit
) -> LabelMass:
    """Find the vector that makes the labels' first tokens probable after the demonstrations' queries.

    Args:
        decoder: the model.
        queries: token ids of the demonstrations' queries.
        labels: for first-token or word-level scoring. With word-level scoring, a label's token is its
            keyword, whose logit in an exported model is the label's score.
        edit: the injection so far.
    """
    output_layers = _OutputLayers(decoder, labels)
    with decoder.frozen():
        states = _final_states(decoder, queries, edit)
        vector = torch.zeros_like(states[0])
        answers, before = output_layers.answers_and_mass(states)
        with suppress(_NotFiniteError):
            vector = output_layers.maximize_mass(states, output_layers.label_directions())
        min_norm = MIN_NORM * states.norm(dim=-1).mean()
        changed_answers, after = output_layers.answers_and_mass(states + vector)
        # With a norm that has biases, or a head of several layers, the vector may change an answer.
        while not torch.equal(changed_answers, answers) and vector.norm() > min_norm:
            vector = vector / 2
            changed_answers, after = output_layers.answers_and_mass(states + vector)
    if not (after > before and torch.equal(changed_answers, answers)):  # True for NaN
        vector, after = torch.zeros_like(vector), before
    return LabelMass(vector.cpu(), before, after)


def _final_states(decoder: Decoder, queries: Sequence[Ids], edit: AffineEdit) -> Float[Tensor, "queries d"]:
    """Return the residual stream after the last block at each query's last token, in float32."""

    def run(batch: Batch) -> Tensor:
        return decoder.capture(batch, hook_point="hidden", edit=edit)[:, -1, 0]

    states = stack_rows((batch.rows, states) for batch, states in decoder.run_batches(queries, run))
    return states.to(decoder.device)


class _ReplaceFinalStates(Edit):
    """Replaces the output of the last block.

    An edit is attached to the model only during a pass, so other threads of a server can run in between.
    """

    hook_point = "hidden"

    def __init__(self, decoder: Decoder, states: Float[Tensor, "rows d"]) -> None:
        self.last = decoder.layers - 1
        self.states = states

    def output(
        self, layer: int, _index: int, output: Float[Tensor, "rows 1 d"], _batch: Batch
    ) -> Float[Tensor, "rows 1 d"] | None:
        """Return the given states at the last block."""
        return self.states[:, None].to(output.device, output.dtype) if layer == self.last else None


class _OutputLayers:
    """The final norm and the LM head of a model.

    Each state runs as a row of one token whose output of the last block it replaces; the blocks are skipped.

    Attributes:
        labels: tokens of the labels.
        label_ids: one token id per label, the representative.
    """

    def __init__(self, decoder: Decoder, labels: LabelTokens) -> None:
        self.decoder, self.labels, self.label_ids = decoder, labels, list(labels.representatives)
        self.replay = Replay(decoder.blocks)

    def logits(self, states: Float[Tensor, "rows d"]) -> Float[Tensor, "rows vocab"]:
        """Compute next-token logits from states of the last block, in float32; gradients flow if enabled."""
        batch = make_batch([(self.label_ids[0],)] * len(states), self.decoder.device)
        logits = self.decoder.forward(
            batch, edit=_ReplaceFinalStates(self.decoder, states), replay=self.replay
        )
        return self.labels.at_representatives(logits[:, 0].float().to(states.device))

    def losses(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
        """Compute the negative log of the labels' total probability from the `logits`."""
        return logits.logsumexp(-1) - logits[:, self.label_ids].logsumexp(-1)

    def answers_and_mass(self, states: Float[Tensor, "rows d"]) -> tuple[Int[Tensor, " rows"], float]:
        """Return the most probable label of each row, and the mean total probability of the labels."""
        answers, masses = [], []
        with torch.no_grad():
            for part in states.split(BATCH_ROWS):
                logits = self.logits(part)
                answers.append(logits[:, self.label_ids].argmax(-1))
                masses.append((-self.losses(logits)).exp())
        return torch.cat(answers), torch.cat(masses).mean().item()

    def label_directions(self) -> Float[Tensor, "d directions"]:
        """Return an orthonormal basis of the directions in which the labels' logits differ.

        They are computed at a residual stream of zeros, where the norm is linear.
        """
        zeros = torch.zeros(len(self.label_ids) - 1, self.decoder.d_model, device=self.decoder.device)
        differences = []
        for label_ids, part in zip(
            torch.tensor(self.label_ids[1:], device=zeros.device).split(BATCH_ROWS),
            zeros.split(BATCH_ROWS),
            strict=True,
        ):
            # a row per label, so that one backward pass yields the gradients of all of them
            states = torch.nn.Parameter(part)
            with torch.enable_grad():
                logits = self.logits(states)
                gains = logits.gather(1, label_ids[:, None])[:, 0] - logits[:, self.label_ids[0]]
                (gradient,) = Backward([states], self.decoder.model.dtype).gradients(gains.sum())
            differences.append(part if gradient is None else gradient)
        directions = torch.cat(differences).T
        if not directions.isfinite().all():
            raise _NotFiniteError
        left_vectors, singular_values, _ = torch.linalg.svd(directions, full_matrices=False)
        basis: Tensor = left_vectors[:, singular_values > 1e-6 * singular_values.max()]
        return basis

    def maximize_mass(
        self, states: Float[Tensor, "rows d"], label_directions: Float[Tensor, "d directions"]
    ) -> Float[Tensor, " d"]:
        """Find the vector, orthogonal to ``label_directions``, by L-BFGS from zero.

        Stops at `TARGET_LOSS`, at an iteration that gains less than `MIN_GAIN`, and if a loss is not finite.
        """
        rms = states.square().mean().sqrt()
        u = torch.nn.Parameter(torch.zeros_like(states[0]))
        backward = Backward([u], self.decoder.model.dtype)
        limits: dict[str, Any] = {"max_eval": MAX_EVALUATIONS, "max_iter": MAX_EVALUATIONS}
        limits["tolerance_change"] = MIN_GAIN
        optimizer = torch.optim.LBFGS([u], **limits, line_search_fn="strong_wolfe")
        best_loss, best_vector = math.inf, torch.zeros_like(states[0])

        def projected() -> Tensor:
            return rms * (u - label_directions @ (label_directions.T @ u))

        def evaluate() -> float:
            nonlocal best_loss, best_vector
            optimizer.zero_grad()
            with torch.enable_grad():
                penalty = RIDGE * u.square().mean()
                penalty.backward()
                mean_loss = 0.0
                for part in states.split(BATCH_ROWS):
                    loss = self.losses(self.logits(part + projected())).sum() / len(states)
                    backward(loss)
                    mean_loss += loss.item()
            total = mean_loss + penalty.item()
            if not math.isfinite(total):
                raise _NotFiniteError
            if total < best_loss:
                best_loss, best_vector = total, projected().detach().clone()
            if mean_loss <= TARGET_LOSS:
                raise _TargetReachedError
            return total

        with suppress(_NotFiniteError, _TargetReachedError):
            optimizer.step(evaluate)
        return best_vector


class _NotFiniteError(Exception):
    """Ends the search when a value overflows in the model's precision."""


class _TargetReachedError(Exception):
    """Ends the search at `TARGET_LOSS`, also within a line search."""
