"""Worker side with stand-ins for vLLM: token slots and edited outputs for both model runners."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fitting import raises
from i2cl import ExtractConfig
from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.support import digest_of
from i2cl.interfaces.vllm.worker import (
    PLAIN,
    EditedModel,
    EditTables,
    PackedEdit,
    SlotState,
    find_sublayers,
    wrap_model_forward,
    write_edit,
)
from i2cl.models.edits import AffineEdit

from .standins import Linear, Llama, batch_v2, injection_for, params, runner_v1, vllm_config

D = 8


class LlamaForCausalLM(EditedModel, Llama):
    """vLLM's class with edits."""


class State:
    """``DefaultModelState``."""

    def __init__(self, config, model, encoder_cache, device):
        self.added = []

    def add_request(self, req_index, new_req_data):
        self.added.append(req_index)

    def prepare_inputs(self, input_batch, req_states):
        return {"positions": req_states}


class EditedState(SlotState, State):
    """The state that `EditedModel.get_model_state_cls` returns."""


def edit(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, D, generator=draw), torch.randn(2, 2, 2, generator=draw)


def packed(seed):
    values, pairs = edit(seed)
    return PackedEdit.of(pairs[..., :1] * values, pairs[..., 1])


@pytest.fixture
def model():
    torch.manual_seed(0)
    result = LlamaForCausalLM(vllm_config=vllm_config())
    for slot, seed in ((2, 10), (5, 11)):
        result.i2cl_tables.write(slot, packed(seed).digest, packed(seed))
    return result


def state_of_requests(model):
    """Return the state of three requests at the indices 3, 1 and 0; the one at index 1 is plain."""
    state = EditedState(vllm_config(), model, None, None)
    requests = {3: params(packed(10).digest), 1: params(), 0: params(packed(11).digest)}
    for index, parameters in requests.items():
        state.add_request(index, SimpleNamespace(sampling_params=parameters))
    return state


def test_v2_fills_slots_of_padded_batches_and_clears_reused_indices(model):
    state = state_of_requests(model)
    model.i2cl_tables.token_slots.fill_(9)
    batch = batch_v2([3, 1, 0], [2, 1, 3], padded=8, requests_padded=4)
    assert state.prepare_inputs(batch, "as before") == {"positions": "as before"}
    assert model.i2cl_tables.token_slots[:9].tolist() == [2, 2, PLAIN, 5, 5, 5, PLAIN, PLAIN, 9]
    assert state.added == [3, 1, 0]
    state = state_of_requests(model)
    state.add_request(3, SimpleNamespace(sampling_params=params()))
    state.prepare_inputs(batch_v2([3, 0], [1, 1], padded=2, requests_padded=2), None)
    assert model.i2cl_tables.token_slots[:2].tolist() == [PLAIN, 5]


def test_v1_fills_the_slots_of_a_padded_batch(model):
    digests = {"x": packed(11).digest, "y": packed(10).digest, "z": None, "w": "gone"}
    asked = {name: params(digest) for name, digest in digests.items()}
    runner = runner_v1(model, asked, ["y", "z", "x"], [1, 2, 2])
    given = []
    forward = partial(wrap_model_forward, lambda *args, **more: given.append((args, more)))
    model.i2cl_tables.token_slots.fill_(9)
    forward(runner, torch.zeros(7), "positions", None, None, more=1)
    assert model.i2cl_tables.token_slots[:8].tolist() == [2, PLAIN, PLAIN, 5, 5, PLAIN, PLAIN, 9]
    assert given[0][0][0] is runner
    assert given[0][0][2:] == ("positions", None, None)
    assert given[0][1] == {"more": 1}
    forward(runner, input_ids=None, positions="positions", inputs_embeds=torch.zeros(5, D))
    assert model.i2cl_tables.token_slots[:6].tolist() == [2, PLAIN, PLAIN, 5, 5, PLAIN]


def test_v1_ignores_other_models_and_rejects_unwritten_edits(model):
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert wrap_model_forward(lambda *args: args[1:], runner, 1, 2, 3, 4) == (1, 2, 3, 4)
    runner = runner_v1(model, {"x": params("gone")}, ["x"], [1])
    raises("no edit gone", wrap_model_forward, lambda *args: None, runner, torch.zeros(1))


def test_each_token_is_edited_like_in_the_library(model):
    state = state_of_requests(model)
    state.prepare_inputs(batch_v2([3, 1, 0], [2, 1, 3], padded=8, requests_padded=4), None)
    states = torch.randn(8, D)
    for layer, block in enumerate(model.model.layers):
        for index, sublayer in enumerate((block.self_attn.o_proj, block.mlp.down_proj)):
            plain = torch.nn.functional.linear(states, sublayer.weight, sublayer.bias)
            result, bias = sublayer(states)
            assert bias is None
            for rows, seed in ((slice(0, 2), 10), (slice(3, 6), 11)):
                wanted = AffineEdit.linear(*edit(seed)).output(layer, index, plain[None, rows])[0]
                torch.testing.assert_close(result[rows], wanted)
            assert torch.equal(result[2], plain[2])
            assert torch.equal(result[6:], plain[6:])


