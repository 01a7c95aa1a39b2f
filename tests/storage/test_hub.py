"""Model cards, the hub's cache, and uploads. No test uses the network."""

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from commands import jsonl, run
from fitting import raises, random_injection
from i2cl import AnchoredConfig, Decoder, Example, ExtractConfig, Injection, Task, Template, anchor
from i2cl.core import artefact
from i2cl.storage import hub
from i2cl.storage.atomic import public_name
from i2cl.storage.layout import CARD, DESCRIPTION, TENSORS
from tiny import tiny_folder, tiny_model, tiny_tokenizer

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"), title="Films")
METRICS = {"accuracy": 0.5, "macro_f1": 0.5, "n": 2}


def decoder_named(name="user/tiny-llama"):
    return Decoder(tiny_model("llama"), tiny_tokenizer(), name=name)


def make_injection(decoder=None, task=TASK, **fields):
    fields = {"settings": {"epochs": 3}, "history": (1.5, 0.25), "seed": 3} | fields
    given = {"extraction": ExtractConfig(separator=False), "shown": 10, "fields": fields}
    return random_injection(decoder or decoder_named(), task, factor=1.0, around=(0.0, 0.0), **given)


def card_of(folder):
    return ModelCard.load(folder / CARD)


def test_card_has_metadata_command_and_loss(tmp_path):
    command = "i2cl fit user/tiny-llama films.csv --seed 3"
    make_injection(command=command).save_pretrained(tmp_path / "mood")
    card = card_of(tmp_path / "mood")
    assert (card.data.base_model, card.data.library_name) == ("user/tiny-llama", "i2cl")
    assert (card.data.pipeline_tag, "i2cl" in card.data.tags) == ("text-classification", True)
    assert card.data.license is card.data.eval_results is None
    for part in (
        *('Injection.from_pretrained("mood")', "i2cl predict mood", "Not evaluated"),
        *("Fitted on 10 demonstrations", "with seed 3: loss 1.500 -> 0.250 nats"),
        *("Classes: positive, negative.", f"```text\n{TASK.template.format}\n```"),
        f"```console\n{command}\n```",
    ):
        assert part in card.text


def test_card_of_a_fit_in_python_names_the_functions(tmp_path):
    shown = (Example("a warm film", 0), Example("dull, dull", 1))
    anchor(decoder_named(), TASK, shown, AnchoredConfig(steps=1, say_label=False)).save_pretrained(
        tmp_path / "out"
    )
    text = card_of(tmp_path / "out").text
    assert "Created in Python with `i2cl.anchor`." in text
    assert "attention and MLP block with a vector." in text
    make_injection().save_pretrained(tmp_path / "i2cl")
    assert "`i2cl.extract` and `i2cl.calibrate`" in card_of(tmp_path / "i2cl").text


def test_python_example_of_the_card_runs(tmp_path, monkeypatch, capsys):
    decoder = decoder_named(str(tiny_folder(tmp_path / "base")))
    monkeypatch.chdir(tmp_path)
    make_injection(decoder).save_pretrained("mood")
    snippet = card_of(tmp_path / "mood").text.split("```python\n")[1].split("```")[0]
    exec(compile(snippet, "card", "exec"), {"__name__": "card"})
    assert json.loads(capsys.readouterr().out.replace("'", '"'))[0] in TASK.labels


SCORE = {"accuracy": 0.5, "low": 0.1, "high": 0.9, "macro_f1": 0.25}
SCORE |= {"fit_seconds": 2.0, "milliseconds_per_query": 3.25}
VERDICT = "zero_shot is significantly better by 50.0 points (1 to 90) on 2 rows: use it instead"
CACHED_BYTES = {"zero_shot": 0, "zero_shot+batch_calibration": 0, "i2cl": 77}
EVALUATION = {"rows": 2, "split": "train", "verdict": VERDICT, "not_run": {"few_shot": "too long"}}
EVALUATION |= {
    "support": {"no": 1, "yes": 3},
    "recall": {"no": 0.0, "yes": 1.0},
    "confusion": [[0, 1], [0, 3]],
}
EVALUATION |= {"confidence": dict.fromkeys(("log_loss", "brier", "ece", "aurc"), 0.5), "selection": {}}
EVALUATION |= {"methods": {name: SCORE | {"cached_bytes": size} for name, size in CACHED_BYTES.items()}}


