"""Runs a model that is stored in lower precision in float32, a weight at a time.

``model.float()`` needs twice the memory of a checkpoint in bfloat16. Here every operation gets float32
copies of its arguments (`torch.overrides.TorchFunctionMode`,
https://docs.pytorch.org/docs/stable/torch.overrides.html), which are gone when it is done.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LOWER = (torch.bfloat16, torch.float16)
ROWS = 8192  # rows of a weight that are in float32 at one time: of a large head, not all


class Upcast(TorchFunctionMode):
    """While it is on, what is stored in bfloat16 or float16 is computed with in float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` on float32 arguments. What it changes in place stays as it is."""
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is functional.embedding:
            return _raised(func(*args, **named))
        if func is functional.linear and args[1].dtype in LOWER:
            return _linear(*args, **named)
        if name == "__get__":  # its dtype is told to be float32, since blocks cast activations to it
            value = func(*args, **named)
            return torch.float32 if isinstance(value, torch.dtype) and value in LOWER else value
        if name in {"__set__", "__setitem__"} or (name.endswith("_") and name[-2:] != "__"):
            return func(*args, **named)
        return func(*tree_map(_raised, args), **tree_map(_raised, named))


def _raised(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOWER else value


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    parts = [functional.linear(_raised(inputs), rows.float()) for rows in weight.split(ROWS)]
    product = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
    return product if bias is None else product + bias.float()
