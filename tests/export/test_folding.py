"""Folding into weights: every family, against the hooks."""

import json
import runpy
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from export.cases import FOLDED, ONE_A_ROW, ROUNDED, SHARED, drawn, hooked, longrope, plain, relative
from fitting import left_as_found, one_line
from i2cl import ARCHITECTURES, Architecture, ContextVector, Decoder, ExtractConfig
from i2cl.export import export_causal_lm, fold
from i2cl.export.families import FAMILIES, REFUSED
from i2cl.export.folding import Folding, StateDict, label_tokens_of
from tiny import CASES

ROOT = Path(__file__).parents[2]
HALF_ROTATED = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
FIGURE_NAMES = ("identity", "float32", "verify")
PRECISIONS = [*product(FOLDED, [torch.float32]), *product(ONE_A_ROW, [torch.bfloat16])]
FIGURES = json.loads((ROOT / "docs" / "architectures.json").read_text(encoding="utf-8"))


def test_word_level_rows_of_the_head_are_rounded_once():
    decoder, injection = drawn("llama", SHARED, dtype=torch.bfloat16)
    injection = injection.with_head(scoring="words")
    weights = StateDict(decoder.model)
    head, labels = weights.read("lm_head.weight").float(), label_tokens_of(injection, decoder.tokenizer)
    made = Folding(decoder.model.config, weights, injection, decoder.tokenizer).tensor("lm_head.weight")
    assert torch.equal(made, labels.at_first(head.T).T.bfloat16())


def test_every_model_type_is_folded_or_refused():
    assert sorted([*FAMILIES, *REFUSED]) == sorted(ARCHITECTURES)


@pytest.mark.parametrize(("case", "dtype"), PRECISIONS, ids=str)
def test_a_folded_checkpoint_does_what_the_hooks_do(case, dtype, tmp_path):
    decoder, injection = drawn(case, dtype=dtype)
    export_causal_lm(decoder, injection, tmp_path / "out")
    made, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not [*info["missing_keys"], *info["unexpected_keys"]]
    assert made.dtype == dtype
    expected = hooked(decoder, injection)
    assert relative(plain(made), expected) <= (1e-5 if dtype == torch.float32 else ROUNDED)
    assert relative(plain(decoder.model), expected) > 0.1  # the injection is not lost in the bound


@pytest.mark.parametrize("case", sorted(set(CASES) - set(FOLDED)))
def test_what_cannot_be_folded_says_why_and_what_else(case):
    error = one_line("", fold, *drawn(case))
    assert REFUSED.get(CASES[case][0], "sliding window of 8 tokens is shorter than") in error
    assert error.endswith("predict with hooks instead (`i2cl predict`)")


