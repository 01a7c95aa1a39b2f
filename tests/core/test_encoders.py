"""Injections with a sentence encoder: product of experts, saving, pooling and validation."""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from fitting import ASKED, TASKS, decoder_of, one_line, random_injection
from i2cl import Example, I2CLError, Injection, encoders, make_methods
from i2cl.export import export_peft, fold, make_golden
from i2cl.injections.label_prior import prior_bias, with_label_prior
from i2cl.injections.pool import InjectionPool
from i2cl.injections.temperature import TYPICAL_TEMPERATURE, with_temperature
from i2cl.interfaces.batch_prediction.prediction import digest
from i2cl.interfaces.cli.fit import _without_folders
from i2cl.interfaces.vllm.worker import PackedEdit
from i2cl.methods import make_injector
from i2cl.models.scoring import add_label_bias
from i2cl.storage.layout import CARD, DESCRIPTION, TENSORS
from plugin import WordsEncoder

pytest.importorskip("sklearn", reason="scikit-learn is not installed")

OPTIONS = {"encoder": "words", "prior_std": 3.0, "steps": 2}
TEXTS = list(ASKED)
NAME = "anchored+sentence_embeddings"


def rows_of(task):
    words = ("warm film night", "match was lost", "company made money")
    return [Example(f"{words[row % len(task.labels)]} {row}", row % len(task.labels)) for row in range(6)]


def fitted(task, **more):
    method = make_injector(NAME, OPTIONS | more)
    return method.fit_injection(decoder_of("llama"), task, rows_of(task), 0)


@pytest.fixture
def injection(words_encoder):
    return fitted(TASKS[1])


@pytest.mark.parametrize("task", TASKS[:2], ids=["two labels", "three labels"])
def test_scores_match_the_product_of_two_methods(task, words_encoder):
    decoder, rows = decoder_of("llama"), rows_of(task)
    injection = fitted(task)
    (product,) = make_methods([NAME], OPTIONS)
    expected = product.fit(decoder, task, rows, 0).log_probs(TEXTS)
    actual = injection.log_probs(decoder, TEXTS)
    torch.testing.assert_close(actual.float(), expected.float(), atol=1e-4, rtol=1e-4)
    assert injection.temperature == TYPICAL_TEMPERATURE
    plain = injection.with_head(encoder=None)
    assert not torch.allclose(actual, plain.log_probs(decoder, TEXTS))
    assert injection.log_probs(decoder, []).shape == (0, len(task.labels))
    other = with_temperature(injection, 7.0)
    assert torch.equal(other.log_probs(decoder, TEXTS).argmax(-1), actual.argmax(-1))
    fit = make_injector(NAME, OPTIONS).fit(decoder, task, rows, 0)
    torch.testing.assert_close((fit.log_probs(TEXTS) / TYPICAL_TEMPERATURE).log_softmax(-1).float(), actual)
    assert fit.cost.cached_values == plain.context.values.numel() + len(injection.encoder_bias.weights) * 25


def test_named_encoder_is_used(monkeypatch):
    assert make_injector(options={"encoder": "words"}).full_name == NAME
    assert make_injector(options={"embeddings_c": 3}).full_name == NAME
    assert make_injector("anchored").full_name == "anchored"
    one_line("no chosen method has the option 'encoder'", make_injector, "i2cl", {"encoder": "words"})
    one_line("takes no recipe", make_injector, NAME, {}, "fast")
    monkeypatch.setattr("i2cl.encoders.local_encoder", lambda: "here")
    assert make_injector(NAME).embeddings.encoder == "here"
    assert make_injector(NAME, {"encoder": "words"}).embeddings.encoder == "words"


def test_encoder_is_saved_and_pooled(injection, tmp_path):
    decoder = decoder_of("llama")
    scores = injection.log_probs(decoder, TEXTS)
    injection.save_pretrained(tmp_path / "new")
    stored = json.loads((tmp_path / "new" / DESCRIPTION).read_text(encoding="utf-8"))
    assert (stored["encoder"], "word_weights" in stored) == ("words", False)
    loaded = Injection.from_pretrained(tmp_path / "new")
    torch.testing.assert_close(loaded.log_probs(decoder, TEXTS), scores)
    assert digest(loaded) == digest(injection) != digest(injection.with_head(encoder=None))
    card = " ".join((tmp_path / "new" / CARD).read_text(encoding="utf-8").split())
    assert "The sentence encoder words runs beside the model" in card
    plain, biased = random_injection(decoder, TASKS[0], 3), injection.with_head(bias=(1.0, 0.0, -1.0))
    pool = InjectionPool(decoder, {"both": loaded, "plain": plain, "biased": biased})
    names = ["both", "plain", "biased"] * 2
    tasks = {"both": injection, "plain": plain, "biased": biased}
    for name, text, row in zip(names, TEXTS, pool.log_probs(TEXTS, names), strict=True):
        expected = tasks[name].log_probs(decoder, [text])[0]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)  # other batch sizes


