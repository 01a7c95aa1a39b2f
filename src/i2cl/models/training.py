"""One loss, one training loop and one schedule for all that is trained, from coefficients to adapters."""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from i2cl.errors import I2CLError
from i2cl.models.batching import Batch, Ids, by_side
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.encoding import LabelTokens
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import labelled_batch, sequence_log_probabilities

# Called with steps done, steps in all and the mean loss of the epoch so far, in nats.
StepProgress = Callable[[int, int, float], None]
OFTEN = 20  # steps of an epoch after which that is called, and the loss looked at

_CURE = "lower the noise or the learning rate, or load the model in float32"


class Settings(BaseModel):
    """What somebody chooses: it cannot be changed, and takes no name that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainConfig(Settings):
    """Optimiser and schedule (paper, section "Experimental Setup")."""

    epochs: int = Field(100, ge=0)  #: passes over the demonstrations
    batch_size: int = Field(2, ge=1)  #: queries a step (the paper is silent; released code)
    #: shuffle once an epoch, or draw each step's batch afresh (released code)
    draw: Literal["epoch", "step"] = "epoch"
    lr: float = Field(1e-2, gt=0)  #: first learning rate of AdamW
    lr_final: float = Field(1e-5, ge=0)  #: the rate that the cosine ends at
    warmup: float = Field(0.0, ge=0, lt=1)  #: share of steps in which the rate rises from 0 (released code)
    weight_decay: float = Field(1e-3, ge=0)  #: of AdamW (the paper is silent; released code)
    #: what a label competes with: the whole vocabulary (the paper), or the other labels, as in prediction
    loss: Literal["vocabulary", "labels"] = "vocabulary"

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at an optimiser step: warm-up if any, then a cosine over all steps."""
        rising = int(self.warmup * steps)
        if rising and step <= rising:
            return self.lr * step / rising
        return self.lr_final + (self.lr - self.lr_final) * (1 + math.cos(math.pi * step / steps)) / 2

    def batches(self, count: int, seed: int) -> list[list[int]]:
        """Demonstration indices of every step."""
        picker, order, size = random.Random(seed), list(range(count)), self.batch_size
        steps: list[list[int]] = []
        for _ in range(self.epochs):
            if self.draw == "step":
                steps += [picker.sample(order, min(size, count)) for _ in range(max(1, count // size))]
            else:
                picker.shuffle(order)
                steps += [order[start : start + size] for start in range(0, count, size)]
        return steps


class LabelLikelihood:
    """Log-probability of the right label after each of some queries: what training raises.
    What runs are rows: each query with its label, or, where whole labels compete, with one label a row.
    ``rows`` are those of each query, ``lengths`` the tokens of each row, those of a prefix apart.
    """

    def __init__(
        self,
        decoder: Decoder,
        queries: Sequence[Ids],
        labels: Sequence[LabelTokens],
        gold: Sequence[int],
        *,
        among_labels: bool,
    ) -> None:
        self.decoder, self.labels, self.gold = decoder, labels, gold
        self.whole = among_labels and any(tokens.full for tokens in labels)
        self.first = among_labels and not self.whole
        if not among_labels and any(tokens.words for tokens in labels):
            raise I2CLError("scoring='words' compares labels, and nothing else: take loss='labels' with it")
        answers = zip(labels, gold, strict=True)
        places = [range(len(tokens.ids)) if self.whole else [right] for tokens, right in answers]
        pairs = [(place, label) for place, some in enumerate(places) for label in some]
        self.queries = [queries[place] for place, _ in pairs]
        self.targets = [labels[place].target(label) for place, label in pairs]
        self.lengths = [len(ids) + len(end) - 1 for ids, end in zip(self.queries, self.targets, strict=True)]
        self.rows = [range(*ends) for ends in pairwise([0, *accumulate(map(len, places))])]

    def __call__(
        self, chosen: Sequence[int], run: Callable[[Sequence[int]], Float[Tensor, " rows"]], reserve: int = 0
    ) -> Float[Tensor, " chosen"]:
        """That of the chosen queries, in nats."""
        rows = [row for place in chosen for row in self.rows[place]]
        parts = by_side([reserve + self.lengths[row] for row in rows], self.decoder.rope_limits)
        values = torch.cat([run([rows[place] for place in part]) for part in parts])
        self.decoder.pause()
        order = torch.tensor([place for part in parts for place in part], device=values.device).argsort()
        if not self.whole:
            return values[order]
        scores = values[order].split([len(self.rows[place]) for place in chosen])
        return right_among(scores, [self.gold[place] for place in chosen])

    def batch(self, rows: Sequence[int], *, packed: bool = False) -> Batch:
        """These rows, to be run; see `labelled_batch`."""
        queries, targets = ([each[row] for row in rows] for each in (self.queries, self.targets))
        return labelled_batch(queries, targets, self.decoder.device, packed=packed)

    def of_rows(
        self, rows: Sequence[int], batch: Batch, edit: Edit | None = None, prefix: Prefix | None = None
    ) -> Float[Tensor, " rows"]:
        """Log-probability of what each row ends in, in nats; gradients flow if on."""
        if self.first:
            labels, gold = [self.labels[row] for row in rows], [self.gold[row] for row in rows]
            return label_log_probabilities(self.decoder, batch, labels, gold, edit, prefix)
        targets = [self.targets[row] for row in rows]
        return sequence_log_probabilities(self.decoder, batch, targets, edit, prefix)


def train(
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[Sequence[int]], Float[Tensor, " runs"]],
    batches: Sequence[Sequence[int]],
    config: TrainConfig,
    progress: StepProgress | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Take one AdamW step per batch, for runs that share steps but no parameter.
    The loss is each run's mean, in nats, of the demonstrations with these indices; ``dtype`` that of its
    model, if it is float16 (`Backward`). Every `OFTEN` steps and at the end of an epoch ``progress`` is
    called with the mean loss of the epoch so far, and I2CLError raised if that is not finite. Returns the
    mean loss of each epoch, of each run.
    """
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    backward, steps = Backward(parameters, dtype), len(batches)
    per_epoch = max(1, steps // max(1, config.epochs))
    losses: list[Tensor] = []
    means: list[Tensor] = []
    for step, chosen in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step, steps)
        with torch.enable_grad():
            value = loss(chosen)
            optimizer.zero_grad()
            backward(value.sum())
        optimizer.step()
        losses.append(value.detach())
        ends = len(losses) == per_epoch or step == steps - 1
        if not ends and len(losses) % OFTEN:
            continue
        mean = _finite_mean(losses, step)
        if progress is not None:
            progress(step + 1, steps, mean.mean().item())
        if ends:
            means.append(mean)
            losses.clear()
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise I2CLError(f"what was trained is not finite after {steps} steps: {_CURE}")
    return tuple(map(tuple, torch.stack(means, -1).tolist())) if means else ()


def _finite_mean(losses: Sequence[Tensor], step: int) -> Tensor:
    mean = torch.stack(list(losses)).mean(0)
    if not mean.isfinite().all():
        bad = (~mean.isfinite()).nonzero()[:, 0].tolist() if mean.dim() else []
        which = f" of run {bad[0] + 1} of {len(mean)}" if len(bad) and len(mean) > 1 else ""
        raise I2CLError(f"the training loss{which} became {mean.max().item()} by step {step + 1}: {_CURE}")
    return mean


def minimize(
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[Sequence[int]], Tensor],
    chunks: Sequence[Sequence[int]],
    passes: int,
    pull: float,
    progress: StepProgress | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[float, ...]:
    """Minimise a loss that gives the same value for the same parameters, by L-BFGS.
    The line search is that of `torch.optim.LBFGS`
    (https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html). It ends at the best point it has
    seen. ``chunks`` are all demonstrations, in parts that fit into memory, ``passes`` how often all of them
    are evaluated at most, ``pull`` the loss per squared distance of the parameters from their start. See
    `train` for the others. Returns the mean loss of each pass, without the pull. Raises I2CLError on a loss
    that is not finite.
    """
    starts = [parameter.detach().clone() for parameter in parameters]
    backward = Backward(parameters, dtype)
    count = sum(map(len, chunks))
    history: list[float] = []
    best: tuple[float, list[Tensor]] = (math.inf, starts)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=max(1, passes), max_eval=passes, history_size=20, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        nonlocal best
        if len(history) == passes:
            raise _OutOfPassesError
        optimizer.zero_grad()
        total = torch.zeros(())
        with torch.enable_grad():
            for chosen in chunks:
                part = loss(chosen) * (len(chosen) / count)
                backward(part)
                total = total.to(part.device) + part.detach()
            away = [(one - start).square().sum() for one, start in zip(parameters, starts, strict=True)]
            held = pull * torch.stack(away).sum()
            held.backward()
        history.append(_finite_mean([total], len(history)).item())
        value = total + held.detach()
        if value.item() < best[0]:
            best = value.item(), [parameter.detach().clone() for parameter in parameters]
        if progress is not None:
            progress(len(history), passes, history[-1])
        return value

    with suppress(_OutOfPassesError):
        optimizer.step(evaluate)
    with torch.no_grad():
        for parameter, value in zip(parameters, best[1], strict=True):
            parameter.copy_(value)
    return tuple(history)


class _OutOfPassesError(Exception):
    """Ends a line search, which would otherwise go on past the number of evaluations."""


LOSS_SCALE = 2.0**16  # first factor of a float16 model's loss, as that of `torch.amp.GradScaler`


class Backward:
    """Gradients of a loss that flow back through a model in some precision.
    In float16 small gradients become 0 on their way, so the loss is scaled up and the gradients, which arrive
    in float32, are scaled down. A scale at which something exceeds float16 is halved until nothing does
    (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling).
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters = parameters
        self.scale = LOSS_SCALE if dtype == torch.float16 else 1.0

    def __call__(self, value: Tensor) -> None:
        """Add the gradients of a loss to those that the parameters have."""
        if self.scale == 1.0:
            value.backward()
            return
        for parameter, gradient in zip(self.parameters, self.gradients(value), strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def gradients(self, value: Tensor) -> list[Tensor | None]:
        """Those of one value, whose graph stays for others; None for a parameter that it does not know."""
        while True:
            scaled: Sequence[Tensor | None] = torch.autograd.grad(
                value * self.scale, self.parameters, retain_graph=True, allow_unused=True
            )
            fits = self.scale <= 1.0 or not value.isfinite()
            if fits or all(one is None or one.isfinite().all() for one in scaled):
                return [None if one is None else one / self.scale for one in scaled]
            self.scale /= 2


def label_log_probabilities(
    decoder: Decoder,
    batch: Batch,
    labels: Sequence[LabelTokens],
    gold: Sequence[int],
    edit: Edit | None = None,
    prefix: Prefix | None = None,
) -> Float[Tensor, " batch"]:
    """Log-probability of each row's right label among its own labels, in nats. Gradients flow if on.
    A row is a query, ``labels`` are its labels, none of them full, of which rows may have more or fewer,
    ``gold`` is the right one's place.
    """
    logits = decoder.forward(batch, edit=edit, prefix=prefix)[:, 0].float()
    if all(tokens is labels[0] for tokens in labels):  # word weights are copied to the device once
        return right_among(list(labels[0].scores(logits)), gold)
    return right_among([tokens.scores(row) for row, tokens in zip(logits, labels, strict=True)], gold)


def right_among(scores: Sequence[Tensor], gold: Sequence[int]) -> Float[Tensor, " queries"]:
    """Log-probability of each query's right label, from the scores of its own labels, up to a constant."""
    padded = pad_sequence(list(scores), batch_first=True, padding_value=-torch.inf)
    right = torch.tensor(gold, device=padded.device)
    return padded.log_softmax(-1).gather(-1, right[:, None])[:, 0]
