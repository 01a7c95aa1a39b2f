"""Blocks that are not run again: the same numbers on every model type, and a model as it was."""

import pytest
import torch

from core.test_label_mass import LABELS, QUERIES, edit_of
from fitting import made
from i2cl.core.edits import LinearEdit
from i2cl.models.batching import make_batch
from i2cl.models.edits import Edit, Replay
from tiny import CASES


def above(edit, layer):
    """The same edit from a layer on."""
    values = edit.values.clone()
    values[:layer] = 0
    return LinearEdit(values, edit.coefficients)


class Broken(Edit):
    """Fails at the first writer that runs."""

    def output(self, _layer, _index, _output, _batch):
        raise RuntimeError("broken")


class Vectors(Edit):
    """Adds a trained vector to each writer's output."""

    def __init__(self, values):
        self.values = values

    def output(self, layer, index, output, _batch):
        return output + self.values[layer, index]


@pytest.mark.parametrize("case", CASES)
def test_what_is_given_again_is_what_the_blocks_put_out(case):
    decoder = made(case)
    batch = make_batch(QUERIES, decoder.device)
    edits = [above(edit_of(decoder, size), 1) for size in (0.3, 0.6)]
    replay = Replay(decoder.blocks[:1])
    with decoder.frozen(), torch.no_grad():
        for edit in [*edits, edits[0]]:
            plain = decoder.forward(batch, edit=edit)
            assert torch.equal(decoder.forward(batch, edit=edit, replay=replay), plain)
    assert len(replay.kept) == 1


def test_the_model_is_left_as_found_also_after_an_error():
    decoder = made("llama")
    batch = make_batch(QUERIES, decoder.device)
    replay = Replay(decoder.blocks[:1])
    with decoder.frozen(), torch.no_grad():
        decoder.forward(batch, replay=replay)
        before = [dict(block.__dict__) for block in decoder.blocks]
        with pytest.raises(RuntimeError, match="broken"):
            decoder.forward(batch, edit=Broken(), replay=replay)
    assert [dict(block.__dict__) for block in decoder.blocks] == before
    assert not any(block._forward_hooks for block in decoder.blocks)


def test_each_batch_has_its_own_and_gradients_begin_above():
    decoder = made("llama")
    replay = Replay(decoder.blocks[:1])
    values = torch.nn.Parameter(torch.zeros(decoder.layers, 2, decoder.d_model))
    gradients = []
    with decoder.frozen():
        for ids in (QUERIES[:2], QUERIES[1:], QUERIES[:2], QUERIES[1:]):
            batch = make_batch(ids, decoder.device, rows=[QUERIES.index(one) for one in ids])
            score = decoder.forward(batch, edit=Vectors(values), replay=replay)[:, 0, LABELS[0]].sum()
            gradients += torch.autograd.grad(score, [values])
    assert len(replay.kept) == 2
    for first, again in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(again[1:], first[1:])
        assert first[0].any()
        assert not again[0].any()


def test_blocks_whose_forward_somebody_else_replaced_run_as_they_are():
    decoder = made("llama")
    decoder.blocks[0].forward = decoder.blocks[0].forward  # as Accelerate does
    replay = Replay(decoder.blocks[:1])
    batch = make_batch(QUERIES, decoder.device)
    with decoder.frozen(), torch.no_grad():
        assert torch.equal(decoder.forward(batch, replay=replay), decoder.forward(batch))
    assert not replay.kept


def test_a_batch_of_other_tokens_is_not_answered_with_what_was_kept():
    decoder = made("llama")
    replay = Replay(decoder.blocks[:1])
    with decoder.frozen(), torch.no_grad():
        for shift in (0, 1):
            batch = make_batch([tuple(token + shift for token in ids) for ids in QUERIES], decoder.device)
            plain = decoder.forward(batch)
            assert torch.equal(decoder.forward(batch, replay=replay), plain)
    assert len(replay.kept) == 2