def test_label_prior_includes_the_encoder(injection):
    decoder = decoder_of("llama")
    with pytest.warns(UserWarning, match="is unreliable"):
        prior = with_label_prior(injection, decoder, TEXTS)
    means = injection.log_probs(decoder, TEXTS).softmax(-1).mean(0)
    torch.testing.assert_close(
        torch.tensor(prior.label_bias).double(), -TYPICAL_TEMPERATURE * (3 * means).log().double()
    )
    assert prior.temperature == TYPICAL_TEMPERATURE
    expected = add_label_bias(
        injection.log_probs(decoder, TEXTS), prior_bias(None, injection.log_probs(decoder, TEXTS))
    )
    torch.testing.assert_close(prior.log_probs(decoder, TEXTS), expected, atol=1e-5, rtol=1e-5)


def test_changed_or_missing_encoder_is_refused(injection, words_encoder, tmp_path, monkeypatch):
    decoder = decoder_of("llama")
    words_encoder(WordsEncoder(turned=1))
    one_line(
        "the encoder 'words' yields other embeddings than at the fit", injection.log_probs, decoder, TEXTS
    )
    one_line("yields other embeddings", InjectionPool, decoder, {"both": injection})
    injection.save_pretrained(tmp_path / "new")
    shutil.copytree(tmp_path / "new", tmp_path / "less")
    tensors = load_file(tmp_path / "new" / TENSORS)
    del tensors["encoder_probe"]
    save_file(tensors, tmp_path / "less" / TENSORS)
    one_line("damaged or missing .'encoder_probe'", Injection.from_pretrained, tmp_path / "less")
    save_file(tensors | {"encoder_probe": torch.eye(3)[0]}, tmp_path / "less" / TENSORS)
    one_line(r"encoder weights \(3, 25\) for 3 labels", Injection.from_pretrained, tmp_path / "less")
    save_file(tensors | {"encoder_probe": torch.ones(24)}, tmp_path / "less" / TENSORS)
    one_line("stored sentence-encoder weights are damaged", Injection.from_pretrained, tmp_path / "less")
    wide = {name: one.double() for name, one in load_file(tmp_path / "new" / TENSORS).items()}
    save_file(wide, tmp_path / "less" / TENSORS)
    words_encoder()
    Injection.from_pretrained(tmp_path / "less").log_probs(decoder, TEXTS)
    monkeypatch.undo()
    monkeypatch.setattr("i2cl.errors.find_spec", lambda module: None)
    one_line(r"sentence encoder needs .*'i2cl\[embeddings\]'", injection.log_probs, decoder, TEXTS)


def test_moved_encoder_can_be_given_at_loading(injection, words_encoder, tmp_path, monkeypatch):
    injection.save_pretrained(tmp_path / "task")
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(tmp_path)
    moved = Injection.from_pretrained(tmp_path / "task", encoder="elsewhere")
    assert moved.encoder_bias.encoder == str(place)
    decoder = decoder_of("llama")
    torch.testing.assert_close(moved.log_probs(decoder, TEXTS), injection.log_probs(decoder, TEXTS))
    encoders._probe.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(encoders, "frozen_encoder", Mock(side_effect=I2CLError("it is not here: get it")))
        one_line("not here: get it .or give its new location with --encoder", moved.log_probs, decoder, TEXTS)
    words_encoder(WordsEncoder(turned=1))
    one_line("yields other embeddings than at the fit: give the encoder", moved.log_probs, decoder, TEXTS)
    injection.with_head(encoder=None).save_pretrained(tmp_path / "plain")
    one_line(
        "plain' uses no sentence encoder", Injection.from_pretrained, tmp_path / "plain", encoder="elsewhere"
    )


def test_label_without_rows_is_refused_before_the_fit(words_encoder):
    some = [row for row in rows_of(TASKS[1]) if row.label]
    method = make_injector(NAME, OPTIONS)
    one_line("demonstrations of every label", method.fit_injection, decoder_of("llama"), TASKS[1], some)


def test_encoder_is_refused_for_an_injection_without_one(injection, tmp_path):
    decoder = decoder_of("llama")
    refused = "uses a sentence encoder, which weights cannot hold: fit it with --method anchored"
    for work in (fold, make_golden):
        one_line(refused, work, decoder, injection)
    one_line(refused, export_peft, decoder, injection, tmp_path / "out")
    one_line(refused, PackedEdit.of_injection, injection)


def test_encoder_path_is_not_written_to_the_artefact(injection, tmp_path, monkeypatch):
    seen = {}

    def upload(folder, *_, **__):
        seen.update(json.loads((folder / DESCRIPTION).read_text(encoding="utf-8")))
        return "here"

    monkeypatch.setattr("i2cl.core.injection.upload", upload)
    bias = replace(injection.encoder_bias, encoder=str(tmp_path / "mine"))
    injection.with_head(encoder=bias).push_to_hub("me/task")
    assert seen["encoder"] == "mine"
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