@pytest.mark.parametrize("evaluation", [{}, EVALUATION], ids=["alone", "compared"])
def test_metrics_become_eval_results_of_the_hub(tmp_path, evaluation):
    make_injection(metrics=METRICS, evaluation=evaluation).save_pretrained(tmp_path / "out")
    results = {result.metric_type: result for result in card_of(tmp_path / "out").data.eval_results}
    assert (results["accuracy"].metric_value, results["f1"].metric_value) == (0.5, 0.5)
    assert results["accuracy"].dataset_split == ("train" if evaluation else "test")
    text = card_of(tmp_path / "out").text
    assert f"on 2 {'training rows that are not demonstrations' if evaluation else 'test rows'}." in text
    for part in (
        "| i2cl | 0.500 (0.100–0.900) | 0.250 | 2.0 | 3.25 | 77 |",
        "few_shot was not run: too long.",
        VERDICT,
        "zero_shot+batch_calibration needs the whole batch",
        "no 0.00 (1 row), yes 1.00 (3 rows)",
        "| no | 0 | 1 |",
    ):
        assert (part in text) == bool(evaluation)
    loaded = Injection.from_pretrained(tmp_path / "out")
    assert (loaded.metrics, loaded.evaluation) == (METRICS, evaluation)


def test_card_does_not_contain_local_paths(tmp_path):
    home = tmp_path / "home" / "me" / "llama"
    home.mkdir(parents=True)
    make_injection(decoder_named(str(home))).save_pretrained(tmp_path / "out")
    text = (tmp_path / "out" / CARD).read_text(encoding="utf-8")
    assert str(tmp_path) not in text
    assert "--model PATH" in text
    assert card_of(tmp_path / "out").data.base_model is None  # not the hub's model of that name
    assert Injection.from_pretrained(tmp_path / "out").base.name == str(home)  # the local path still loads


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        *((one, one) for one in ("gpt2", "meta-llama/Llama-3.1-8B")),
        *((one, "llama") for one in ("~/models/llama/", "./llama", "here/models/llama", "/no/such/llama")),
    ],
)
def test_public_name(name, shown):
    assert public_name(name) == shown


def test_readme_of_the_user_is_not_replaced(tmp_path):
    (tmp_path / CARD).write_text("mine", encoding="utf-8")
    raises(r"other files \(README.md\)", make_injection().save_pretrained, tmp_path)
    assert (tmp_path / CARD).read_text(encoding="utf-8") == "mine"
    make_injection().save_pretrained(tmp_path / "out")
    make_injection(seed=4).save_pretrained(tmp_path / "out")
    assert "with seed 4" in (tmp_path / "out" / CARD).read_text(encoding="utf-8")


