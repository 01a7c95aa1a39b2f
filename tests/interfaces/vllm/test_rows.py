"""Token slots and edited outputs for both model runners, with stand-ins for vLLM."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from fitting import one_line
from i2cl.errors import I2CLError
from i2cl.interfaces.vllm.model import Hooked, find_writers
from i2cl.interfaces.vllm.slots import PLAIN, Packed
from i2cl.interfaces.vllm.tables import RowsV2, forward_v1
from i2cl.models.edits import AffineEdit

from .standins import Linear, Llama, batch_v2, params, runner_v1, vllm_config

D = 8


class LlamaForCausalLM(Hooked, Llama):
    """What the plugin makes of vLLM's class."""


class State:
    """``DefaultModelState``."""

    def __init__(self, config, model, encoder_cache, device):
        self.added = []

    def add_request(self, req_index, new_req_data):
        self.added.append(req_index)

    def prepare_inputs(self, input_batch, req_states):
        return {"positions": req_states}


class InjectedState(RowsV2, State):
    """As `i2cl.interfaces.vllm.model.Hooked` makes it."""


def edit(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, D, generator=draw), torch.randn(2, 2, 2, generator=draw)


def packed(seed):
    values, pairs = edit(seed)
    return Packed.of(pairs[..., :1] * values, pairs[..., 1])


@pytest.fixture
def model():
    torch.manual_seed(0)
    result = LlamaForCausalLM(vllm_config=vllm_config())
    for slot, seed in ((2, 10), (5, 11)):
        result.i2cl_tables.write(slot, packed(seed).digest, packed(seed))
    return result


def ready(model):
    """Of a state of requests: three, of which the second is plain; the third is at place 0."""
    state = InjectedState(vllm_config(), model, None, None)
    asked = {3: params(packed(10).digest), 1: params(), 0: params(packed(11).digest)}
    for place, one in asked.items():
        state.add_request(place, SimpleNamespace(sampling_params=one))
    return state


def test_v2_fills_the_slots_of_a_padded_batch_and_reused_indices_forget_their_task(model):
    state = ready(model)
    model.i2cl_tables.slots.fill_(9)
    batch = batch_v2([3, 1, 0], [2, 1, 3], padded=8, requests_padded=4)
    assert state.prepare_inputs(batch, "as before") == {"positions": "as before"}
    assert model.i2cl_tables.slots[:9].tolist() == [2, 2, PLAIN, 5, 5, 5, PLAIN, PLAIN, 9]
    assert state.added == [3, 1, 0]
    state = ready(model)
    state.add_request(3, SimpleNamespace(sampling_params=params()))
    state.prepare_inputs(batch_v2([3, 0], [1, 1], padded=2, requests_padded=2), None)
    assert model.i2cl_tables.slots[:2].tolist() == [PLAIN, 5]


def test_v1_fills_the_slots_of_a_padded_batch(model):
    digests = {"x": packed(11).digest, "y": packed(10).digest, "z": None, "w": "gone"}
    asked = {name: params(digest) for name, digest in digests.items()}
    runner = runner_v1(model, asked, ["y", "z", "x"], [1, 2, 2])
    given = []
    forward = partial(forward_v1, lambda *args, **more: given.append((args, more)))
    model.i2cl_tables.slots.fill_(9)
    forward(runner, torch.zeros(7), "positions", None, None, more=1)
    assert model.i2cl_tables.slots[:8].tolist() == [2, PLAIN, PLAIN, 5, 5, PLAIN, PLAIN, 9]
    assert given[0][0][0] is runner
    assert given[0][0][2:] == ("positions", None, None)
    assert given[0][1] == {"more": 1}
    forward(runner, input_ids=None, positions="positions", inputs_embeds=torch.zeros(5, D))
    assert model.i2cl_tables.slots[:6].tolist() == [2, PLAIN, PLAIN, 5, 5, PLAIN]


