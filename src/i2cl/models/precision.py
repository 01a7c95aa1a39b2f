"""Precision of weights: dtypes, quantization, and weights that are offloaded to disk.

Sources: https://huggingface.co/docs/transformers/main_classes/quantization and
https://huggingface.co/docs/accelerate/usage_guides/big_modeling.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from i2cl.errors import I2CLError, require_packages

# Quantization in memory: 8 or 4 bits by bitsandbytes, or a quantization config of transformers.
Quantization = Literal["8bit", "4bit"] | QuantizationConfigMixin

HALF_DTYPES = (torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a name such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 matrices in hardware (AVX512_BF16 or AMX).

    PyTorch also runs bfloat16 elsewhere, many times slower than float32. False if oneDNN, which uses these
    instructions, is missing or switched off.
    """
    if not (torch.backends.mkldnn.is_available() and getattr(torch.backends.mkldnn, "enabled", True)):
        return False
    # A lower ATEN_CPU_CAPABILITY limits the instructions that PyTorch may use.
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    checks = [getattr(torch.cpu, name, None) for name in names]  # private, and missing in older versions
    return any(check is not None and check() for check in checks)


def automatic_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the fastest dtype for a checkpoint that keeps its accuracy (``--dtype auto``).

    On an accelerator that is the checkpoint's own. On a CPU, it is bfloat16 for a checkpoint of 16 bits, if
    the CPU has instructions for it, and float32 otherwise.

    Args:
        stored: dtype of the checkpoint's weights.
        device: where the model runs.
    """
    if device.type != "cpu":
        return stored
    return torch.bfloat16 if stored in HALF_DTYPES and cpu_has_bfloat16() else torch.float32


def quantization_config(quantization: Quantization | None, dtype: str | torch.dtype) -> Any:
    """Return the config for transformers: LLM.int8 for ``"8bit"``, NF4 for ``"4bit"``, None for None.

    A config is returned unchanged. 4-bit layers compute in ``dtype``, or with ``"auto"`` in the dtype of
    their input.

    Raises:
        I2CLError: for another name, or if bitsandbytes or accelerate is not installed.
    """
    if quantization is None or isinstance(quantization, QuantizationConfigMixin):
        return quantization
    if quantization not in {"8bit", "4bit"}:
        hint = "choose 8bit or 4bit, or pass a transformers config"
        raise I2CLError(f"unknown quantization {quantization!r}: {hint}")
    require_packages("quantization", "quant", "bitsandbytes", "accelerate")
    if quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = None if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def quantization_of(config: PreTrainedConfig) -> str | None:
    """Return method and bits of a quantized model, such as ``"bitsandbytes 4bit"``, or None."""
    quantization: Any = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    method = settings.get("quant_method", "unknown")
    bits = [f"{number}bit" for number in (4, 8) if settings.get(f"load_in_{number}bit")]
    return " ".join([str(getattr(method, "value", method)), *bits])


def dequantize(module: Any, parameter: Any) -> Tensor | None:
    """Return the values of a quantized parameter, or None if it is not quantized."""
    kind = type(parameter).__name__
    values: Tensor | None = None
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        values = dequantize_4bit(parameter.data, parameter.quant_state)
    elif kind == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        scale = parameter.SCB if parameter.SCB is not None else module.state.SCB  # moved by the first forward
        values = int8_vectorwise_dequant(parameter.data, scale)
    elif type(parameter).__module__.startswith("torchao."):
        values = parameter.dequantize()
    return values


def disable_4bit_repacking(model: PreTrainedModel) -> None:
    """Make bitsandbytes' 4-bit layers differentiable on a CPU, by not repacking their weights.

    On some CPUs the first forward would repack the weights in place for kernels without gradients
    (`bitsandbytes.nn.Linear4bit.forward`).

    Raises:
        I2CLError: if the weights have been repacked already, or for a width that bitsandbytes decodes
            incorrectly on a CPU: its decoder starts a new block in every row, but its encoder does not.
    """
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is None or weight.device.type != "cpu":
            continue
        if getattr(state, "packing_format_for_cpu", False):
            raise I2CLError(
                "this 4-bit model has run before, which has repacked its weights for kernels without "
                "gradients: load it again and create the Decoder first"
            )
        if state.shape[-1] % state.blocksize:
            raise I2CLError(
                f"{name} has {state.shape[-1]} inputs, but on a CPU bitsandbytes decodes 4 bits correctly "
                f"only for multiples of {state.blocksize}: load it in 8bit, or with a torchao config"
            )
        module.support_avx512bf16_for_cpu = False


def execution_device(module: nn.Module) -> torch.device:
    """Return the device that a module with a weight runs on.

    Raises I2CLError if the weight is on the device meta and no hook of Accelerate loads it.
    """
    weight: Any = module.weight
    return torch.device(
        _hook_attribute(module, "execution_device", "weight") if weight.is_meta else weight.device
    )


def offloaded_weight(module: nn.Module, name: str) -> Tensor:
    """Read the values of an offloaded parameter. Raises I2CLError if no hook of Accelerate has them."""
    weight: Tensor = _hook_attribute(module, "weights_map", name)[name]
    return weight


def _hook_attribute(module: nn.Module, attribute: str, name: str) -> Any:
    """Return an attribute of a module's Accelerate hook, or of the first of several that has it."""
    hook = getattr(module, "_hf_hook", None)
    for candidate in getattr(hook, "hooks", (hook,)):
        if (value := getattr(candidate, attribute, None)) is not None:
            return value
    hint = "load the model with Decoder.from_pretrained, or with a device_map"
    raise I2CLError(f"{name} of {type(module).__name__} is on the device meta and has no values: {hint}")
