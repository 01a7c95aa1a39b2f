"""Models whose weights accelerate keeps away from where they run, on the CPU or on disk.

Source: https://huggingface.co/docs/accelerate/concept_guides/big_model_inference. The weights of such a
module are on the device "meta", and its hook (`accelerate.hooks.AlignDevicesHook`) brings them for every run.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from i2cl.errors import I2CLError


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with a weight runs, which is not where an offloaded weight is.

    Raises:
        I2CLError: if the weight has no values and nothing brings them.
    """
    weight: Any = module.weight
    if not weight.is_meta:
        return torch.device(weight.device)
    for hook in _hooks(module):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    raise _no_values(module, "weight")


def offloaded_weight(module: nn.Module, name: str) -> Tensor:
    """The values of an offloaded parameter, read from where they are.

    Raises:
        I2CLError: if there are none.
    """
    for hook in _hooks(module):
        weights = getattr(hook, "weights_map", None)
        if weights is not None:
            found: Tensor = weights[name]
            return found
    raise _no_values(module, name)


def _hooks(module: nn.Module) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", (hook,))


def _no_values(module: nn.Module, name: str) -> I2CLError:
    return I2CLError(
        f"{name} of {type(module).__name__} is on the device meta and has no values: load the model with "
        "Decoder.from_pretrained, or with a device_map"
    )