def test_v1_ignores_other_models_and_rejects_unwritten_edits(model):
    runner = SimpleNamespace(model=torch.nn.Linear(1, 1))
    assert forward_v1(lambda *args: args[1:], runner, 1, 2, 3, 4) == (1, 2, 3, 4)
    runner = runner_v1(model, {"x": params("gone")}, ["x"], [1])
    one_line("no slot for edit", forward_v1, lambda *args: None, runner, torch.zeros(1))


def test_each_token_is_edited_like_in_the_library(model):
    state = ready(model)
    state.prepare_inputs(batch_v2([3, 1, 0], [2, 1, 3], padded=8, requests_padded=4), None)
    states = torch.randn(8, D)
    for layer, block in enumerate(model.model.layers):
        for index, writer in enumerate((block.self_attn.o_proj, block.mlp.down_proj)):
            plain = torch.nn.functional.linear(states, writer.weight, writer.bias)
            result, bias = writer(states)
            assert bias is None
            for rows, seed in ((slice(0, 2), 10), (slice(3, 6), 11)):
                wanted = AffineEdit.linear(*edit(seed)).output(layer, index, plain[None, rows])[0]
                torch.testing.assert_close(result[rows], wanted)
            assert torch.equal(result[2], plain[2])
            assert torch.equal(result[6:], plain[6:])


def test_plain_rows_are_exact_in_bfloat16(model):
    states = torch.randn(4, D).bfloat16()
    writer = model.model.layers[0].mlp.down_proj.bfloat16()
    model.i2cl_tables.slots.fill_(PLAIN)
    plain = torch.nn.functional.linear(states, writer.weight, writer.bias)
    for name in ("i2cl_rows", "i2cl_scales"):  # which .bfloat16() has rounded, as vLLM never does
        setattr(writer, name, getattr(writer, name).float())
    result, _ = writer(states)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, plain)


def test_tables_keep_their_addresses_and_stay_out_of_checkpoints(model):
    tables = model.i2cl_tables
    writer = tables.writers[0]
    before = [one.data_ptr() for one in (writer.i2cl_rows, writer.i2cl_scales, tables.slots)]
    tables.write(2, packed(12).digest, packed(12))
    assert before == [one.data_ptr() for one in (writer.i2cl_rows, writer.i2cl_scales, tables.slots)]
    assert all(one.i2cl_slots is tables.slots for one in tables.writers)
    assert not [name for name in model.state_dict() if "i2cl" in name]
    assert packed(10).digest not in tables.places
    assert tables.place(packed(12).digest) == 2
    assert writer.i2cl_rows[PLAIN].eq(0).all()
    assert writer.i2cl_scales[PLAIN] == 1


def test_restored_tables_have_what_was_saved(model):
    tables = model.i2cl_tables
    before = [(writer.i2cl_rows.clone(), writer.i2cl_scales.clone()) for writer in tables.writers]
    tables.save()
    for writer in tables.writers:  # memory that was unmapped and mapped again
        writer.i2cl_rows.fill_(torch.nan)
        writer.i2cl_scales.fill_(torch.nan)
    tables.slots.fill_(9)
    tables.restore()
    for writer, (rows, scales) in zip(tables.writers, before, strict=True):
        assert torch.equal(writer.i2cl_rows, rows)
        assert torch.equal(writer.i2cl_scales, scales)
    assert tables.slots.eq(PLAIN).all()


def test_a_second_restore_changes_nothing(model):
    tables = model.i2cl_tables
    tables.save()
    tables.restore()
    tables.write(2, packed(12).digest, packed(12))
    written = tables.writers[0].i2cl_rows.clone()
    tables.restore()
    assert torch.equal(tables.writers[0].i2cl_rows, written)


def test_another_depth_and_partial_sums_are_rejected(model):
    with pytest.raises(I2CLError, match="edits 2 residual writers, and the model has 4"):
        model.i2cl_tables.write(1, "x", Packed.of(torch.zeros(1, 2, D), torch.ones(1, 2)))

    class Part(Linear):
        reduce_results = False

    model = Llama(vllm_config=vllm_config())
    model.model.layers[1].mlp.down_proj = Part(D, D)
    one_line("partial sum", find_writers, model, "LlamaForCausalLM")
