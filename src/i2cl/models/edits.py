"""What may look at a decoder's layers or change what they write.

Source: paper, section "Context Injection", which changes what the residual writers put out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from i2cl.models.batching import Batch
from i2cl.models.hooks import Hook, edit_inputs, edit_outputs
from i2cl.models.restore import uninterrupted

# What a layer reads or writes; a line is a row of the batch, or all of its rows where they are packed.
States = Float[Tensor, "lines tokens d"]
# What is captured and edited: the two residual writers of a layer, or its block output.
Site = Literal["writers", "hidden"]
Places = Callable[[Site], list[tuple[int, int, nn.Module]]]  # layer, index and module of what a site names


class Edit:
    """Changes what a decoder's layers write. Subclasses override `output` and, if need be, `enter`.

    Attributes:
        site: the two residual writers (index 0 attention, 1 MLP), the block output (index 0), or the tokens'
            input embeddings (layer 0, index 0).
        sees_input: whether `enter` is to be called.
        everywhere: whether it does the same at every token, whatever stands at others, so that a row may
            run in parts, the later ones behind cached keys.
    """

    site: Site | Literal["embeddings"] = "writers"
    sees_input: bool = False
    everywhere: bool = False

    def enter(self, layer: int, residual: States) -> None:
        """Look at the residual stream that enters a block."""

    def output(self, layer: int, index: int, output: States, batch: Batch) -> States | None:
        """Return what replaces ``output`` (never edit in place), or None to leave it."""
        raise NotImplementedError


class Keep(Edit):
    """Copies what is put out at one token of each row: ``kept`` has one (batch x d) tensor a site."""

    def __init__(self, site: Site, at: Int[Tensor, " batch"]) -> None:
        self.site = site
        self.at = at
        self.kept: list[Tensor] = []

    def output(self, _layer: int, _index: int, output: States, _batch: Batch) -> None:
        """Copy it."""
        row = torch.arange(len(output), device=output.device)
        self.kept.append(output[row, self.at.to(output.device)])  # a copy, also where the block adds in place


@uninterrupted
def editing(
    edit: Edit | None, model: Any, blocks: Sequence[nn.Module], places: Places, batch: Batch
) -> Iterator[None]:
    """Let an edit work on a model while the block runs."""
    if edit is None:
        yield
        return
    looks: list[tuple[nn.Module, Hook]] = []
    changes: list[tuple[nn.Module, Hook]] = []
    if edit.site == "embeddings":
        changes = [(model.get_input_embeddings(), lambda vectors: edit.output(0, 0, vectors, batch))]
    else:
        changes = [
            (module, partial(_changed, edit, layer, at, batch)) for layer, at, module in places(edit.site)
        ]
        entries = enumerate(blocks) if edit.sees_input else ()
        looks = [(block, partial(edit.enter, layer)) for layer, block in entries]
    with edit_inputs(looks), edit_outputs(changes):
        yield


def _changed(edit: Edit, layer: int, index: int, batch: Batch, output: Tensor) -> Tensor | None:
    rows, width = batch.input_ids.shape
    changed = edit.output(layer, index, output.view(rows, width, -1), batch)  # OPT's fc2 is 2-D
    return None if changed is None else changed.view(output.shape)
