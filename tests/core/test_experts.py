"""Injections with text experts: log-linear pool, saving, batches of several tasks, and validation."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from fitting import ASKED, TASKS, decoder_of, raises, random_injection
from i2cl import Example, I2CLError, Injection, encoders, make_methods
from i2cl.core.language import LanguageWarning
from i2cl.export import make_golden
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble
from i2cl.injections.label_prior import with_label_prior
from i2cl.injections.pool import InjectionPool
from i2cl.injections.temperature import with_temperature
from i2cl.interfaces.batch_prediction import digest
from i2cl.interfaces.cli.fit import _without_folders
from i2cl.interfaces.vllm.worker import PackedEdit
from i2cl.storage.card import describe_llm_alone, export_card
from i2cl.storage.layout import CARD, DESCRIPTION, TENSORS
from plugin import WordsEncoder

TEXTS = list(ASKED)
CONFIG = EnsembleConfig(encoder="words")
LLM_PRIOR = WeightPrior(0.25, 0.5)


def rows_of(task):
    words = ("warm film night", "match was lost", "company made money")
    return [Example(f"{words[row % len(task.labels)]} {row}", row % len(task.labels)) for row in range(6)]


def fitted(task, config=CONFIG):
    decoder = decoder_of("llama")
    return fit_ensemble(random_injection(decoder, task, 3), config, LLM_PRIOR, rows_of(task), "cpu")


@pytest.fixture
def injection(words_encoder):
    return fitted(TASKS[1])


@pytest.mark.parametrize("task", TASKS[:2], ids=["two labels", "three labels"])
def test_log_probs_are_the_weighted_product_of_the_experts(task, words_encoder):
    decoder, rows = decoder_of("llama"), rows_of(task)
    injection = fitted(task)
    methods = make_methods(["sentence_embeddings", "char_tfidf"], {"encoder": "words"})
    experts = [method.fit(decoder, task, rows, 0).log_probs(TEXTS) for method in methods]
    each = [injection.llm_alone().log_probs(decoder, TEXTS), *experts]
    assert injection.head.members == ("llm", "embeddings", "tfidf")
    weighted = zip(injection.head.expert_weights, each, strict=True)
    expected = sum(weight * log_probs for weight, log_probs in weighted).log_softmax(-1)
    torch.testing.assert_close(injection.log_probs(decoder, TEXTS), expected, atol=1e-5, rtol=1e-5)
    assert injection.log_probs(decoder, []).shape == (0, len(task.labels))


def test_temperature_scales_all_weights_of_an_ensemble(injection):
    decoder = decoder_of("llama")
    plain = injection.log_probs(decoder, TEXTS)
    expected = (plain / 3).log_softmax(-1)
    torch.testing.assert_close(
        with_temperature(injection, 3.0).log_probs(decoder, TEXTS), expected, atol=1e-5, rtol=1e-5
    )


def test_encoder_is_saved_and_pooled(injection, tmp_path):
    decoder = decoder_of("llama")
    scores = injection.log_probs(decoder, TEXTS)
    injection.save_pretrained(tmp_path / "new")
    stored = json.loads((tmp_path / "new" / DESCRIPTION).read_text(encoding="utf-8"))
    weights = dict(zip(("llm", "embeddings", "tfidf"), injection.head.expert_weights, strict=True))
    assert stored["ensemble"] == {"weights": weights, "encoder": "words"}
    loaded = Injection.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(loaded.log_probs(decoder, TEXTS), scores)
    assert digest(loaded) == digest(injection) != digest(injection.llm_alone())
    card = " ".join((tmp_path / "new" / CARD).read_text(encoding="utf-8").split())
    assert "weights llm 0.25, embeddings" in card
    assert "embeddings of the sentence encoder words, which runs beside the model" in card
    plain, biased = random_injection(decoder, TASKS[0], 3), injection.with_head(bias=(1.0, 0.0, -1.0))
    pool = InjectionPool(decoder, {"both": loaded, "plain": plain, "biased": biased})
    names = ["both", "plain", "biased"] * 2
    tasks = {"both": injection, "plain": plain, "biased": biased}
    for name, text, row in zip(names, TEXTS, pool.log_probs(TEXTS, names), strict=True):
        expected = tasks[name].log_probs(decoder, [text])[0]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)  # other batch sizes


def test_label_prior_corrects_the_llm(injection):
    decoder = decoder_of("llama")
    with pytest.warns(UserWarning, match="is unreliable"):
        prior = with_label_prior(injection, decoder, TEXTS)
    assert prior.head.experts is injection.head.experts
    means = injection.llm_alone().log_probs(decoder, TEXTS).softmax(-1).mean(0)
    torch.testing.assert_close(torch.tensor(prior.label_bias).double(), -(3 * means).log().double())


def test_changed_or_missing_encoder_is_refused(injection, words_encoder, tmp_path, monkeypatch):
    decoder = decoder_of("llama")
    words_encoder(WordsEncoder(turned=1))
    raises("the encoder 'words' yields other embeddings than at the fit", injection.log_probs, decoder, TEXTS)
    raises("yields other embeddings", InjectionPool, decoder, {"both": injection})
    injection.save_pretrained(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "less")
    tensors = load_file(tmp_path / "new" / TENSORS)
    del tensors["embeddings_probe"]
    save_file(tensors, tmp_path / "less" / TENSORS)
    raises("damaged or missing .'embeddings_probe'", Injection.from_pretrained, tmp_path / "less")
    for damaged in (torch.eye(3)[0], torch.ones(24)):
        save_file(tensors | {"embeddings_probe": damaged}, tmp_path / "less" / TENSORS)
        raises("stored sentence-encoder weights are damaged", Injection.from_pretrained, tmp_path / "less")
    unsorted = {"tfidf_buckets": tensors["tfidf_buckets"].flip(0), "embeddings_probe": torch.eye(24)[0]}
    save_file(tensors | unsorted, tmp_path / "less" / TENSORS)
    raises("stored TF-IDF weights are damaged", Injection.from_pretrained, tmp_path / "less")
    monkeypatch.undo()
    monkeypatch.setattr("i2cl.errors.find_spec", lambda module: None)
    raises(r"sentence encoder needs .*'i2cl\[embeddings\]'", injection.log_probs, decoder, TEXTS)


def test_moved_encoder_can_be_given_at_loading(injection, words_encoder, tmp_path, monkeypatch):
    injection.save_pretrained(tmp_path / "task")
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(tmp_path)
    moved = Injection.from_pretrained(tmp_path / "task", encoder="elsewhere")
    assert moved.head.embeddings.encoder == str(place)
    decoder = decoder_of("llama")
    torch.testing.assert_close(moved.log_probs(decoder, TEXTS), injection.log_probs(decoder, TEXTS))
    encoders.probe.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(encoders, "frozen_encoder", Mock(side_effect=I2CLError("it is not here: get it")))
        raises("not here: get it .or give its new location with --encoder", moved.log_probs, decoder, TEXTS)
    words_encoder(WordsEncoder(turned=1))
    raises("yields other embeddings than at the fit: give the encoder", moved.log_probs, decoder, TEXTS)
    injection.llm_alone().save_pretrained(tmp_path / "plain")
    raises(
        "plain' uses no sentence encoder", Injection.from_pretrained, tmp_path / "plain", encoder="elsewhere"
    )


def test_label_without_demonstration_leaves_the_llm_alone(words_encoder):
    some = [row for row in rows_of(TASKS[1]) if row.label]
    plain = random_injection(decoder_of("llama"), TASKS[1], 3)
    assert fit_ensemble(plain, CONFIG, LLM_PRIOR, some, "cpu").ensemble is None


def test_exports_hold_the_llm_alone(injection):
    decoder, alone = decoder_of("llama"), injection.llm_alone()
    assert make_golden(decoder, injection) == make_golden(decoder, alone)
    assert PackedEdit.of_injection(injection).digest == PackedEdit.of_injection(alone).digest
    evaluation = {"rows": 9, "methods": {"anchored": {"accuracy": 0.5}, "ensemble": {"accuracy": 0.75}}}
    description = injection.with_report(evaluation=evaluation).description()
    expected = "the LLM alone, without embeddings and tfidf: accuracy 0.500 instead of 0.750 on 9 rows"
    assert describe_llm_alone(description) == expected
    assert f"It holds {expected}." in export_card(description, "", "transformers")
    assert describe_llm_alone(alone.description()) == ""


def test_encoder_path_is_not_written_to_the_artefact(injection, tmp_path, monkeypatch):
    seen = {}

    def upload(folder, *_, **__):
        seen.update(json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
        return "here"

    monkeypatch.setattr("i2cl.core.injection.upload", upload)
    injection.with_encoder(str(tmp_path / "mine")).push_to_hub("me/task")
    assert seen["ensemble"]["encoder"] == "mine"
    assert _without_folders(f"encoder={tmp_path / 'mine'}") == "encoder=mine"
    assert _without_folders("prior_std=2") == "prior_std=2"


@pytest.fixture
def loads(monkeypatch):
    """Names of the encoders that are loaded, slowly."""
    names = []

    def load(name, device):
        time.sleep(0.05)
        names.append(name)
        return object()

    monkeypatch.setattr(encoders, "load_encoder", load)
    encoders.release_encoders()
    yield names
    encoders.release_encoders()


def test_encoder_is_loaded_once_by_several_threads(loads):
    with ThreadPoolExecutor(4) as threads:
        results = [*threads.map(lambda _: encoders.frozen_encoder("hub/id", "cpu"), range(4))]
    assert loads == ["hub/id"]
    assert len(set(map(id, results))) == 1


def test_relative_and_absolute_path_share_an_encoder(loads, tmp_path, monkeypatch):
    (tmp_path / "encoder").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("encoder", str(tmp_path / "encoder"), "./encoder"):
        encoders.frozen_encoder(name, "cpu")
    assert loads == [str(tmp_path / "encoder")]


def test_encoder_cache_is_bounded_and_can_be_cleared(loads):
    count = encoders.MAX_LOADED_ENCODERS
    for name in map(str, [*range(count), 0, count, 1]):
        encoders.frozen_encoder(name, "cpu")
    assert loads == [*map(str, [*range(count), count, 1])], "the least recently used one is dropped"
    encoders.release_encoders()
    encoders.frozen_encoder("1", "cpu")
    assert loads[-1] == "1"


@pytest.mark.parametrize("texts", [("the film is good", "what a day"), ("Größe und Käse", "schöne Tage")])
def test_encoder_that_knows_the_language_is_a_member(texts, monkeypatch):
    ask_words_encoder(monkeypatch)
    assert EnsembleConfig().text_experts(texts, "cpu") == ("embeddings", "tfidf")


def test_encoder_that_splits_texts_into_letters_is_left_out_unless_asked_for(monkeypatch):
    ask_words_encoder(monkeypatch)
    texts = ("хороший фильм", "плохой день")
    with pytest.warns(LanguageWarning, match="words hardly knows the language .* --set encoder=NAME"):
        assert EnsembleConfig().text_experts(texts, "cpu") == ("tfidf",)
    assert EnsembleConfig(experts=("llm", "embeddings")).text_experts(texts, "cpu") == ("embeddings",)
    assert EnsembleConfig(encoder="words").text_experts(texts, "cpu") == ("embeddings", "tfidf")


def ask_words_encoder(monkeypatch):
    """An encoder that needs no download; its tokenizer splits Cyrillic words into letters, others not."""
    encoder = Mock(tokenizer=lambda texts, **_: {"input_ids": list(map(pieces, texts))})
    monkeypatch.setattr(encoders, "local_encoder", lambda: "words")
    monkeypatch.setattr(encoders, "encoder_source", lambda name: name)
    monkeypatch.setattr(encoders, "frozen_encoder", lambda _name, _device: encoder)


def pieces(text):
    return [piece for word in text.split() for piece in (word if "а" <= word[0] <= "я" else [word])]