def test_command_in_the_card_reproduces_the_injection(tmp_path, monkeypatch, stdout):
    monkeypatch.chdir(tmp_path)
    rows = [{"line": f"film {number}", "label": ("good", "bad")[number % 2]} for number in range(8)]
    films = jsonl(tmp_path / "films.jsonl", rows)
    options = ["--template", r"It's {text}\nSo: {label}", "--text-column", "line", "--shots", 2]
    options += ["--evaluate", 4, "--test", films, "--recipe", "fast", "--set", "passes=2", "--set", "noise=0"]
    assert json.loads(stdout("fit", "reference", films, "-o", "one", *options, "--json"))["metrics"]["n"] == 4
    first = Injection.from_pretrained("one")
    words = shlex.split(first.command)
    assert words[:4] == ["i2cl", "fit", "reference", "films.jsonl"]
    assert words[words.index("--seed") :][:2] == ["--seed", "0"]
    assert ("--json" in words, str(tmp_path) in first.command) == (False, False)
    assert first.command in (tmp_path / "one" / CARD).read_text(encoding="utf-8")
    words[words.index("--output") + 1] = "two"
    assert run(*words[1:]) == 0
    second = Injection.from_pretrained("two")
    assert torch.equal(first.coefficients, second.coefficients)
    assert torch.equal(first.context, second.context)
    assert first.metrics == second.metrics


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A cache of the hub's client, without network: main at one commit, the tag v1 at another."""
    cache = tmp_path / "cache"
    root = cache / "models--user--films"
    for reference, commit, seed in (("main", "a" * 40, 1), ("v1", "b" * 40, 2)):
        make_injection(seed=seed).save_pretrained(tmp_path / reference)
        snapshot = root / "snapshots" / commit
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True)
        for file in (tmp_path / reference).iterdir():
            blob = root / "blobs" / f"{commit[:8]}{file.name.encode().hex()}"
            blob.write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs" / reference).write_text(commit, encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_cached_repository_is_read_offline(cached, refused):
    for revision, seed in ((None, 1), ("main", 1), ("v1", 2), ("b" * 40, 2)):
        assert Injection.from_pretrained("user/films", revision=revision).seed == seed
    for name, revision in (("user/films", "v2"), ("other/films", None)):
        says = "no such folder, and the hub (cannot be reached|says)"
        message = raises(says, Injection.from_pretrained, name, revision=revision)
        assert name in message
        assert (f"at revision {revision!r}" in message) == (revision is not None)
    (cached / "models--user--films" / "snapshots" / ("a" * 40) / TENSORS).unlink()
    raises(r"damaged or missing|the hub (cannot be reached|says)", Injection.from_pretrained, "user/films")
    message = refused("predict", "other/films", "texts.txt")
    assert "no injection at 'other/films': no such folder, and the hub cannot be reached; make one" in message


@pytest.mark.parametrize("name", ["/nope/films", "nope/films/first", "not a name!"])
def test_missing_folder_that_cannot_be_on_the_hub_is_reported(name):
    message = f"^no injection at '{name}': no such folder, and it is not the name of a hub repository; make"
    raises(message, Injection.from_pretrained, name)


def test_missing_model_and_unreachable_hub_are_one_line_errors(cached, monkeypatch):
    message = "no model at 'other/tiny' at revision 'v2': no such folder, and the hub cannot be reached; give"
    raises(message, hub.download_model, "other/tiny", "v2")
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=hub._HTTP_ERROR("no answer")))
    raises(
        "no model at 'other/tiny': no such folder, and the hub says", hub.download_model, "other/tiny", None
    )


@pytest.mark.parametrize("metrics", [{"accuracy": None}, {"note": "good"}])
def test_unreadable_description_is_not_written(tmp_path, metrics):
    described = make_injection(decoder_named("gpt2")).description() | {"metrics": metrics}
    raises(r"could not be loaded again \(metrics", artefact.write, tmp_path, {}, described, "out")
    assert not list(tmp_path.iterdir())


def test_bundled_model_is_not_a_base_model_of_the_hub(tmp_path):
    make_injection(decoder_named("gpt2"), metrics={"accuracy": 0.5}).save_pretrained(tmp_path / "out")
    assert "Accuracy 0.500." in (tmp_path / "out" / CARD).read_text(encoding="utf-8")
    make_injection(decoder_named("reference")).save_pretrained(tmp_path / "out")
    assert card_of(tmp_path / "out").data.base_model is None


# Uploads


