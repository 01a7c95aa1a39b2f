"""Exports of tasks whose labels share their first token: full-sequence and word-level scoring."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from export.cases import BEGUN, SHARED, drawn, llama_cpp, with_golden
from fitting import one_line, weighted
from i2cl import Decoder
from i2cl.export import (
    export_causal_lm,
    export_gguf,
    export_peft,
    fold,
    golden,
    make_golden,
    verify,
    verify_gguf,
)
from i2cl.models.scoring import next_token_log_probabilities

TEXTS = ("a warm film", "dull and long", "two hours")  # without the letter that all labels begin with
MIXED = replace(SHARED, labels=("best film", "best ever", "bad film", "film bad", "a long film"))


@pytest.fixture(autouse=True)
def _texts(monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)


def scored_by_words(**overrides):
    decoder, injection = drawn("llama", MIXED, **overrides)
    return decoder, weighted(decoder, injection)


@pytest.mark.parametrize("task", [SHARED, BEGUN], ids=["shared", "prefix"])
def test_full_sequences_are_verified(task, tmp_path):
    decoder, injection = drawn("llama", task)
    made = with_golden(export_causal_lm, (decoder, injection), tmp_path / "out")
    assert max(map(len, made.label_tokens)) > 1
    outcome = verify(tmp_path / "out", device="cpu")
    assert outcome.passed
    assert [expected for expected, _ in outcome.labels] == injection.predict(decoder, TEXTS)


def test_a_change_that_only_later_tokens_show_is_found(tmp_path):
    made = with_golden(export_causal_lm, drawn("llama", SHARED), tmp_path / "out")
    first = made.label_tokens[0][0]
    assert not any(first in ids for ids in made.ids)
    state = load_file(tmp_path / "out" / "model.safetensors")
    state["model.embed_tokens.weight"][first] *= -1
    save_file(state, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    assert not verify(tmp_path / "out", device="cpu").passed


@llama_cpp
@pytest.mark.parametrize("make", [lambda: drawn("llama", SHARED), scored_by_words], ids=["sequence", "words"])
def test_llama_cpp_passes(make, tmp_path):
    with_golden(export_gguf, make(), tmp_path / "out.gguf")
    assert verify_gguf(tmp_path / "out.gguf").passed


@pytest.mark.parametrize("case", ["llama", "phi", "granite", "gpt_neox"])
def test_a_folded_model_in_memory_scores_words(case):
    decoder, injection = drawn(case, MIXED)
    injection = weighted(decoder, injection)
    folded = Decoder(fold(decoder, injection), decoder.tokenizer)
    labels, queries = injection.scorer(decoder).labels, injection.scorer(decoder).queries(TEXTS)
    result = next_token_log_probabilities(folded, queries)[:, list(labels.first)].log_softmax(-1)
    torch.testing.assert_close(
        result, injection.log_probs(decoder, TEXTS).log_softmax(-1), atol=1e-4, rtol=1e-4
    )
    one_line("pass a Decoder", fold, decoder.model, injection)


@pytest.mark.parametrize("tied", [False, True])
def test_only_the_head_of_an_export_changes_for_words(tied, tmp_path):
    decoder, injection = scored_by_words(tie_word_embeddings=tied)
    with_golden(export_causal_lm, (decoder, injection), tmp_path / "out")
    outcome = verify(tmp_path / "out", device="cpu")
    assert outcome.passed
    assert [expected for expected, _ in outcome.labels] == injection.predict(decoder, TEXTS)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["model.embed_tokens.weight"].equal(decoder.model.get_input_embeddings().weight)
    changed = (state["lm_head.weight"] != decoder.model.lm_head.weight).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= set(injection.scorer(decoder).labels.first)
    assert len(changed) >= 3


def test_golden_answers_of_words_are_those_of_the_injection():
    decoder, injection = scored_by_words()
    injection = injection.with_head(temperature=2.0)
    made = torch.tensor(make_golden(decoder, injection).probabilities)
    expected = injection.log_probs(decoder, TEXTS).softmax(-1).float()
    torch.testing.assert_close(made, expected, atol=1e-6, rtol=1e-5)


def test_an_adapter_cannot_score_words(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (pip install 'i2cl[peft]')")
    one_line("word-level scoring changes the LM head", export_peft, *scored_by_words(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
