"""The last step of anchored calibration: the model comes to say a label by itself.

Beyond the paper. Anchored calibration's loss is among the labels. It does not ask that one of them is more
probable than every other token, so a program that knows no labels may print something else. One more vector,
at the writer that ends the stream, cures that: only the final norm and the LM head follow. The vector is
orthogonal to every direction in which two labels differ there. The norm then scales the differences of their
logits by one positive number, so the answer among the labels stays. This is exact behind an RMSNorm. Behind a
LayerNorm it is as near as the norm's bias is small; the answers on the demonstrations stay anyhow. In the
rest of the space the vector makes the labels' total probability large behind the demonstrations' queries, and
a ridge keeps it short.

The price is one forward pass over the demonstrations, and some thirty of the final norm and the LM head.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from i2cl.core.edits import LinearEdit
from i2cl.models.batching import Batch, Ids, make_batch
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit, Replay
from i2cl.models.encoding import LabelTokens
from i2cl.models.scoring import in_order
from i2cl.models.training import Backward

RIDGE = 0.001  # penalty on the vector's mean square, in units of the stream's, beside a mean loss in nats
EVALUATIONS = 60  # of the loss, at most
LEAST = 1e-3  # of the stream's norm: a shorter vector that still changes an answer is dropped
ROWS = 128  # run together: each has the logits of a whole vocabulary


class LabelMass(NamedTuple):
    """The vector and its effect on the demonstrations."""

    # to be added at the end of the last block; zero where none is better than none
    vector: Float[Tensor, " d"]
    before: float  # mean total probability of the labels' first tokens
    after: float  # the same with the vector


def raise_label_mass(
    decoder: Decoder, queries: Sequence[Ids], labels: LabelTokens, edit: LinearEdit
) -> LabelMass:
    """Find the vector that makes some label's first token probable after each of the demonstrations' queries.
    Where labels are scored by words, that is so behind an export's head. ``edit`` is the injection so far.
    """
    tail = _Tail(decoder, labels)
    with decoder.frozen():
        states = _streams(decoder, queries, edit)
        vector, before = torch.zeros_like(states[0]), tail.mass(states)
        with suppress(_NotFiniteError):
            vector = tail.vector(states, tail.apart())
        answers = tail.answers(states)  # biases, or a head of layers, may change them
        while vector.any() and not torch.equal(tail.answers(states + vector), answers):
            vector = vector / 2 if vector.norm() > LEAST * states.norm() else torch.zeros_like(vector)
        after = tail.mass(states + vector)
    if not after > before:  # or a value is not finite
        vector, after = torch.zeros_like(vector), before
    return LabelMass(vector.cpu(), before, after)


def _streams(decoder: Decoder, queries: Sequence[Ids], edit: LinearEdit) -> Float[Tensor, "queries d"]:
    """The stream behind the last block at each query's last token, in float32."""

    def run(batch: Batch) -> Tensor:
        return decoder.capture(batch, site="hidden", edit=edit)[:, -1, 0]

    streams = in_order((batch.rows, ends) for batch, ends in decoder.run_batches(queries, run))
    return streams.to(decoder.device)


class _Ending(Edit):
    """States in the place of what the last block puts out.
    As an edit of a pass it is on the model while that pass runs, and not while a server's fit lets others in.
    """

    site = "hidden"

    def __init__(self, decoder: Decoder, states: Float[Tensor, "rows d"]) -> None:
        self.last = decoder.layers - 1
        self.states = states

    def output(
        self, layer: int, _index: int, output: Float[Tensor, "rows 1 d"], _batch: Batch
    ) -> Float[Tensor, "rows 1 d"] | None:
        """The states, at the last block."""
        return self.states[:, None].to(output.device, output.dtype) if layer == self.last else None


class _Tail:
    """The final norm and the LM head of a model, whatever they are, and the labels' first tokens.
    States take the place of the last block's output in rows of one token, so no block runs a second time.
    """

    def __init__(self, decoder: Decoder, labels: LabelTokens) -> None:
        self.decoder, self.tokens, self.labels = decoder, labels, list(labels.first)
        self.replay = Replay(decoder.blocks)

    def logits(self, states: Float[Tensor, "rows d"]) -> Float[Tensor, "rows vocab"]:
        """Next-token logits of streams behind the last block, in float32; gradients flow if on."""
        batch = make_batch([(self.labels[0],)] * len(states), self.decoder.device)
        logits = self.decoder.forward(batch, edit=_Ending(self.decoder, states), replay=self.replay)
        return self.tokens.at_first(logits[:, 0].float().to(states.device))

    def losses(self, states: Float[Tensor, "rows d"]) -> Float[Tensor, " rows"]:
        """Minus the logarithm of the labels' total probability."""
        logits = self.logits(states)
        return logits.logsumexp(-1) - logits[:, self.labels].logsumexp(-1)

    def answers(self, states: Float[Tensor, "rows d"]) -> Int[Tensor, " rows"]:
        """The most probable label of each row."""
        with torch.no_grad():
            return torch.cat([self.logits(part)[:, self.labels].argmax(-1) for part in states.split(ROWS)])

    def mass(self, states: Float[Tensor, "rows d"]) -> float:
        """Mean total probability of the labels."""
        with torch.no_grad():
            losses = torch.cat([self.losses(part) for part in states.split(ROWS)])
        return (-losses).exp().mean().item()

    def apart(self) -> Float[Tensor, "d directions"]:
        """An orthonormal basis of the directions in which labels differ.
        They are the slopes of the logits at a stream of zeros, where a norm has no share in them.
        """
        zero = torch.nn.Parameter(torch.zeros(1, self.decoder.d_model, device=self.decoder.device))
        backward = Backward([zero], self.decoder.model.dtype)
        with torch.enable_grad():
            values = self.logits(zero)[0, self.labels]
            each = [backward.gradients(one - values[0])[0] for one in values[1:]]
        slopes = torch.stack([zero.detach()[0] if one is None else one[0] for one in each], dim=1)
        if not slopes.isfinite().all():
            raise _NotFiniteError
        left, sizes, _ = torch.linalg.svd(slopes, full_matrices=False)
        basis: Tensor = left[:, sizes > 1e-6 * sizes.max()]
        return basis

    def vector(
        self, states: Float[Tensor, "rows d"], apart: Float[Tensor, "d directions"]
    ) -> Float[Tensor, " d"]:
        """The best vector of an L-BFGS search from zero, which ends early where a loss is not finite."""
        size = states.square().mean().sqrt()
        u = torch.nn.Parameter(torch.zeros_like(states[0]))
        backward = Backward([u], self.decoder.model.dtype)
        most = {"max_eval": EVALUATIONS, "max_iter": EVALUATIONS}
        optimizer = torch.optim.LBFGS([u], **most, line_search_fn="strong_wolfe")
        best = (math.inf, torch.zeros_like(states[0]))

        def placed() -> Tensor:
            return size * (u - apart @ (apart.T @ u))

        def evaluate() -> float:
            nonlocal best
            optimizer.zero_grad()
            with torch.enable_grad():
                value = RIDGE * u.square().mean()
                value.backward()
                total = value.item()
                for part in states.split(ROWS):
                    loss = self.losses(part + placed()).sum() / len(states)
                    backward(loss)
                    total += loss.item()
            if not math.isfinite(total):
                raise _NotFiniteError
            if total < best[0]:
                best = total, placed().detach().clone()
            return total

        with suppress(_NotFiniteError):
            optimizer.step(evaluate)
        return best[1]


class _NotFiniteError(Exception):
    """Ends a search in a precision that overflows."""
