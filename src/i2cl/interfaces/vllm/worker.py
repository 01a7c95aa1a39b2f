"""Worker side of the plugin: model classes with per-token edits, and the tables of edits that they read.

Every sublayer has a table with one row and one scale per slot; slot 0 is the identity edit, for plain
requests and padding. Before each forward pass, the model runner (V1 or V2) fills in the slot of every token.
Buffer addresses never change, so compiled and captured graphs stay valid when tasks are loaded or dropped.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export.folding import require_foldable
from i2cl.interfaces.vllm.support import SUBLAYERS, digest_of, plugin_settings

PLAIN = 0  # slot of padding and of tokens without a task


@dataclass(frozen=True, eq=False)
class PackedEdit:
    """Edit of a task, as bytes that can be sent to any process."""

    rows: bytes  # float32 ``lambda v`` of every sublayer, in the order of [layer, (mha, mlp)]
    scales: bytes  # float32 beta, in the same order

    @classmethod
    def of(cls, rows: Float[Tensor, "layers 2 d"], scales: Float[Tensor, "layers 2"]) -> "PackedEdit":
        """Pack the tensors of an edit."""
        return cls(*(values.float().cpu().contiguous().numpy().tobytes() for values in (rows, scales)))

    @classmethod
    def of_injection(cls, injection: Injection) -> "PackedEdit":
        """Pack an injection. Raises I2CLError unless it edits the sublayers' outputs at all positions."""
        require_foldable(injection)
        edit = injection.affine_edit()
        return cls.of(edit.shift, edit.scale)

    @cached_property
    def digest(self) -> str:
        """Hash of the edit (32 hex digits). Tasks with the same edit share a slot and cached prefixes."""
        return hashlib.sha256(self.scales + self.rows).hexdigest()[:32]

    def tensors(self, d: int) -> tuple[Float[Tensor, "sublayers d"], Float[Tensor, " sublayers"]]:
        """Unpack rows and scales for a model of width ``d``."""
        read = partial(torch.frombuffer, dtype=torch.float32)
        return read(bytearray(self.rows)).view(-1, d), read(bytearray(self.scales))


class EditTables:
    """Rows and scales of all sublayers.

    The buffers are registered on the sublayers, where tracing finds them, and are not saved in checkpoints.

    Args:
        sublayers: in the order of [layer, (mha, mlp)].
        count: number of slots, without slot 0.
        d: width of the residual stream.
        tokens: maximum number of tokens in a batch.
    """

    def __init__(self, sublayers: list[nn.Module], count: int, d: int, tokens: int) -> None:
        self.sublayers: list[Any] = sublayers
        self.token_slots = torch.full((tokens,), PLAIN, dtype=torch.int32)  # of the current batch
        self.slot_of: dict[str, int] = {}  # by digest of the edit
        self._saved: list[tuple[Tensor, Tensor]] = []  # host copies of rows and scales during sleep
        for sublayer in sublayers:
            sublayer.register_buffer("i2cl_rows", torch.zeros(count + 1, d), persistent=False)
            sublayer.register_buffer("i2cl_scales", torch.ones(count + 1), persistent=False)
            sublayer.register_buffer("i2cl_slots", self.token_slots, persistent=False)
            sublayer.register_forward_hook(apply_edit)

    def write(self, slot: int, digest: str, edit: PackedEdit) -> None:
        """Write an edit into a slot that no running request uses.

        Raises I2CLError if the edit was made for another number of sublayers.
        """
        rows, scales = edit.tensors(self.sublayers[0].i2cl_rows.shape[1])
        if not len(rows) == len(scales) == len(self.sublayers):
            message = f"this task edits {len(scales)} sublayers, but the model has {len(self.sublayers)}"
            raise I2CLError(f"{message}: fit it on this model")
        self.slot_of = {other: taken for other, taken in self.slot_of.items() if taken != slot}
        for sublayer, row, scale in zip(self.sublayers, rows, scales, strict=True):
            sublayer.i2cl_rows[slot].copy_(row)
            sublayer.i2cl_scales[slot].copy_(scale)
        self.slot_of[digest] = slot

    def save(self) -> None:
        """Copy rows and scales to the host."""
        self._saved = [
            (sublayer.i2cl_rows.to("cpu", copy=True), sublayer.i2cl_scales.to("cpu", copy=True))
            for sublayer in self.sublayers
        ]

    def restore(self) -> None:
        """Copy saved rows and scales back, and free the copies. Has no effect without `save`."""
        for sublayer, (rows, scales) in zip(self.sublayers, self._saved, strict=False):
            sublayer.i2cl_rows.copy_(rows)
            sublayer.i2cl_scales.copy_(scales)
            self.token_slots.fill_(PLAIN)
        self._saved = []

    def slot(self, params: Any) -> int:
        """Return the slot of a request, given its ``SamplingParams``.

        Raises I2CLError if its edit was never written, which the engine core prevents.
        """
        digest = digest_of(params)
        if digest is None:
            return PLAIN
        if digest not in self.slot_of:
            raise I2CLError(f"this worker has no edit {digest}: restart the server and report this")
        return self.slot_of[digest]

    def fill(
        self,
        slots: Sequence[int] | Int[np.ndarray, " requests"],
        starts: Int[np.ndarray, " requests_and_1"],
        size: int,
    ) -> None:
        """Set the slot of every token in the next batch, without waiting for the device.

        Args:
            slots: slot of each request, in batch order.
            starts: offset of each request's first token, then the total number of tokens.
            size: number of tokens including padding, which gets slot 0.
        """
        per_token: NDArray[np.int32] = np.full(size, PLAIN, dtype=np.int32)
        per_token[: starts[-1]] = np.repeat(np.asarray(slots, dtype=np.int32), np.diff(starts))
        source = torch.from_numpy(per_token)
        if self.token_slots.device.type == "cuda":
            source = source.pin_memory()  # new memory each time: the previous copy may still be running
        self.token_slots[:size].copy_(source, non_blocking=True)


