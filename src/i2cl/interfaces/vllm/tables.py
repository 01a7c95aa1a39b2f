"""Task tables: per residual writer one row and one scale for each slot, and the slot of every token.

Buffer addresses never change, so captured and compiled graphs stay valid when tasks are loaded or dropped.
Both of vLLM's model runners fill the token slots from the requests of a batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.slots import PLAIN, Packed, digest_of, token_slots


class Tables:
    """Buffers of the residual writers.

    They are registered on the writers, where tracing finds them, and are not saved in checkpoints.

    Args:
        writers: residual writers in the order of [layer, (mha, mlp)].
        count: number of slots, without the one of plain requests.
        d: width of the residual stream.
        tokens: maximum number of tokens in a batch.
    """

    def __init__(self, writers: list[nn.Module], count: int, d: int, tokens: int) -> None:
        self.writers: list[Any] = writers
        self.slots = torch.full(
            (tokens,), PLAIN, dtype=torch.int32
        )  # slot of every token in the current batch
        self.places: dict[str, int] = {}  # slot of each written edit, by digest
        self._saved: list[tuple[Tensor, Tensor]] = []  # host copies of rows and scales during sleep
        for writer in writers:
            writer.register_buffer("i2cl_rows", torch.zeros(count + 1, d), persistent=False)
            writer.register_buffer("i2cl_scales", torch.ones(count + 1), persistent=False)
            writer.register_buffer("i2cl_slots", self.slots, persistent=False)
            writer.register_forward_hook(edit_hook)

    def write(self, slot: int, digest: str, packed: Packed) -> None:
        """Write an edit into a slot that no running request uses.

        Raises I2CLError if the edit was made for another number of residual writers.
        """
        rows, scales = packed.tensors(self.writers[0].i2cl_rows.shape[1])
        if not len(rows) == len(scales) == len(self.writers):
            message = f"this task edits {len(scales)} residual writers, and the model has {len(self.writers)}"
            raise I2CLError(message)
        self.places = {other: place for other, place in self.places.items() if place != slot}
        for writer, row, scale in zip(self.writers, rows, scales, strict=True):
            writer.i2cl_rows[slot].copy_(row)
            writer.i2cl_scales[slot].copy_(scale)
        self.places[digest] = slot

    def save(self) -> None:
        """Copy rows and scales to the host."""
        self._saved = [
            (writer.i2cl_rows.to("cpu", copy=True), writer.i2cl_scales.to("cpu", copy=True))
            for writer in self.writers
        ]

    def restore(self) -> None:
        """Copy saved rows and scales back, and free the copies. Has no effect without `save`."""
        for writer, (rows, scales) in zip(self.writers, self._saved, strict=False):
            writer.i2cl_rows.copy_(rows)
            writer.i2cl_scales.copy_(scales)
        if self._saved:
            self.slots.fill_(PLAIN)
        self._saved = []

    def place(self, digest: str | None) -> int:
        """Return the slot of an edit. Raises I2CLError if it was never written, which the ledger prevents."""
        if digest is None:
            return PLAIN
        if digest not in self.places:
            message = f"this worker has no slot for edit {digest}: restart the server and report this"
            raise I2CLError(message)
        return self.places[digest]

    def fill(self, slots: NDArray[np.int32]) -> None:
        """Set the slot of every token in the next batch, without waiting for the device."""
        copy = torch.from_numpy(slots)
        if self.slots.device.type == "cuda":
            copy = copy.pin_memory()  # new memory each time: the previous copy may still be running
        self.slots[: len(copy)].copy_(copy, non_blocking=True)


def edit_hook(writer: nn.Module, _inputs: Any, output: Any) -> Any:
    """Forward hook of a residual writer: ``lambda v + beta a`` with each token's slot, in float32."""
    written = output[0] if isinstance(output, tuple) else output
    buffers: Any = writer
    slots = buffers.i2cl_slots[: written.shape[0]]
    rows = buffers.i2cl_rows.index_select(0, slots)
    scales = buffers.i2cl_scales.index_select(0, slots)[:, None]
    edited = torch.addcmul(rows, scales, written.float()).to(written.dtype)
    return (edited, *output[1:]) if isinstance(output, tuple) else edited


def forward_v1(
    original: Callable[..., Any],
    runner: Any,
    input_ids: Any = None,
    positions: Any = None,
    intermediate_tensors: Any = None,
    inputs_embeds: Any = None,
    **more: Any,
) -> Any:
    """Wrap ``GPUModelRunner._model_forward`` (model runner V1) to fill the token slots of the batch."""
    if hasattr(runner.model, "i2cl_tables"):  # also through vLLM's CUDA graph wrappers
        tables, inputs = runner.model.i2cl_tables, inputs_embeds if input_ids is None else input_ids
        names = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        slots = [tables.place(digest_of(runner.requests[name].sampling_params)) for name in names]
        tables.fill(token_slots(slots, runner.query_start_loc.np[: len(names) + 1], len(inputs)))
    return original(runner, input_ids, positions, intermediate_tensors, inputs_embeds, **more)


class RowsV2:
    """Mixin for the request state of model runner V2 that tracks each request's slot."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        self.i2cl_tables: Tables = model.i2cl_tables
        self.i2cl_places = np.full(vllm_config.scheduler_config.max_num_seqs, PLAIN, dtype=np.int32)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Look up the slot of a new or resumed request."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.i2cl_places[req_index] = self.i2cl_tables.place(digest_of(new_req_data.sampling_params))

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """Fill the token slots before a forward pass, eager or captured."""
        slots = self.i2cl_places[input_batch.idx_mapping_np[: input_batch.num_reqs]]
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1]
        self.i2cl_tables.fill(token_slots(slots, starts, input_batch.num_tokens_after_padding))
        return super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
