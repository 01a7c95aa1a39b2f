"""An artefact that an earlier version saved loads, and answers as it did."""

import json
from pathlib import Path

import pytest
import torch

from i2cl import Decoder, Injection

FOLDER = Path(__file__).parents[1] / "data" / "format1"
RECORD = json.loads((FOLDER / "scores.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference", device="cpu")


@pytest.mark.parametrize("name", ["plain", "classes"])
def test_an_artefact_of_before_answers_as_it_did(decoder, name):
    """``classes`` holds two more tensors, class by class, of which the context vector is the sum."""
    injection = Injection.from_pretrained(FOLDER / name)
    injection.require_base(decoder)
    torch.testing.assert_close(injection.scores(decoder, RECORD["texts"]), torch.tensor(RECORD[name]))
    assert injection.context.demonstrations == 20


def test_saved_again_it_is_the_same(tmp_path):
    injection = Injection.from_pretrained(FOLDER / "plain")
    injection.save_pretrained(tmp_path / "again")
    stored = [
        json.loads((one / "injection.json").read_text()) for one in (FOLDER / "plain", tmp_path / "again")
    ]
    assert stored[0] == stored[1]