def apply_edit(sublayer: nn.Module, _inputs: Any, output: Any) -> Any:
    """Forward hook of a sublayer: ``lambda v + beta a`` with each token's slot, in float32."""
    hidden = output[0] if isinstance(output, tuple) else output
    buffers: Any = sublayer
    slots = buffers.i2cl_slots[: hidden.shape[0]]
    rows = buffers.i2cl_rows.index_select(0, slots)
    scales = buffers.i2cl_scales.index_select(0, slots)[:, None]
    edited = torch.addcmul(rows, scales, hidden.float()).to(hidden.dtype)
    return (edited, *output[1:]) if isinstance(output, tuple) else edited


def write_edit(worker: Any, slot: int, digest: str, rows: bytes, scales: bytes) -> str | None:
    """Write an edit into the tables of a vLLM worker. Return an error message, or None on success.

    Never raises: after an exception in one worker, vLLM stops reading replies and would take the other ranks'
    replies as the results of its next call.
    """
    try:
        worker.model_runner.model.i2cl_tables.write(slot, digest, PackedEdit(rows, scales))
    except I2CLError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - returned to the core, which raises it
        return f"{type(error).__name__} ({error}): see the server log, then load the task again"
    return None


def save_tables(worker: Any) -> None:
    """Copy the tables of a vLLM worker to the host, before sleep."""
    worker.model_runner.model.i2cl_tables.save()


def restore_tables(worker: Any) -> None:
    """Copy the tables of a vLLM worker back, after sleep."""
    worker.model_runner.model.i2cl_tables.restore()


class EditedModel:
    """Mixin for vLLM model classes that registers the edit tables."""

    i2cl_tables: EditTables

    def __init__(self, *, vllm_config: Any, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)  # type: ignore[call-arg]
        self.i2cl_tables = EditTables(
            find_sublayers(self, type(self).__name__),
            plugin_settings(vllm_config)["slots"],
            vllm_config.model_config.get_hidden_size(),
            vllm_config.scheduler_config.max_num_batched_tokens,
        )

    def get_model_state_cls(self) -> Any:
        """Return the class that model runner V2 uses for the state of requests: its default, with slots."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        return type("EditedModelState", (SlotState, DefaultModelState), {"__module__": __name__})


def find_sublayers(model: Any, architecture: str) -> list[nn.Module]:
    """Return the sublayers of a vLLM model, in the order of [layer, (mha, mlp)].

    Raises I2CLError if a sublayer's output is not reduced over all ranks, or excludes its bias.
    """
    paths = SUBLAYERS[architecture]
    blocks = model.get_submodule(paths.blocks)
    sublayers = [block.get_submodule(path) for block in blocks for path in (paths.attention, paths.mlp)]
    for sublayer in sublayers:
        if not sublayer.reduce_results or sublayer.skip_bias_add:
            raise I2CLError(
                f"{type(sublayer).__name__} of {architecture} returns a partial sum, which cannot be edited: "
                "serve the task with InjectionPool, or as a folded checkpoint"
            )
    return sublayers


@cache
def __getattr__(name: str) -> Any:
    """Create the edited class of an architecture when vLLM's model registry imports it."""
    if name not in SUBLAYERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    paths = SUBLAYERS[name]
    base = getattr(import_module(f"vllm.model_executor.models.{paths.module}"), paths.name)
    return type(name, (EditedModel, base), {"__module__": __name__, "__doc__": f"{paths.name} with edits."})


def wrap_model_forward(
    original: Callable[..., Any],
    runner: Any,
    input_ids: Any = None,
    positions: Any = None,
    intermediate_tensors: Any = None,
    inputs_embeds: Any = None,
    **options: Any,
) -> Any:
    """Wrap ``GPUModelRunner._model_forward`` (model runner V1) to fill in the slots of the batch."""
    if hasattr(runner.model, "i2cl_tables"):  # also through vLLM's CUDA graph wrappers
        tables, inputs = runner.model.i2cl_tables, inputs_embeds if input_ids is None else input_ids
        names = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
        slots = [tables.slot(runner.requests[name].sampling_params) for name in names]
        tables.fill(slots, runner.query_start_loc.np[: len(names) + 1], len(inputs))
    return original(runner, input_ids, positions, intermediate_tensors, inputs_embeds, **options)


class SlotState:
    """Mixin for the request state of model runner V2 that remembers each request's slot."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        self.i2cl_tables: EditTables = model.i2cl_tables
        self.i2cl_slots = np.full(vllm_config.scheduler_config.max_num_seqs, PLAIN, dtype=np.int32)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Look up the slot of a new or resumed request."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.i2cl_slots[req_index] = self.i2cl_tables.slot(new_req_data.sampling_params)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """Fill in the slots before a forward pass, eager or captured."""
        count = input_batch.num_reqs
        slots, starts = self.i2cl_slots[input_batch.idx_mapping_np[:count]], input_batch.query_start_loc_np
        self.i2cl_tables.fill(slots, starts[: count + 1], input_batch.num_tokens_after_padding)
        return super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]
