"""Loss, training loop and schedule of everything that is trained, from coefficients to adapters."""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from i2cl.errors import I2CLError, did_you_mean, require_type
from i2cl.models.batching import Batch, Ids
from i2cl.models.decoder import Decoder
from i2cl.models.edits import Edit
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import labelled_batch, sequence_log_probabilities

# Progress callback: steps done, number of steps, and mean loss of the epoch so far in nats.
StepProgress = Callable[[int, int, float], None]
PROGRESS_STEPS = 20  # steps between progress calls and checks of the loss

MAX_VALUE_LENGTH = 200  # characters of an invalid option's value in an error message

_HINT = "lower the noise or the learning rate, or load the model in float32"


class Settings(BaseModel):
    """Base class of settings: immutable, and strict about unknown names.

    Raises:
        I2CLError: on the first invalid option.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise I2CLError(self._first_problem(error, options)) from None

    @classmethod
    def _first_problem(cls, error: ValidationError, options: dict[str, Any]) -> str:
        """Return which option is wrong and why, in one line."""
        problem = error.errors(include_url=False)[0]
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:  # an invalid combination of options
            return message
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            hint = did_you_mean(name, cls.model_fields)
            return f"{cls.__name__} has no option {name!r}: {hint}choose from {', '.join(cls.model_fields)}"
        return f"option {name}={repr(options.get(name))[:MAX_VALUE_LENGTH]}: {message}"

    @classmethod
    def or_default(cls, config: Self | None, name: str = "config") -> Self:
        """Return ``config``, or the default settings for None.

        Raises I2CLError, naming the argument, for another type, such as a dict.
        """
        if config is None:
            return cls()
        require_type(name, config, cls, f"pass {cls.__name__}(...)")
        return config


class TrainConfig(Settings):
    """Optimizer and schedule (paper, section "Experimental Setup")."""

    epochs: int = Field(100, ge=0)  #: passes over the demonstrations
    batch_size: int = Field(2, ge=1)  #: queries per step (from the released code; not in the paper)
    #: shuffle once per epoch, or sample each step's batch independently (released code)
    draw: Literal["epoch", "step"] = "epoch"
    lr: float = Field(1e-2, gt=0)  #: first learning rate of AdamW
    lr_final: float = Field(1e-5, ge=0)  #: learning rate at the end of the cosine schedule
    warmup: float = Field(0.0, ge=0, lt=1)  #: share of warm-up steps (released code)
    weight_decay: float = Field(1e-3, ge=0)  #: of AdamW (from the released code; not in the paper)
    #: what a label competes with: the whole vocabulary (paper), or the other labels, as in prediction
    loss: Literal["vocabulary", "labels"] = "vocabulary"

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step: linear warm-up, then a cosine over all steps."""
        warmup_steps = int(self.warmup * steps)
        if warmup_steps and step <= warmup_steps:
            return self.lr * step / warmup_steps
        return self.lr_final + (self.lr - self.lr_final) * (1 + math.cos(math.pi * step / steps)) / 2

    def batches(self, count: int, seed: int) -> list[list[int]]:
        """Return the demonstration indices of every step."""
        rng, order, size = random.Random(seed), list(range(count)), self.batch_size
        steps: list[list[int]] = []
        for _ in range(self.epochs):
            if self.draw == "step":
                steps += [rng.sample(order, min(size, count)) for _ in range(max(1, count // size))]
            else:
                rng.shuffle(order)
                steps += [order[start : start + size] for start in range(0, count, size)]
        return steps


class LabelLikelihood:
    """Log-probability of the gold label after each query, which training maximizes.

    Attributes:
        among_labels: normalize over the labels, by first tokens or words. Otherwise over the whole
            vocabulary, where the target is the label's first token or full sequence.
        targets: target tokens of each query.
        lengths: number of tokens of each query with its target, without a prefix.

    Raises:
        I2CLError: for word-level scoring over the vocabulary, or full sequences among the labels.
    """

    def __init__(
        self,
        decoder: Decoder,
        queries: Sequence[Ids],
        labels: LabelTokens,
        gold: Sequence[int],
        *,
        among_labels: bool,
    ) -> None:
        if not among_labels and labels.word_tokens:
            raise I2CLError("scoring='words' compares labels with each other: set loss='labels' as well")
        if among_labels and labels.full_sequences:
            raise I2CLError("loss='labels' cannot score full sequences: use scoring='words'")
        self.decoder, self.labels, self.gold = decoder, labels, gold
        self.queries, self.among_labels = queries, among_labels
        self.targets = [labels.target(label) for label in gold]
        self.lengths = [
            len(query) + len(target) - 1 for query, target in zip(queries, self.targets, strict=True)
        ]

    def batch(self, rows: Sequence[int], *, packed: bool = False) -> Batch:
        """Make a batch of some queries with their targets; see `labelled_batch`."""
        queries, targets = [self.queries[row] for row in rows], [self.targets[row] for row in rows]
        return labelled_batch(queries, targets, self.decoder.device, packed=packed)

    def log_probs(
        self, rows: Sequence[int], batch: Batch, edit: Edit | None = None, prefix: Prefix | None = None
    ) -> Float[Tensor, " rows"]:
        """Run the `batch` of some rows and return log-probabilities, in nats; gradients flow if enabled."""
        if self.among_labels:
            gold = [self.gold[row] for row in rows]
            values = gold_log_probs(self.decoder, batch, self.labels, gold, edit, prefix)
        else:
            targets = [self.targets[row] for row in rows]
            values = sequence_log_probabilities(self.decoder, batch, targets, edit, prefix)
        self.decoder.pause()  # before the backward pass
        return values


def train(
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[Sequence[int]], Float[Tensor, ""]],
    batches: Sequence[Sequence[int]],
    config: TrainConfig,
    progress: StepProgress | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[float, ...]:
    """Take one AdamW step per batch.

    Args:
        parameters: what is trained.
        loss: returns the mean loss of the demonstrations with the given indices, in nats.
        batches: demonstration indices of every step.
        config: learning rates and number of epochs.
        progress: called every `PROGRESS_STEPS` steps and at the end of each epoch.
        dtype: of the model, for loss scaling in float16 (`Backward`).

    Returns:
        The mean loss of each epoch.

    Raises:
        I2CLError: if the loss or the parameters are not finite.
    """
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    backward, steps = Backward(parameters, dtype), len(batches)
    per_epoch = max(1, steps // max(1, config.epochs))
    losses: list[Tensor] = []
    means: list[float] = []
    for step, chosen in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step, steps)
        with torch.enable_grad():
            value = loss(chosen)
            optimizer.zero_grad()
            backward(value)
        optimizer.step()
        losses.append(value.detach())
        epoch_ends = len(losses) == per_epoch or step == steps - 1
        if not epoch_ends and len(losses) % PROGRESS_STEPS:
            continue
        mean = _finite_mean(losses, step)
        if progress is not None:
            progress(step + 1, steps, mean)
        if epoch_ends:
            means.append(mean)
            losses.clear()
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise I2CLError(f"trained parameters are not finite after {steps} steps: {_HINT}")
    return tuple(means)


def _finite_mean(losses: Sequence[Tensor], step: int) -> float:
    mean = torch.stack(list(losses)).mean().item()
    if not math.isfinite(mean):
        raise I2CLError(f"the training loss became {mean} by step {step + 1}: {_HINT}")
    return mean


def minimize_lbfgs(
    parameter: torch.nn.Parameter,
    loss: Callable[[Sequence[int]], Tensor],
    chunks: Sequence[Sequence[int]],
    passes: int,
    proximal_weight: float,
    progress: StepProgress | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[float, ...]:
    """Minimize a deterministic loss by L-BFGS, and leave the parameter at the best point seen.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.optim.LBFGS.html.

    Args:
        parameter: what is trained.
        loss: returns the mean loss of the demonstrations with the given indices, in nats.
        chunks: indices of all demonstrations, in parts that fit into memory.
        passes: maximum number of evaluations.
        proximal_weight: penalty in nats per squared distance of the parameter from its start.
        progress: called after each evaluation.
        dtype: see `train`.

    Returns:
        The mean loss of each evaluation, without the penalty.

    Raises:
        I2CLError: if the loss is not finite.
    """
    start, backward = parameter.detach().clone(), Backward([parameter], dtype)
    best_value, best = math.inf, start
    count = sum(map(len, chunks))
    history: list[float] = []
    optimizer = torch.optim.LBFGS(
        [parameter], max_iter=max(1, passes), max_eval=passes, history_size=20, line_search_fn="strong_wolfe"
    )

    def evaluate() -> Tensor:
        nonlocal best_value, best
        if len(history) == passes:
            raise _OutOfPassesError
        optimizer.zero_grad()
        total = torch.zeros(())
        with torch.enable_grad():
            for chosen in chunks:
                part = loss(chosen) * (len(chosen) / count)
                backward(part)
                total = total.to(part.device) + part.detach()
            penalty = proximal_weight * (parameter - start).square().sum()
            penalty.backward()
        history.append(_finite_mean([total], len(history)))
        value = total + penalty.detach()
        if value.item() < best_value:
            best_value, best = value.item(), parameter.detach().clone()
        if progress is not None:
            progress(len(history), passes, history[-1])
        return value

    with suppress(_OutOfPassesError):
        optimizer.step(evaluate)
    with torch.no_grad():
        parameter.copy_(best)
    return tuple(history)


class _OutOfPassesError(Exception):
    """Stops L-BFGS within a line search, whose evaluations ``max_eval`` does not limit."""


LOSS_SCALE = 2.0**16  # initial loss scale for float16, as in `torch.amp.GradScaler`


class Backward:
    """Gradients of a loss, with loss scaling for float16 models.

    In float16 small gradients underflow, so the loss is scaled up, and the float32 gradients are scaled down
    again. The scale is halved until all gradients are finite
    (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling).
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters = parameters
        self.scale = LOSS_SCALE if dtype == torch.float16 else 1.0

    def __call__(self, value: Tensor) -> None:
        """Add the gradients of a loss to ``grad`` of the parameters."""
        if self.scale == 1.0:
            value.backward()
            return
        for parameter, gradient in zip(self.parameters, self.gradients(value), strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def gradients(self, value: Tensor) -> list[Tensor | None]:
        """Return the gradients of a value and keep its graph; None for parameters it does not depend on."""
        while True:
            scaled: Sequence[Tensor | None] = torch.autograd.grad(
                value * self.scale, self.parameters, retain_graph=True, allow_unused=True
            )
            cannot_shrink = self.scale <= 1.0 or not value.isfinite()
            if cannot_shrink or all(gradient is None or gradient.isfinite().all() for gradient in scaled):
                return [None if gradient is None else gradient / self.scale for gradient in scaled]
            self.scale /= 2


def gold_log_probs(
    decoder: Decoder,
    batch: Batch,
    labels: LabelTokens,
    gold: Sequence[int],
    edit: Edit | None = None,
    prefix: Prefix | None = None,
) -> Float[Tensor, " batch"]:
    """Compute the log-probability of each query's gold label among the labels, in nats.

    Args:
        decoder: the model.
        batch: one row per query.
        labels: for first-token or word-level scoring.
        gold: index of each query's gold label.
        edit: edit of the activations.
        prefix: cached tokens before every query.
    """
    logits = decoder.forward(batch, edit=edit, prefix=prefix)[:, 0].float()
    log_probs = labels.scores(logits).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(gold, device=logits.device)[:, None])[:, 0]
