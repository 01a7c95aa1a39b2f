"""An artefact that an earlier version saved loads, and answers as it did."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from i2cl import Decoder, I2CLError, Injection
from i2cl.core.injection import UncheckedWarning
from i2cl.models.loading import load_model_and_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "format1"
RECORD = json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference", device="cpu")


@pytest.mark.parametrize("name", ["plain", "classes"])
def test_an_artefact_of_before_answers_as_it_did(decoder, name):
    """``classes`` holds two more tensors, class by class, of which the context vector is the sum."""
    injection = Injection.from_pretrained(FOLDER / name)
    with pytest.warns(UncheckedWarning, match="configuration, buffers and .* were not checked; fit it again"):
        injection.require_base(decoder)
    with pytest.warns(UncheckedWarning):
        found = injection.scores(decoder, RECORD["texts"])
    torch.testing.assert_close(found, torch.tensor(RECORD[name]))
    assert injection.context.demonstrations == 20


def test_another_model_is_refused_as_far_as_the_artefact_tells():
    injection = Injection.from_pretrained(FOLDER / "plain")
    model, tokenizer = load_model_and_tokenizer("reference", device="cpu")
    model.config.rms_norm_eps = 1e-5  # not told
    with pytest.warns(UncheckedWarning):
        injection.require_base(Decoder(model, tokenizer))
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(I2CLError, match=r"\(tokenizer '50226ec6729a99db' and not"):
        injection.require_base(Decoder(model, tokenizer))
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(I2CLError, match=r"\(weights 'bfce94915951f9e0' and not"):
        injection.scores(Decoder(model, tokenizer), ["a text"])


def test_what_is_made_now_belongs_to_the_same_model(decoder):
    """Where both kinds meet, sizes and type are compared alone."""
    old = Injection.from_pretrained(FOLDER / "plain")
    assert old.base.difference(decoder.base) is None
    assert "layers" in old.base.difference(replace(decoder.base, layers=5))
    assert (old.context + replace(old.context, base=decoder.base)).base == old.base
    old.context.require_base(decoder)


def test_saved_again_it_is_the_same(tmp_path):
    injection = Injection.from_pretrained(FOLDER / "plain")
    injection.save_pretrained(tmp_path / "again")
    stored = [
        json.loads((one / "injection.json").read_text()) for one in (FOLDER / "plain", tmp_path / "again")
    ]
    assert stored[0] == stored[1]
