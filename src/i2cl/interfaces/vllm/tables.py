"""The buffers that the edit reads: one row a slot behind every residual writer, and the slot of every token.

Addresses never change, so captured and compiled graphs go on when tasks come and go.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.slots import PLAIN, Packed


class Tables:
    """The buffers of a model's residual writers: one row a slot, and the slot of every token.

    They are registered on the writers, where tracing finds them, and in no checkpoint.
    """

    def __init__(self, writers: list[nn.Module], count: int, d: int, tokens: int) -> None:
        self.writers = writers  # in the order of a context vector's [layer, (mha, mlp)]
        self.slots = torch.full((tokens,), PLAIN, dtype=torch.int32)  # of every token of the batch that runs
        self.places: dict[str, int] = {}  # slot of each edit that was written, by digest
        for writer in writers:
            writer.register_buffer("i2cl_rows", torch.zeros(count + 1, d), persistent=False)
            writer.register_buffer("i2cl_scales", torch.ones(count + 1), persistent=False)
            writer.register_buffer("i2cl_slots", self.slots, persistent=False)
            writer.register_forward_hook(edit_hook)

    def write(self, slot: int, digest: str, packed: Packed) -> None:
        """Fill a slot that no running request has. Raises I2CLError on another number of writers."""
        first: Any = self.writers[0]
        rows, scales = packed.tensors(first.i2cl_rows.shape[1])
        if not len(rows) == len(scales) == len(self.writers):
            raise I2CLError(
                f"this task edits {len(scales)} residual writers, and the model has {len(self.writers)}"
            )
        self.places = {other: place for other, place in self.places.items() if place != slot}
        for writer, row, scale in zip(self.writers, rows, scales, strict=True):
            held: Any = writer
            held.i2cl_rows[slot].copy_(row)
            held.i2cl_scales[slot].copy_(scale)
        self.places[digest] = slot

    def place(self, digest: str | None) -> int:
        """The slot of a request's edit. Raises I2CLError if it was not written: the ledger rules that out."""
        if digest is None:
            return PLAIN
        if digest not in self.places:
            message = f"the edit {digest} is in no slot of this worker: restart the server and report this"
            raise I2CLError(message)
        return self.places[digest]

    def fill(self, slots: NDArray[np.int32]) -> None:
        """Say which slot every token of the next batch has, without waiting for the device."""
        copy = torch.from_numpy(slots)
        if self.slots.device.type == "cuda":
            copy = copy.pin_memory()  # new memory each time: the last copy may still be on its way
        self.slots[: len(copy)].copy_(copy, non_blocking=True)


def edit_hook(writer: nn.Module, _inputs: Any, output: Any) -> Any:
    """Forward hook of a writer: ``lambda v + beta a`` of each token's slot, in float32."""
    written = output[0] if isinstance(output, tuple) else output
    held: Any = writer
    slots = held.i2cl_slots[: written.shape[0]]
    rows = held.i2cl_rows.index_select(0, slots)
    scales = held.i2cl_scales.index_select(0, slots)[:, None]
    mixed = torch.addcmul(rows, scales, written.float()).to(written.dtype)
    return (mixed, *output[1:]) if isinstance(output, tuple) else mixed
