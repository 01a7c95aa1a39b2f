"""Does a block add what its two residual writers put out, and nothing else?"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from i2cl.errors import I2CLError
from i2cl.models.architectures import Architecture
from i2cl.models.edits import edit_inputs, edit_outputs

TOLERANCE = 1e-4  # largest error of the residual identity, relative to the largest change a block makes


@dataclass(frozen=True)
class ResidualIdentity:
    """How well ``block_out - block_in = scale * (attention + mlp)`` holds.

    Attributes:
        errors: per layer, the largest absolute error over the largest absolute change that the block
            makes. What rounding in the model's own precision explains is not counted, so that one
            tolerance serves every dtype.
    """

    errors: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest error of any layer; not a number if any activation is not finite."""
        return float(torch.tensor(self.errors, dtype=torch.float64).max())

    @property
    def passed(self) -> bool:
        """Whether the worst error is at most `TOLERANCE`."""
        return self.worst <= TOLERANCE


def residual_identity(
    model: PreTrainedModel, architecture: Architecture, input_ids: Int[Tensor, "batch tokens"]
) -> ResidualIdentity:
    """Run the base model once and test that the two writers are all that each block adds.
    The model is to be in evaluation mode: dropout counts as an error. The order of the two writers is not
    tested, since their sum does not show it. Raises I2CLError if a path is wrong, or leads to a module that
    is never run or has another width.
    """
    kept: dict[tuple[int, str], Tensor] = {}

    def keep(layer: int, part: str, value: Tensor) -> None:
        kept[layer, part] = value.detach().to("cpu", copy=True)  # Falcon adds in place

    blocks = architecture.blocks(model)
    inputs = [(block, partial(keep, layer, "input")) for layer, block in enumerate(blocks)]
    outputs = [(block, partial(keep, layer, "output")) for layer, block in enumerate(blocks)]
    for layer, pair in enumerate(architecture.writers(model)):
        outputs += [(pair[0], partial(keep, layer, "attention")), (pair[1], partial(keep, layer, "mlp"))]
    with torch.no_grad(), edit_inputs(inputs), edit_outputs(outputs):
        model.base_model(input_ids=input_ids, use_cache=False)
    parts, scale = ("input", "attention", "mlp", "output"), architecture.writer_scale(model.config)
    errors = []
    for layer, block in enumerate(blocks):
        for part in parts:
            value = kept.get((layer, part))
            if value is None or value.numel() != kept[layer, "input"].numel():
                what = "was never run" if value is None else f"has shape {tuple(value.shape)}"
                raise I2CLError(
                    f"{part!r} of layer {layer} {what}: pass an Architecture whose paths lead to modules "
                    f"of {type(block).__name__} that write to its residual stream"
                )
        errors.append(_error(*(kept[layer, part] for part in parts), scale=scale))
    return ResidualIdentity(tuple(errors))


def _error(
    before: Float[Tensor, "batch tokens d"],
    attention: Float[Tensor, "..."],
    mlp: Float[Tensor, "..."],
    after: Float[Tensor, "batch tokens d"],
    *,
    scale: float,
) -> float:
    # Adding up rounds each of at most four intermediate results by half an epsilon of its size.
    rounding = 2 * torch.finfo(after.dtype).eps
    start, end = before.double(), after.double()
    first, second = (scale * writer.double().reshape(start.shape) for writer in (attention, mlp))  # OPT: 2-D
    change = end - start
    error = (change - first - second).abs() - rounding * (start.abs() + first.abs() + second.abs())
    largest = change.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float(error.clamp(min=0).max() / largest)
