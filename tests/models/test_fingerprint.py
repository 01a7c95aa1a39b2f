from dataclasses import asdict, replace

import pytest
import torch

from i2cl.errors import I2CLError
from i2cl.models.fingerprint import ModelIdentity, tokenizer_fingerprint, weights_fingerprint
from tiny import tiny_model, tiny_tokenizer

FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "qwen2", "opt", "gemma2", "falcon", "bloom"]
BASE = ModelIdentity("here", None, "llama", 2, 32, "aa", "bb")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_checkpoint_has_one_fingerprint_in_two_precisions(model_type):
    full = weights_fingerprint(tiny_model(model_type))
    assert full == weights_fingerprint(tiny_model(model_type, dtype=torch.bfloat16))
    assert full != weights_fingerprint(tiny_model(model_type, seed=1))
    assert len(full) == 16


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_half_precision_checkpoint_has_one_fingerprint_in_all_precisions(model_type):
    half = tiny_model(model_type, dtype=torch.float16)
    assert weights_fingerprint(half) == weights_fingerprint(half.float())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_counts(model_type):
    model = tiny_model(model_type)
    before = weights_fingerprint(model)
    for _, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.mul_(2)
            assert weights_fingerprint(model) != before
            parameter.div_(2)
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize("place", [0, -1])
def test_first_and_last_value_of_a_large_tensor_count(place):
    model = tiny_model("llama")
    before = weights_fingerprint(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.view(-1)[place] += 1
    assert weights_fingerprint(model) != before


def test_the_vocabulary_counts_and_padding_does_not():
    tokenizer, before = tiny_tokenizer(), tokenizer_fingerprint(tiny_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.add_tokens(["<extra>"])
    assert tokenizer_fingerprint(tokenizer) != before


@pytest.mark.parametrize(
    "change", [{"model_type": "gpt2"}, {"layers": 3}, {"d_model": 8}, {"weights": "cc"}, {"tokenizer": "cc"}]
)
def test_a_difference_is_named(change):
    ((field, value),) = change.items()
    difference = BASE.difference(replace(BASE, **change))
    assert field in difference
    assert repr(value) in difference
    assert repr(getattr(BASE, field)) in difference


def test_name_and_revision_do_not_count():
    assert BASE.difference(replace(BASE, name="there", revision="main")) is None


def test_dictionary_roundtrip():
    assert ModelIdentity.from_dict(asdict(BASE)) == BASE


@pytest.mark.parametrize("fields", [{}, asdict(BASE) | {"extra": 1}])
def test_wrong_fields_are_refused(fields):
    with pytest.raises(I2CLError, match="base_model entry is malformed"):
        ModelIdentity.from_dict(fields)
