"""Fast float32 matrix products on AMD CPUs with AVX-512.

PyTorch multiplies float32 matrices with MKL, which uses its AVX-512 kernels on Intel CPUs only. oneDNN, which
PyTorch includes too, uses them on all CPUs and is about twice as fast on AMD's (docs/performance.md). Results
agree to rounding. Other CPUs, dtypes and devices are not affected.
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

MIN_SIZE = 256  # rows and columns of a weight; for smaller ones, the call costs as much as it saves


@cache
def onednn_pays() -> bool:
    """Return whether the CPU has AVX-512 that MKL does not use, and this PyTorch has oneDNN."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return available and torch.backends.cpu.get_cpu_capability() == "AVX512" and not _is_intel()


def _is_intel() -> bool:
    """Return whether the CPU is Intel's, or its vendor is unknown."""
    path = Path("/proc/cpuinfo")
    return not path.exists() or "GenuineIntel" in path.read_text(encoding="utf-8")


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """Use oneDNN in the model's frozen float32 linear layers inside the block, if it is faster on this CPU.

    Does not change subclasses of linear layers, trained or quantized layers, and layers whose ``forward`` has
    been replaced (by Accelerate, when it offloads). Has no effect under autocast, or if oneDNN is switched
    off (`torch.backends.mkldnn.flags`).
    """
    enabled = onednn_pays() and getattr(torch.backends.mkldnn, "enabled", True)
    swapped = [module for module in model.modules() if _can_swap(module)] if enabled else []
    for module in swapped:
        module.__dict__["forward"] = _OneDNNForward(module)
    try:
        yield
    finally:
        for module in swapped:
            module.__dict__.pop("forward", None)


def _can_swap(module: Any) -> bool:
    if type(module) not in (nn.Linear, Conv1D) or "forward" in module.__dict__:
        return False
    tensors = [tensor for tensor in (module.weight, module.bias) if tensor is not None]
    return min(module.weight.shape) >= MIN_SIZE and all(
        type(tensor) is nn.Parameter and type(tensor.data) is Tensor and _is_frozen_float32(tensor)
        for tensor in tensors
    )


def _is_frozen_float32(tensor: Tensor) -> bool:
    """Return whether a tensor is float32, on the CPU, and without gradient."""
    return not tensor.requires_grad and (tensor.device.type, tensor.dtype) == ("cpu", torch.float32)


class _OneDNNForward:
    """Replacement for ``module.forward``."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply with oneDNN, or with the module's own forward if the module has changed since."""
        weight, bias = self.module.weight, self.module.bias
        frozen = _is_frozen_float32(weight) and (bias is None or _is_frozen_float32(bias))
        if (
            not frozen
            or x.dtype != torch.float32
            or x.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        ):
            forward: Callable[..., Tensor] = type(self.module).forward
            return forward(self.module, x)
        weight = weight.t() if type(self.module) is Conv1D else weight
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
            return result
        with torch.no_grad():
            return _product(x, weight, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Give a copy of the model the plain forward."""
        return partial(type(self.module).forward, copy.deepcopy(self.module, memo))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - no public function takes dense float32
    bias = None if bias is None else bias.contiguous()  # oneDNN would ignore its strides
    result: Tensor = product(x, weight, bias, "none", [], "")
    return result


class _Product(torch.autograd.Function):
    """oneDNN's product with a frozen weight, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _product(gradient, ctx.weight.t(), None), None, None
