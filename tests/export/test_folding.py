"""Folding into weights: every model type, against the hooks."""

import runpy
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from export.cases import (
    FIGURES,
    FOLDED,
    HOW,
    ONE_OF_EACH,
    ROUNDED,
    SHARED,
    drawn,
    hooked,
    longrope,
    plain,
    relative,
)
from fitting import left_as_found, raises, weighted
from i2cl import ARCHITECTURES, Architecture, Decoder, ExtractConfig
from i2cl.export import export_causal_lm, fold
from i2cl.export.folding import Folding
from tiny import CASES

ROOT = Path(__file__).parents[2]
HALF_ROTATED = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
PRECISIONS = [*product(FOLDED, [torch.float32]), *product(ONE_OF_EACH, [torch.bfloat16])]


@pytest.mark.parametrize(("case", "dtype"), PRECISIONS, ids=str)
def test_a_folded_checkpoint_computes_what_the_hooks_do(case, dtype, tmp_path):
    decoder, injection = drawn(case, dtype=dtype)
    export_causal_lm(decoder, injection, tmp_path / "out", golden=False)
    made, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    assert made.dtype == dtype
    expected = hooked(decoder, injection)
    assert relative(plain(made), expected) <= (1e-5 if dtype == torch.float32 else ROUNDED)
    assert relative(plain(decoder.model), expected) > 0.1  # the injection is larger than the bound


@pytest.mark.parametrize("case", sorted(set(CASES) - set(FOLDED)))
def test_models_that_cannot_be_folded_are_refused_with_the_reason(case):
    error = raises("", fold, *drawn(case))
    assert (HOW[case].removeprefix("no: ") in error) or "sliding window of 8 tokens is shorter" in error
    assert error.endswith("predict with hooks instead (`i2cl predict`)")


@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        *((case, {"tie_word_embeddings": True}) for case in ("llama", "mistral", "phi3", "qwen3")),
        *((case, {"attention_bias": True}) for case in ("cohere", "granite")),
        *(("gemma", {"tie_word_embeddings": False}), ("gpt_neox", {"attention_bias": False})),
        *(("starcoder2", {"use_bias": False}), ("opt", {"enable_bias": False}), ("falcon", {"bias": True})),
        ("qwen2", {"num_key_value_heads": 1}),
        ("mistral", {"sliding_window": 1024}),  # as long as the context
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 1, "hidden_size": 36}),
    ],
    ids=str,
)
def test_variants_of_a_model_type_fold_exactly(case, overrides):
    decoder, injection = drawn(case, **overrides)
    made = fold(decoder, injection)
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5
    tied = made.config.tie_word_embeddings
    assert (made.get_output_embeddings().weight is made.get_input_embeddings().weight) == tied
    assert tied == (decoder.model.config.tie_word_embeddings and case != "gemma")


@pytest.mark.parametrize("original", [16, 32], ids=["longer text", "shorter text"])
def test_long_rotary_scaling_is_kept(original):
    decoder, injection = longrope(original)
    assert relative(plain(fold(decoder, injection)), hooked(decoder, injection)) <= 1e-5


@pytest.mark.parametrize("case", ["gemma", "gpt2", "phi3"])
def test_the_base_model_is_not_changed(case):
    decoder, injection = drawn(case)
    with left_as_found(decoder.model.train()):
        made = fold(decoder, injection)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()  # nothing is shared
    assert not made.training


def test_word_level_rows_of_the_head_are_rounded_once():
    decoder, injection = drawn("llama", SHARED, dtype=torch.bfloat16)
    injection = weighted(decoder, injection)
    head = decoder.model.lm_head.weight.float()
    made = Folding(decoder, injection).tensor("lm_head.weight")
    assert torch.equal(made, injection.scorer(decoder).labels.at_representatives(head.T).T.bfloat16())


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("phi3", {"rope_parameters": HALF_ROTATED}, "rotary embedding is partial"),
        ("mistral", {"hidden_size": 36, "head_dim": 8, "num_attention_heads": 8}, "not a multiple"),
    ],
)
def test_configs_that_llama_cannot_hold_are_refused(case, fields, message):
    raises(message, fold, *drawn(case, **fields))


def test_injections_that_are_not_a_bias_are_refused():
    decoder, injection = drawn("llama")
    raises("positions 'last'", fold, decoder, replace(injection, positions="last"))
    values = torch.zeros(decoder.layers, 1, decoder.d_model)
    hidden = {"context": values, "extraction": ExtractConfig(sublayers="hidden", separator=False)}
    blocks = replace(injection, coefficients=torch.zeros(decoder.layers, 1, 2), **hidden)
    raises("block outputs", fold, decoder, blocks)
    raises("^this injection scores full label sequences, .*scoring=.words.", fold, *drawn("llama", SHARED))
    _, deeper = drawn("llama", num_hidden_layers=3)
    raises(r"\(layers, width\) \(3, 32\)", fold, decoder, deeper)


def test_models_that_are_not_the_registered_type_or_not_in_memory_are_refused():
    decoder, injection = drawn("llama")
    own = Architecture("llama", "layers", "self_attn", "mlp.down_proj")
    raises(
        "custom Architecture", fold, Decoder(decoder.model, decoder.tokenizer, architecture=own), injection
    )
    decoder.model.to("meta")
    raises("not in memory", fold, decoder, injection)


def test_remote_code_is_not_named(tmp_path):
    decoder, injection = drawn("falcon")
    decoder.model.config.auto_map = {"AutoConfig": "configuration.Own"}
    export_causal_lm(decoder, injection, tmp_path / "out", golden=False)
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "architectures_table.py"))


def test_the_page_of_model_types_is_generated_from_passing_measurements(script):
    assert (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8") == script["page"]()
    value = [name for names in script["UNSUPPORTED"].values() for name in names.split()]
    known = [*ARCHITECTURES, *script["WRAPPERS"].split(), *value]
    assert len(known) == len(set(known))
    if transformers.__version__ == FIGURES["transformers"]:
        assert set(known) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert list(FIGURES["types"]) == list(ARCHITECTURES)
    for row in FIGURES["types"].values():
        assert float(row["identity"].removeprefix("≤ ")) <= 1e-5
        if row["fold"].startswith("no"):
            assert row["float32"] == row["verify"] == "-"
        else:
            assert row["verify"] == "holds"
            assert float(row["float32"].removeprefix("≤ ")) <= 1e-5
            assert float(row["bfloat16"].removeprefix("≤ ")) <= ROUNDED


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_figures_can_be_measured_again(script, name):
    again, before = script["measured"](name), FIGURES["types"][name]
    names = ("identity", "fold", "float32", "verify")
    assert [again[key] for key in names] == [before[key] for key in names]