@pytest.mark.parametrize(
    ("case", "overrides"),
    [
        *((case, {"tie_word_embeddings": True}) for case in ("llama", "mistral", "phi3", "qwen3")),
        *((case, {"attention_bias": True}) for case in ("cohere", "granite", "helium")),
        *(("gemma", {"tie_word_embeddings": False}), ("gpt_neox", {"attention_bias": False})),
        *(("starcoder2", {"use_bias": False}), ("opt", {"enable_bias": False}), ("falcon", {"bias": True})),
        *(("gpt2", {}), ("qwen2", {"num_key_value_heads": 1})),
        ("mistral", {"sliding_window": 1024}),  # as long as the context
        ("qwen3", {"attention_bias": True, "num_key_value_heads": 1, "hidden_size": 36}),
    ],
    ids=str,
)
def test_variants_of_a_family_fold_exactly(case, overrides, tmp_path):
    decoder, injection = drawn(case, **overrides)
    made = fold(decoder, injection)
    assert relative(plain(made), hooked(decoder, injection)) <= 1e-5
    export_causal_lm(decoder, injection, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(plain(again), plain(made))
    tied = again.config.tie_word_embeddings
    assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied
    assert tied == (decoder.model.config.tie_word_embeddings and case != "gemma")


def test_long_rotary_scaling_comes_along():
    for original in (16, 32):  # the tokens are more, and fewer
        decoder, injection = longrope(original)
        assert relative(plain(fold(decoder, injection)), hooked(decoder, injection)) <= 1e-5


@pytest.mark.parametrize("case", ["llama", "gemma", "gpt2", "phi3"])
def test_the_users_model_is_left_as_found(case, tmp_path):
    decoder, injection = drawn(case)
    with left_as_found(decoder.model.train()):
        made = fold(decoder, injection)
        export_causal_lm(decoder, injection, tmp_path / "out")
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()  # nothing is shared
    assert not made.training


@pytest.mark.parametrize(
    ("case", "fields", "message"),
    [
        ("phi3", {"rope_parameters": HALF_ROTATED}, "rotary embedding is partial"),
        ("mistral", {"hidden_size": 36, "head_dim": 8, "num_attention_heads": 8}, "not a multiple"),
    ],
)
def test_configs_that_llama_cannot_hold_are_refused(case, fields, message):
    one_line(message, fold, *drawn(case, **fields))


def test_injections_that_are_no_bias_and_models_of_others_are_refused():
    decoder, injection = drawn("llama")
    one_line("positions 'last'", fold, decoder, replace(injection, positions="last"))
    values = torch.zeros(decoder.layers, 1, decoder.d_model)
    hidden = ContextVector(values, ExtractConfig(writers="hidden", separator=False), 1)
    blocks = replace(injection, context=hidden, coefficients=torch.zeros(decoder.layers, 1, 2))
    one_line("block outputs", fold, decoder, blocks)
    _, deeper = drawn("llama", num_hidden_layers=3)
    one_line(r"\(layers, width\) \(3, 32\)", fold, decoder, deeper)
    own = Architecture("llama", "layers", "self_attn", "mlp.down_proj")
    other = Decoder(decoder.model, decoder.tokenizer, architecture=own)
    one_line("custom Architecture", fold, other, injection)
    one_line("not in memory", fold, decoder.model.to("meta"), injection)


def test_a_label_prior_is_refused_in_memory():
    decoder, injection = drawn("llama")
    one_line("no place for a label prior", fold, decoder, injection.with_head(bias=(0.5, -0.5)))


def test_no_remote_code_is_named(tmp_path):
    decoder, injection = drawn("falcon")
    decoder.model.config.auto_map = {"AutoConfig": "configuration.Own"}
    export_causal_lm(decoder, injection, tmp_path / "out")
    assert "auto_map" not in (tmp_path / "out" / "config.json").read_text(encoding="utf-8")
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "architectures_table.py"))


def test_the_page_of_model_types_is_printed_from_figures_that_hold_what_is_claimed(script):
    assert (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8") == script["page"]()
    value = [name for names in script["UNSUPPORTED"].values() for name in names.split()]
    known = [*ARCHITECTURES, *script["WRAPPERS"].split(), *value]
    assert len(known) == len(set(known))
    if transformers.__version__ == FIGURES["transformers"]:
        assert set(known) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert list(FIGURES["types"]) == list(ARCHITECTURES)
    for name, row in FIGURES["types"].items():
        assert float(row["identity"].removeprefix("≤ ")) <= 1e-5
        assert [row["float32"] == "-", row["verify"] == "-"] == [name in REFUSED] * 2
        if name in FAMILIES:
            assert row["verify"] == "holds"
            assert float(row["float32"].removeprefix("≤ ")) <= 1e-5
            assert float(row["bfloat16"].removeprefix("≤ ")) <= ROUNDED


@pytest.mark.parametrize("name", ["gpt_oss", "llama", "qwen3_moe"])
def test_the_figures_can_be_measured_again(script, name):
    again, before = script["measured"](name), FIGURES["types"][name]
    assert [again[key] for key in FIGURE_NAMES] == [before[key] for key in FIGURE_NAMES]
