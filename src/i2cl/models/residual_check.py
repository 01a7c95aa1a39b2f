"""Check that blocks add the outputs of their two sublayers, and nothing else."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from i2cl.errors import I2CLError
from i2cl.models.architectures import Architecture
from i2cl.models.edits import edit_inputs, edit_outputs

TOLERANCE = 1e-4  # maximum error, relative to the largest change that a block makes


@dataclass(frozen=True)
class ResidualIdentity:
    """Error of the equation ``block_out - block_in = scale * (attention + mlp)``.

    Attributes:
        errors: for each layer, the largest absolute error divided by the largest absolute change that the
            block makes. Rounding error of the model's precision is subtracted, so one tolerance is valid for
            every dtype.
    """

    errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """Largest error of all layers; NaN if an activation is not finite."""
        return float(torch.tensor(self.errors, dtype=torch.float64).max())

    @property
    def passed(self) -> bool:
        """Whether the worst error is at most `TOLERANCE`."""
        return self.worst <= TOLERANCE


def residual_identity(
    model: PreTrainedModel, architecture: Architecture, input_ids: Int[Tensor, "batch tokens"]
) -> ResidualIdentity:
    """Run the base model once and measure the error of the residual identity.

    The model must be in evaluation mode, since dropout would count as an error. Swapped sublayers are not
    detected, since only their sum is compared.

    Args:
        model: the model.
        architecture: locations of its sublayers.
        input_ids: token ids to run.

    Raises:
        I2CLError: if a path of the architecture does not exist, or leads to a module that is not run or whose
            output has another width.
    """
    captured: dict[tuple[int, str], Tensor] = {}

    def capture(layer: int, part: str, value: Tensor) -> None:
        captured[layer, part] = value.detach().to("cpu", copy=True)  # Falcon adds in place

    blocks = architecture.blocks(model)
    inputs = [(block, partial(capture, layer, "input")) for layer, block in enumerate(blocks)]
    outputs = [(block, partial(capture, layer, "output")) for layer, block in enumerate(blocks)]
    for layer, (attention, mlp) in enumerate(architecture.sublayers(model)):
        outputs.append((attention, partial(capture, layer, "attention")))
        outputs.append((mlp, partial(capture, layer, "mlp")))
    with torch.no_grad(), edit_inputs(inputs), edit_outputs(outputs):
        model.base_model(input_ids=input_ids, use_cache=False)
    parts, scale = ("input", "attention", "mlp", "output"), architecture.sublayer_scale(model.config)
    errors = []
    for layer, block in enumerate(blocks):
        for part in parts:
            value = captured.get((layer, part))
            if value is None or value.numel() != captured[layer, "input"].numel():
                problem = "was never run" if value is None else f"has shape {tuple(value.shape)}"
                raise I2CLError(
                    f"{part!r} of layer {layer} {problem}: pass an Architecture whose paths lead to modules "
                    f"of {type(block).__name__} that write to its residual stream"
                )
        errors.append(_relative_error(*(captured[layer, part] for part in parts), scale=scale))
    return ResidualIdentity(tuple(errors))


def _relative_error(
    before: Float[Tensor, "batch tokens d"],
    attention: Float[Tensor, "..."],
    mlp: Float[Tensor, "..."],
    after: Float[Tensor, "batch tokens d"],
    *,
    scale: float,
) -> float:
    # Each of up to four intermediate sums is rounded by half an epsilon of its size.
    rounding = 2 * torch.finfo(after.dtype).eps
    block_input, block_output = before.double(), after.double()
    # OPT's MLP output is 2-D
    scaled_attention, scaled_mlp = (
        scale * sublayer.double().reshape(block_input.shape) for sublayer in (attention, mlp)
    )
    change = block_output - block_input
    size = block_input.abs() + scaled_attention.abs() + scaled_mlp.abs()
    error = (change - scaled_attention - scaled_mlp).abs() - rounding * size
    largest = change.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float(error.clamp(min=0).max() / largest)
