"""Replay of lower blocks: equal outputs on every model type, and a restored model."""

import pytest
import torch

from core.test_label_mass import LABELS, QUERIES, edit_of
from fitting import new_decoder
from i2cl.models.batching import make_batch
from i2cl.models.edits import AffineEdit, Edit, Replay
from tiny import CASES


def above(edit, layer):
    """Another edit, applied from a layer on."""
    shift = edit.shift.clone()
    shift[:layer] = 0
    return AffineEdit(shift, edit.scale)


class Broken(Edit):
    """Fails at the first sublayer that runs."""

    def output(self, _layer, _index, _output, _batch):
        raise RuntimeError("broken")


class Vectors(Edit):
    """Adds a trained vector to each sublayer's output."""

    def __init__(self, values):
        self.values = values

    def output(self, layer, index, output, _batch):
        return output + self.values[layer, index]


@pytest.mark.parametrize("case", CASES)
def test_replayed_outputs_match_those_of_the_blocks(case):
    decoder = new_decoder(case)
    batch = make_batch(QUERIES, decoder.device)
    edits = [above(edit_of(decoder, size), 1) for size in (0.3, 0.6)]
    replay = Replay(decoder.blocks[:1])
    with decoder.frozen(), torch.no_grad():
        for edit in [*edits, edits[0]]:
            plain = decoder.forward(batch, edit=edit)
            assert torch.equal(decoder.forward(batch, edit=edit, replay=replay), plain)
    assert len(replay.streams) == 1


def test_model_is_restored_also_after_an_error():
    decoder = new_decoder("llama")
    batch = make_batch(QUERIES, decoder.device)
    replay = Replay(decoder.blocks[:1])
    with decoder.frozen(), torch.no_grad():
        decoder.forward(batch, replay=replay)
        before = [dict(block.__dict__) for block in decoder.blocks]
        with pytest.raises(RuntimeError, match="broken"):
            decoder.forward(batch, edit=Broken(), replay=replay)
    assert [dict(block.__dict__) for block in decoder.blocks] == before
    assert not any(block._forward_hooks for block in decoder.blocks)


def test_batches_are_replayed_separately_without_gradients_below():
    decoder = new_decoder("llama")
    replay = Replay(decoder.blocks[:1])
    values = torch.nn.Parameter(torch.zeros(decoder.layers, 2, decoder.d_model))
    gradients = []
    with decoder.frozen():
        for ids in (QUERIES[:2], QUERIES[1:], QUERIES[:2], QUERIES[1:]):
            batch = make_batch(ids, decoder.device, rows=[QUERIES.index(one) for one in ids])
            score = decoder.forward(batch, edit=Vectors(values), replay=replay)[:, 0, LABELS[0]].sum()
            gradients += torch.autograd.grad(score, [values])
    assert len(replay.streams) == 2
    for first, again in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(again[1:], first[1:])
        assert first[0].any()
        assert not again[0].any()


def test_blocks_with_a_replaced_forward_are_not_skipped():
    decoder = new_decoder("llama")
    decoder.blocks[0].forward = decoder.blocks[0].forward  # as Accelerate does
    replay = Replay(decoder.blocks[:1])
    batch = make_batch(QUERIES, decoder.device)
    with decoder.frozen(), torch.no_grad():
        assert torch.equal(decoder.forward(batch, replay=replay), decoder.forward(batch))
    assert not replay.streams


def test_batch_of_other_tokens_is_not_replayed():
    decoder = new_decoder("llama")
    replay = Replay(decoder.blocks[:1])
    with decoder.frozen(), torch.no_grad():
        for shift in (0, 1):
            batch = make_batch([tuple(token + shift for token in ids) for ids in QUERIES], decoder.device)
            plain = decoder.forward(batch)
            assert torch.equal(decoder.forward(batch, replay=replay), plain)
    assert len(replay.streams) == 2