@pytest.fixture
def uploads(monkeypatch):
    """Record calls of the hub's client, with the files of every uploaded folder."""
    calls = []

    def create_repo(self, repo_id, **options):
        calls.append(("create_repo", repo_id, options | {"token": self.token}))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, repo_id, **options):
        calls.append(("create_branch", repo_id, options))

    def upload_folder(self, *, repo_id, folder_path, **options):
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        calls.append(("upload_folder", repo_id, options | {"files": files}))
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    monkeypatch.setenv("HF_TOKEN", "stored")
    for method in (create_repo, create_branch, upload_folder):
        monkeypatch.setattr(HfApi, method.__name__, method)
    return calls


def test_push_uploads_the_injection_and_its_card(uploads, tmp_path):
    home = tmp_path / "home" / "llama"
    home.mkdir(parents=True)
    injection = make_injection(decoder_named(str(home)))
    options = {"private": True, "token": "secret", "commit_message": "First", "revision": "v1"}
    assert injection.push_to_hub("films", **options) == "https://huggingface.co/me/films/commit/1"
    assert [name for name, *_ in uploads] == ["create_repo", "create_branch", "upload_folder"]
    assert uploads[0][1:] == ("films", {"private": True, "exist_ok": True, "token": "secret"})
    assert uploads[1][1:] == ("me/films", {"branch": "v1", "exist_ok": True})
    _, repository, options = uploads[2]
    files = options.pop("files")
    assert (repository, options) == ("me/films", {"commit_message": "First", "revision": "v1"})
    assert files.keys() == {TENSORS, DESCRIPTION, CARD}
    assert str(tmp_path).encode() not in b"".join(files.values())
    (tmp_path / "down").mkdir()
    for name, content in files.items():
        (tmp_path / "down" / name).write_bytes(content)
    loaded = Injection.from_pretrained(tmp_path / "down")
    assert torch.equal(loaded.coefficients, injection.coefficients)
    assert loaded.base == replace(injection.base, name="llama")
    assert 'Injection.from_pretrained("films")' in card_of(tmp_path / "down").text
    assert "--model PATH" in card_of(tmp_path / "down").text


def test_push_on_the_command_line(uploads, tmp_path, stdout):
    make_injection().save_pretrained(tmp_path / "out")
    assert "Pushed" in stdout("push", tmp_path / "out", "me/films")
    assert uploads[0][2]["private"] is False
    assert uploads[1][2]["commit_message"] == "I2CL injection for films"
    message = stdout("push", tmp_path / "out", "me/films", "--private", "--branch", "v2", "--json")
    assert json.loads(message)["commit"].startswith("https://")
    assert uploads[-1][2]["revision"] == "v2"


def http_error(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("refused", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(401), "rejects the token: log in with `hf auth login`"),
        (http_error(403), "has no write access there"),
        (http_error(500), "try again later"),
        (OfflineModeIsEnabled("offline"), "OfflineModeIsEnabled"),
        (HFValidationError("bad\nname"), r"HFValidationError \(bad\)"),
        (hub._HTTP_ERROR("no route"), "no route"),
    ],
    ids=str,
)
def test_failed_push_is_one_line(error, message, tmp_path, monkeypatch, refused):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(HfApi, "create_repo", Mock(side_effect=error))
    raises(message, make_injection().push_to_hub, "me/films")
    make_injection().save_pretrained(tmp_path / "out")
    assert "cannot push to 'me/films'" in refused("push", tmp_path / "out", "me/films")


def test_invalid_name_is_refused_offline(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "secret")
    make_injection().save_pretrained(tmp_path / "out")
    for name in ("a/b/c", "no spaces", ""):
        assert "cannot push to" in refused("push", tmp_path / "out", name)
    assert "is not a folder" in refused("push", tmp_path / "none", "me/films")


def test_push_needs_a_login(uploads, tmp_path, refused, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    make_injection().save_pretrained(tmp_path / "out")
    message = refused("push", tmp_path / "out", "me/films")
    assert "you are not logged in: log in with `hf auth login`, or set HF_TOKEN" in message
    assert uploads == []