def test_plain_rows_are_exact_in_bfloat16(model):
    states = torch.randn(4, D).bfloat16()
    sublayer = model.model.layers[0].mlp.down_proj.bfloat16()
    model.i2cl_tables.token_slots.fill_(PLAIN)
    plain = torch.nn.functional.linear(states, sublayer.weight, sublayer.bias)
    for name in ("i2cl_rows", "i2cl_scales"):  # which .bfloat16() has rounded, as vLLM never does
        setattr(sublayer, name, getattr(sublayer, name).float())
    result, _ = sublayer(states)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, plain)


def test_tables_keep_their_addresses_and_stay_out_of_checkpoints(model):
    tables = model.i2cl_tables
    sublayer = tables.sublayers[0]
    before = [one.data_ptr() for one in (sublayer.i2cl_rows, sublayer.i2cl_scales, tables.token_slots)]
    tables.write(2, packed(12).digest, packed(12))
    assert before == [
        one.data_ptr() for one in (sublayer.i2cl_rows, sublayer.i2cl_scales, tables.token_slots)
    ]
    assert all(sublayer.i2cl_slots is tables.token_slots for sublayer in tables.sublayers)
    assert not [name for name in model.state_dict() if "i2cl" in name]
    assert packed(10).digest not in tables.slot_of
    assert tables.slot_of[packed(12).digest] == 2
    assert sublayer.i2cl_rows[PLAIN].eq(0).all()
    assert sublayer.i2cl_scales[PLAIN] == 1


def test_restored_tables_have_what_was_saved(model):
    tables = model.i2cl_tables
    before = [(sublayer.i2cl_rows.clone(), sublayer.i2cl_scales.clone()) for sublayer in tables.sublayers]
    tables.save()
    for sublayer in tables.sublayers:  # memory that was unmapped and mapped again
        sublayer.i2cl_rows.fill_(torch.nan)
        sublayer.i2cl_scales.fill_(torch.nan)
    tables.token_slots.fill_(9)
    tables.restore()
    for sublayer, (rows, scales) in zip(tables.sublayers, before, strict=True):
        assert torch.equal(sublayer.i2cl_rows, rows)
        assert torch.equal(sublayer.i2cl_scales, scales)
    assert tables.token_slots.eq(PLAIN).all()
    tables.write(2, packed(12).digest, packed(12))
    written = tables.sublayers[0].i2cl_rows.clone()
    tables.restore()  # a second time
    assert torch.equal(tables.sublayers[0].i2cl_rows, written)


def test_another_depth_and_partial_sums_are_rejected(model):
    with pytest.raises(I2CLError, match="edits 2 sublayers, but the model has 4"):
        model.i2cl_tables.write(1, "x", PackedEdit.of(torch.zeros(1, 2, D), torch.ones(1, 2)))

    class Part(Linear):
        reduce_results = False

    model = Llama(vllm_config=vllm_config())
    model.model.layers[1].mlp.down_proj = Part(D, D)
    raises("partial sum", find_sublayers, model, "LlamaForCausalLM")


def test_failed_write_returns_its_error_and_leaves_the_worker_usable():
    tables = EditTables([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], 3, 4, 8)
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=SimpleNamespace(i2cl_tables=tables)))
    for layers, width, error in ((2, 4, "edits 4 sublayers"), (1, 3, "RuntimeError")):
        wrong = PackedEdit.of(torch.ones(layers, 2, width), torch.ones(layers, 2))
        assert error in write_edit(worker, 1, wrong.digest, wrong.rows, wrong.scales)
        assert not tables.slot_of
    right = PackedEdit.of(torch.ones(1, 2, 4), torch.zeros(1, 2))
    assert write_edit(worker, 1, right.digest, right.rows, right.scales) is None
    assert tables.slot_of == {right.digest: 1}


def test_digest_depends_on_the_edit_only(decoder, task):
    injection = injection_for(decoder, task)
    packed = PackedEdit.of_injection(injection)
    renamed = replace(injection, task=replace(task, name="other"))
    assert packed.digest == PackedEdit.of_injection(renamed).digest
    scaled = replace(injection, coefficients=injection.coefficients * torch.tensor([2.0, 1.0]))
    assert packed.digest != PackedEdit.of_injection(scaled).digest
    assert packed.digest != PackedEdit.of_injection(injection_for(decoder, task, seed=1)).digest
    rows, scales = packed.tensors(decoder.d_model)
    torch.testing.assert_close(rows[2], injection.coefficients[1, 0, 0] * injection.context[1, 0])
    torch.testing.assert_close(scales, injection.coefficients[..., 1].flatten())


def test_plain_requests_have_no_digest():
    assert digest_of(params()) is None
    assert digest_of(params(other=1)) is None
    assert digest_of(object()) is None  # parameters of a pooling request
    assert digest_of(params("abc")) == "abc"


def test_unsupported_injections_are_rejected(decoder, task):
    injection = injection_for(decoder, task)
    raises("on positions 'last'", PackedEdit.of_injection, replace(injection, positions="last"))
    hidden = {"context": injection.context[:, :1], "coefficients": injection.coefficients[:, :1]}
    hidden = replace(injection, extraction=ExtractConfig(sublayers="hidden"), **hidden)
    with pytest.raises(I2CLError, match="block outputs"):
        PackedEdit.of_injection(hidden)
