"""Float32 matrix products on processors where PyTorch's own choice is slow.

PyTorch multiplies float32 matrices by MKL, which keeps its AVX-512 kernels for Intel's processors.
oneDNN, which PyTorch holds too, uses them wherever they are: more than twice as fast on AMD's
(docs/performance.md). Results agree to rounding.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SMALLEST = 256  # least rows and columns of a weight: below, the way to oneDNN costs what it saves


@cache
def onednn_pays() -> bool:
    """Whether this processor has AVX-512 that MKL leaves unused, and this PyTorch reaches oneDNN."""
    reachable = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return reachable and torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()


def _is_intel() -> bool:
    """Also where it cannot be told, so that nothing changes there."""
    described = Path("/proc/cpuinfo")
    return not described.exists() or "GenuineIntel" in described.read_text(encoding="utf-8")


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Let oneDNN multiply in the model's frozen float32 linear layers, where that pays.
    Modules of other classes, trained or quantised ones, and those whose ``forward`` somebody else has
    replaced (Accelerate, when it offloads) are left alone, and so is all under autocast, or where oneDNN is
    switched off (`torch.backends.mkldnn.flags`). All is as it was on leaving.
    """
    wanted = onednn_pays() and getattr(torch.backends.mkldnn, "enabled", True)
    swapped = [module for module in model.modules() if _fits(module)] if wanted else []
    for module in swapped:
        module.__dict__["forward"] = _Swapped(module)
    try:
        yield
    finally:
        for module in swapped:
            module.__dict__.pop("forward", None)


def _fits(module: Any) -> bool:
    if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
        return False
    held = [one for one in (module.weight, module.bias) if one is not None]
    plain = all(type(one) is nn.Parameter and type(one.data) is Tensor and _plain(one) for one in held)
    return plain and min(module.weight.shape) >= SMALLEST


def _plain(tensor: Tensor) -> bool:
    """Whether it holds frozen float32 numbers on the CPU."""
    return not tensor.requires_grad and (tensor.device.type, tensor.dtype) == ("cpu", torch.float32)


class _Swapped:
    """What stands in for a module's ``forward``."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        """The product by oneDNN, or the module's own where something has changed meanwhile."""
        weight, bias = self.module.weight, self.module.bias
        plain = _plain(weight) and (bias is None or _plain(bias)) and x.dtype == torch.float32
        if not plain or x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            forward: Callable[..., Tensor] = type(self.module).forward
            return forward(self.module, x)
        weight = weight.t() if type(self.module) is Conv1D else weight
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
            return result
        with torch.no_grad():
            return _product(x, weight, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model multiplies as it always did."""
        return partial(type(self.module).forward, copy.deepcopy(self.module, memo))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  # the one that takes dense float32 tensors
    bias = None if bias is None else bias.contiguous()  # its strides would be ignored
    result: Tensor = product(x, weight, bias, "none", [], "")
    return result


class _Product(torch.autograd.Function):
    """The product by oneDNN in both directions; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _product(gradient, ctx.weight.t(), None), None, None
