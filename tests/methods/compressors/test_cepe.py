"""CEPE against results of the released code."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from compressed import ALIKE, CLOSE, golden, with_compressor
from fitting import hooks, one_line
from i2cl import Decoder, Example
from i2cl.methods.compressors.cepe import context_encoder
from i2cl.models.batching import make_batch, pack_batch
from i2cl.models.encoding import TruncationWarning


@pytest.fixture(scope="module")
def release():
    return golden("cepe")


@pytest.fixture(scope="module")
def own(decoder):
    return context_encoder(decoder)


@torch.no_grad()
def after(decoder, edit, rows, prefix=None):
    """Return the logits after the last token of each row."""
    return decoder.forward(make_batch(rows, decoder.device), edit=edit, prefix=prefix)[:, 0]


@torch.no_grad()
def states(own, chunks):
    return own.states(chunks)


def test_states_logits_and_losses_match_the_release(own, release, decoder):
    torch.testing.assert_close(states(own, release.shown_ids), release["encoder_states"], **CLOSE)
    alone = replace(own, budget=1)
    torch.testing.assert_close(states(alone, release.shown_ids), release["encoder_states"], **CLOSE)
    cases = {
        "query_logits": own.edit(release["encoder_states"]),
        "query_logits_one_chunk": own.edit(states(own, [release.context])),
        "query_logits_plain": own.edit(release["encoder_states"][:0]),
    }
    for name, edit in cases.items():
        torch.testing.assert_close(after(decoder, edit, release.queries), release[name], **CLOSE)
    edit = own.edit(states(own, release.shown_ids[2:]))
    front = sum(release.shown_ids[:2], ())
    result = after(decoder, edit, [front + ids for ids in release.queries])
    torch.testing.assert_close(result, release["query_logits_two_in_decoder"], **CLOSE)
    edit = own.edit(release["encoder_states"])
    row = release.queries[0] + release.labels[1]
    batch = make_batch([row], decoder.device)
    with torch.no_grad():
        table = decoder.forward(batch, at=torch.arange(len(row))[None], edit=edit)[0]
    loss = torch.nn.functional.cross_entropy(table[:-1], torch.tensor(row[1:]))
    torch.testing.assert_close(loss[None], release["lm_loss"], **CLOSE)
    first = after(decoder, edit, release.queries).log_softmax(-1)[:, [ids[0] for ids in release.labels]]
    torch.testing.assert_close(first, release["option_loglikelihood"], **CLOSE)


@pytest.mark.parametrize("budget", [1, 60, 1024], ids=["one-by-one", "few", "all"])
@pytest.mark.parametrize(("in_decoder", "name"), [(0, "query_logits"), (2, "query_logits_two_in_decoder")])
def test_scores_match_the_release_for_every_batch_size(decoder, release, budget, in_decoder, name):
    decoder.token_budget = budget
    predictor = release.fitted(decoder, "cepe", in_decoder=str(in_decoder))
    result = predictor.log_probs(release.record["queries"])
    torch.testing.assert_close(result, release.expected(name), **CLOSE)
    uncached = replace(predictor, prefix=None)
    torch.testing.assert_close(uncached.log_probs(release.record["queries"]), result, **ALIKE)
    shared = predictor.prefix
    assert (shared is None) == (in_decoder == 0)
    keys = 2 * 3 * 16 * shared.length if shared else 0
    assert predictor.cost.cached_values == 16 * len(predictor.edit.states) + keys
    assert predictor.cost.trained == 0


def test_packed_padded_and_single_rows_agree(decoder, own, release):
    edit = own.edit(release["encoder_states"])
    with torch.no_grad():
        packed = decoder.forward(pack_batch(release.queries, decoder.device), edit=edit)[:, 0]
    alone = torch.cat([after(decoder, edit, [ids]) for ids in release.queries])
    torch.testing.assert_close(packed, release["query_logits"], **CLOSE)
    torch.testing.assert_close(after(decoder, edit, release.queries), alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_long_demonstrations_are_cut_to_their_last_tokens(decoder, release):
    shown = [release.shown[0], Example("a long film " * 100, 0)]
    with pytest.warns(TruncationWarning, match="parity: 1 of 2 demonstrations were cut to their last 256"):
        predictor = release.fitted(decoder, "cepe", shown=shown)
    assert len(predictor.edit.states) == len(release.shown_ids[0]) + 256


def test_hooks_are_removed_after_an_error(decoder, own, release):
    before = after(decoder, None, release.queries)
    with pytest.raises(IndexError):
        after(decoder, own.edit(release["encoder_states"]), [(10**6,)])
    assert hooks(decoder.model) == 0
    assert torch.equal(after(decoder, None, release.queries), before)


def changed(folder, release, tensors=None, **settings):
    """A copy of the release with other tensors or settings."""
    config = AutoConfig.from_pretrained(release.folder)
    for name, value in settings.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    whole = load_file(release.folder / "model.safetensors") | (tensors or {})
    whole = {name: value for name, value in whole.items() if value is not None}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return release.decoder(folder)


LAST, NORM = "model.layers.2.cross_attn.o_proj.weight", "encoder.norm.weight"


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({LAST: None}, {}, f"has no tensor {LAST}"),
        ({NORM: torch.ones(15)}, {}, rf"{NORM} .* has shape \(15,\), but this model needs \(16\)"),
        ({}, {"num_cross_attn_layers": 3}, "has no tensor model.layers.0.cross_attn.layernorm.weight"),
        (
            {},
            {"num_cross_attn_layers": 4},
            "has no encoder_config, or no num_cross_attn_layers from 1 to 3",
        ),
    ],
)
def test_incomplete_or_mismatched_checkpoints_are_refused(release, tmp_path, tensors, settings, message):
    one_line(message, release.fitted, changed(tmp_path, release, tensors, **settings), "cepe")


def test_encoder_is_cached_per_model_and_dtype(tmp_path):
    decoder = with_compressor("cepe", tmp_path)
    assert context_encoder(decoder) is context_encoder(Decoder(decoder.model, decoder.tokenizer))
    assert context_encoder(decoder).encoder.dtype == torch.float32
    decoder.model.to(torch.bfloat16)
    half = Decoder(decoder.model, decoder.tokenizer)
    assert context_encoder(half).encoder.dtype == torch.bfloat16
