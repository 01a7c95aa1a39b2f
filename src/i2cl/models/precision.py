"""Weights in 8 or 4 bits, and weights that wait on disk.

Sources: https://huggingface.co/docs/transformers/main_classes/quantization and
https://huggingface.co/docs/accelerate/usage_guides/big_modeling.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.quantization_config import QuantizationConfigMixin

from i2cl.errors import I2CLError, needs

# How weights are held in memory: by bitsandbytes in 8 or 4 bits, or as a config of transformers says.
Quantization = Literal["8bit", "4bit"] | QuantizationConfigMixin


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def quantization_config(wanted: Quantization | None, dtype: str | torch.dtype) -> Any:
    """What transformers is told: LLM.int8 for ``"8bit"``, NF4 for ``"4bit"``, None for None.
    A config is returned as it is; 4-bit layers compute in ``dtype``, or with ``"auto"`` in that of their
    input. Raises I2CLError on another name, or if bitsandbytes or accelerate is lacking.
    """
    if wanted is None or isinstance(wanted, QuantizationConfigMixin):
        return wanted
    if wanted not in {"8bit", "4bit"}:
        cure = "choose 8bit or 4bit, or pass a transformers config"
        raise I2CLError(f"unknown quantization {wanted!r}: {cure}")
    needs("quantization", "quant", "bitsandbytes", "accelerate")
    if wanted == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    compute = None if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)


def quantization_of(config: PreTrainedConfig) -> str | None:
    """Method and bits of a quantized model, such as ``"bitsandbytes 4bit"``; None where it is not."""
    held: Any = getattr(config, "quantization_config", None)
    if held is None:
        return None
    settings = held if isinstance(held, dict) else held.to_dict()
    method = settings.get("quant_method", "unknown")
    bits = [f"{number}bit" for number in (4, 8) if settings.get(f"load_in_{number}bit")]
    return " ".join([str(getattr(method, "value", method)), *bits])


def dequantized(module: Any, parameter: Any) -> Tensor | None:
    """The numbers that a parameter's codes stand for, or None where it holds numbers."""
    kind = type(parameter).__name__
    numbers: Tensor | None = None
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit

        numbers = dequantize_4bit(parameter.data, parameter.quant_state)
    elif kind == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant

        scale = parameter.SCB if parameter.SCB is not None else module.state.SCB  # it moves at the first run
        numbers = int8_vectorwise_dequant(parameter.data, scale)
    elif type(parameter).__module__.startswith("torchao."):
        numbers = parameter.dequantize()
    return numbers


def requantized(parameter: Any, numbers: Tensor, settings: Any) -> Tensor | None:
    """What `dequantized` gives of these numbers' codes, or None where a layer's config has none."""
    kind, there = type(parameter).__name__, numbers.to(parameter.device)
    decoded: Tensor
    if kind == "Params4bit":
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        state = parameter.quant_state
        how = {"blocksize": state.blocksize, "compress_statistics": state.nested}
        how |= {"quant_type": state.quant_type, "quant_storage": parameter.quant_storage}
        decoded = dequantize_4bit(*quantize_4bit(there.to(state.dtype), **how))
    elif kind == "Int8Params":
        from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

        decoded = int8_vectorwise_dequant(*int8_vectorwise_quant(there.half())[:2])
    else:
        from torchao.quantization import quantize_

        layer: Any = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(there, requires_grad=False)
        quantize_(layer, settings.get_apply_tensor_subclass())
        if type(layer.weight) is nn.Parameter:
            return None
        decoded = layer.weight.dequantize()
    return decoded


def settle_4bit(model: PreTrainedModel) -> None:
    """Have bitsandbytes' 4-bit layers on a CPU compute what their codes stand for, with gradients.
    On some CPUs they would repack their codes in place at the first run, for kernels without gradients
    (`bitsandbytes.nn.Linear4bit.forward`). The weights themselves are not changed. Raises I2CLError if that
    has happened, or on widths that bitsandbytes decodes wrongly on a CPU: its decoder starts a new block in
    every row, its encoder does not.
    """
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is None or weight.device.type != "cpu":
            continue
        if getattr(state, "packing_format_for_cpu", False):
            raise I2CLError(
                "this 4-bit model has run before, which has repacked its weights for kernels without "
                "gradients: load it anew and make the Decoder first"
            )
        if state.shape[-1] % state.blocksize:
            raise I2CLError(
                f"{name} takes {state.shape[-1]} inputs, but on a CPU bitsandbytes decodes 4 bits rightly "
                f"only in multiples of {state.blocksize}: load it in 8bit, or with a torchao config"
            )
        module.support_avx512bf16_for_cpu = False


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with a weight runs; raises I2CLError if nothing brings the weight's values."""
    weight: Any = module.weight
    return torch.device(_of_hook(module, "execution_device", "weight") if weight.is_meta else weight.device)


def offloaded_weight(module: nn.Module, name: str) -> Tensor:
    """The values of an offloaded parameter, read from where they are. Raises I2CLError if there are none."""
    weight: Tensor = _of_hook(module, "weights_map", name)[name]
    return weight


def _of_hook(module: nn.Module, field: str, name: str) -> Any:
    """What a hook of Accelerate holds, or one of several."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if (held := getattr(one, field, None)) is not None:
            return held
    cure = "load the model with Decoder.from_pretrained, or with a device_map"
    raise I2CLError(f"{name} of {type(module).__name__} is on the device meta and has no values: {cure}")
