"""Gradients that survive their way through a model in float16."""

from collections.abc import Sequence

import torch
from torch import Tensor

LOSS_SCALE = 2.0**16
"""First factor of a float16 model's loss, as that of `torch.amp.GradScaler`."""


class Backward:
    """Gradients of a loss that flow back through a model in some precision.

    In float16 small gradients become 0 on their way, so the loss is scaled up and the gradients, which
    arrive in float32, are scaled down. A scale at which something exceeds float16 is halved until
    nothing does (https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling).

    Attributes:
        scale: of the loss; always 1 but for float16.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype | None = None) -> None:
        self.parameters = parameters
        self.scale = LOSS_SCALE if dtype == torch.float16 else 1.0

    def __call__(self, value: Tensor) -> None:
        """Add the gradients of a loss to those that the parameters have."""
        if self.scale == 1.0:
            value.backward()
            return
        gradients = self._scaled(value)
        while self.scale > 1.0 and value.isfinite() and not _finite(gradients):
            self.scale /= 2
            gradients = self._scaled(value)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                found = gradient / self.scale
                parameter.grad = found if parameter.grad is None else parameter.grad + found

    def _scaled(self, value: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(value * self.scale, self.parameters, retain_graph=True, allow_unused=True)


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(one is None or bool(one.isfinite().all()) for one in gradients)
