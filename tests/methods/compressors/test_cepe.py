"""CEPE against results of the released code."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from compressed import CLOSE, golden, with_compressor
from fitting import raises
from i2cl import Decoder, Example
from i2cl.methods.compressors.cepe import context_encoder
from i2cl.models.batching import make_batch, pack_batch
from i2cl.models.encoding import TruncationWarning


@pytest.fixture(scope="module")
def release():
    return golden("cepe")


def test_encoder_states_match_the_release(decoder, release):
    own = context_encoder(decoder)
    assert own is context_encoder(decoder), "the encoder is loaded once"
    for encoder in (own, replace(own, budget=1)):
        with torch.no_grad():
            result = encoder.states(release.shown_ids)
        torch.testing.assert_close(result, release["encoder_states"], **CLOSE)


@pytest.mark.parametrize("budget", [1, 60, 1024], ids=["one-by-one", "few", "all"])
def test_scores_match_the_release_for_every_batch_size(decoder, release, budget):
    decoder.token_budget = budget
    predictor = release.fitted(decoder, "cepe")
    result = predictor.log_probs(release.record["queries"])
    torch.testing.assert_close(result, release.expected("query_logits"), **CLOSE)
    assert predictor.cost.cached_values == 16 * len(predictor.edit.states)
    assert predictor.cost.trained == 0


def test_packed_and_padded_rows_agree(decoder, release):
    edit = release.fitted(decoder, "cepe").edit
    with torch.no_grad():
        batches = (make(release.queries, decoder.device) for make in (make_batch, pack_batch))
        for batch in batches:
            result = decoder.forward(batch, edit=edit)[:, 0]
            torch.testing.assert_close(result, release["query_logits"], **CLOSE)


def test_long_demonstrations_are_cut_to_their_last_tokens(decoder, release):
    shown = [release.shown[0], Example("a long film " * 100, 0)]
    with pytest.warns(TruncationWarning, match="parity: 1 of 2 demonstrations were cut to their last 256"):
        predictor = release.fitted(decoder, "cepe", shown=shown)
    assert len(predictor.edit.states) == len(release.shown_ids[0]) + 256


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
    raises(message, release.fitted, changed(tmp_path, release, tensors, **settings), "cepe")


def test_an_encoder_is_loaded_once_per_dtype_and_does_not_keep_its_model(tmp_path):
    decoder = with_compressor("cepe", tmp_path)
    assert context_encoder(decoder) is context_encoder(Decoder(decoder.model, decoder.tokenizer))
    decoder.model.to(torch.bfloat16)
    half = Decoder(decoder.model, decoder.tokenizer)
    assert context_encoder(half).encoder.dtype == torch.bfloat16
    model = weakref.ref(decoder.model)
    del decoder, half
    gc.collect()
    assert model() is None
