"""One training loop and one schedule for everything that is trained, from coefficients to adapters."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from i2cl.errors import I2CLError

StepProgress = Callable[[int, int, float], None]
"""Called after each epoch with steps done, steps in all and the epoch's mean loss in nats."""


_CURE = "lower the noise or the learning rate, or load the model in float32"


class TrainConfig(BaseModel):
    """Optimiser and schedule (paper, section "Experimental Setup").

    Attributes:
        epochs: passes over the demonstrations.
        batch_size: queries a step (the paper is silent; released code).
        draw: shuffle once an epoch, or draw each step's batch afresh (released code).
        lr: first learning rate of AdamW.
        lr_final: the rate that the cosine ends at.
        warmup: share of the steps over which the rate first rises from 0 (released code).
        weight_decay: of AdamW (the paper is silent; released code).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(100, ge=0)
    batch_size: int = Field(2, ge=1)
    draw: Literal["epoch", "step"] = "epoch"
    lr: float = Field(1e-2, gt=0)
    lr_final: float = Field(1e-5, ge=0)
    warmup: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(1e-3, ge=0)

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at an optimiser step: warm-up if any, then a cosine over all steps."""
        rising = int(self.warmup * steps)
        if rising and step <= rising:
            return self.lr * step / rising
        return self.lr_final + (self.lr - self.lr_final) * (1 + math.cos(math.pi * step / steps)) / 2

    def batches(self, count: int, seed: int) -> list[list[int]]:
        """Demonstration indices of every step."""
        return list(self._batches(count, random.Random(seed)))

    def _batches(self, count: int, picker: random.Random) -> Iterator[list[int]]:
        order = list(range(count))
        for _ in range(self.epochs):
            if self.draw == "step":
                for _ in range(max(1, count // self.batch_size)):
                    yield picker.sample(order, min(self.batch_size, count))
            else:
                picker.shuffle(order)
                for start in range(0, count, self.batch_size):
                    yield order[start : start + self.batch_size]


def train(
    parameters: Sequence[torch.nn.Parameter],
    loss: Callable[[Sequence[int]], Tensor],
    batches: Sequence[Sequence[int]],
    config: TrainConfig,
    progress: StepProgress | None = None,
) -> tuple[float, ...]:
    """Take one AdamW step per batch.

    Args:
        parameters: what is trained.
        loss: mean loss of the demonstrations with these indices, in nats.
        batches: indices of every step.
        config: rates and decay.
        progress: called after each epoch.

    Returns:
        Mean loss of each epoch.

    Raises:
        I2CLError: at the end of an epoch whose loss is not finite.
    """
    optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    steps = len(batches)
    per_epoch = max(1, steps // max(1, config.epochs))
    history: list[float] = []
    losses: list[Tensor] = []
    with torch.enable_grad():
        for step, chosen in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step, steps)
            value = loss(chosen)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.detach())
            if len(losses) == per_epoch or step == steps - 1:
                history.append(_finite_mean(losses, step))
                losses.clear()
                if progress is not None:
                    progress(step + 1, steps, history[-1])
    if not all(parameter.isfinite().all() for parameter in parameters):
        raise I2CLError(f"what was trained is not finite after {steps} steps: {_CURE}")
    return tuple(history)


def _finite_mean(losses: Sequence[Tensor], step: int) -> float:
    mean = torch.stack(list(losses)).mean().item()
    if not math.isfinite(mean):
        raise I2CLError(f"the training loss became {mean} by step {step + 1}: {_CURE}")
    return mean
