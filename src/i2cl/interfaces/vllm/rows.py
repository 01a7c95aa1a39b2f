"""From the requests of a batch to the slot of every token, for both of vLLM's model runners."""

from functools import cache
from typing import Any

import numpy as np

from i2cl.interfaces.vllm.slots import PLAIN, digest_of, token_slots
from i2cl.interfaces.vllm.tables import Tables


def forward_v1(original: Any) -> Any:
    """``_model_forward`` of model runner V1, a ``GPUModelRunner``, with the slots of a real batch filled."""

    def forward(
        runner: Any,
        input_ids: Any = None,
        positions: Any = None,
        intermediate_tensors: Any = None,
        inputs_embeds: Any = None,
        **more: Any,
    ) -> Any:
        if hasattr(runner.model, "i2cl_tables"):  # vLLM's wrappers for graphs pass it on
            tables, given = runner.model.i2cl_tables, inputs_embeds if input_ids is None else input_ids
            names = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
            slots = [tables.place(digest_of(runner.requests[name].sampling_params)) for name in names]
            tables.fill(token_slots(slots, runner.query_start_loc.np[: len(names) + 1], len(given)))
        return original(runner, input_ids, positions, intermediate_tensors, inputs_embeds, **more)

    return forward


class RowsV2:
    """What is put in front of model runner V2's state of requests."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)  # type: ignore[call-arg]
        self.i2cl_tables: Tables = model.i2cl_tables
        self.i2cl_places = np.full(vllm_config.scheduler_config.max_num_seqs, PLAIN, dtype=np.int32)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Read a new request's task; a preempted one comes again."""
        super().add_request(req_index, new_req_data)  # type: ignore[misc]
        self.i2cl_places[req_index] = self.i2cl_tables.place(digest_of(new_req_data.sampling_params))

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """Fill the slots before a forward pass, which replays a whole graph or runs one."""
        slots = self.i2cl_places[input_batch.idx_mapping_np[: input_batch.num_reqs]]
        starts = input_batch.query_start_loc_np[: input_batch.num_reqs + 1]
        self.i2cl_tables.fill(token_slots(slots, starts, input_batch.num_tokens_after_padding))
        return super().prepare_inputs(input_batch, req_states)  # type: ignore[misc]


@cache
def model_state() -> type:
    """Model runner V2's default state of requests, with the slots."""
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    return type("InjectedModelState", (RowsV2, DefaultModelState), {"__module__": __name__})
