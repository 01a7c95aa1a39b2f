"""What may look at a decoder's layers or change what they write.

Source: paper, section "Context Injection", which changes what the residual writers put out.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from i2cl.models.batching import Batch

Site = Literal["writers", "hidden"]
"""What is captured and edited: the two residual writers of a layer, or its block output."""


class Edit:
    """Changes what a decoder's layers write. Subclasses override `output` and, if need be, `enter`.

    Attributes:
        site: the two residual writers (index 0 attention, 1 MLP), the block output (index 0), or what the LM
            head reads where logits are asked for (layer: the number of blocks, index 0).
        sees_input: whether `enter` is to be called.
    """

    site: Site | Literal["head"] = "writers"
    sees_input: bool = False

    def enter(self, layer: int, residual: Float[Tensor, "lines tokens d"]) -> None:
        """Look at the residual stream that enters a block."""

    def output(
        self, layer: int, index: int, output: Float[Tensor, "lines tokens d"], batch: Batch
    ) -> Float[Tensor, "lines tokens d"] | None:
        """Return what replaces ``output`` (never edit in place), or None to leave it."""
        raise NotImplementedError


class Keep(Edit):
    """Copies what is put out at one token of each row, in the order of the sites, and changes nothing.

    Attributes:
        kept: one (batch x d) tensor a site.
    """

    def __init__(self, site: Site, at: Int[Tensor, " batch"]) -> None:
        self.site = site
        self.at = at
        self.kept: list[Tensor] = []

    def output(
        self, _layer: int, _index: int, output: Float[Tensor, "lines tokens d"], _batch: Batch
    ) -> None:
        """Copy it."""
        row = torch.arange(len(output), device=output.device)
        self.kept.append(output[row, self.at.to(output.device)])  # a copy, also where the block adds in place
