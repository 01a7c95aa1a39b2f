"""Artefacts pushed to the hub, and what is said where it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

from fitting import one_line
from i2cl.core.artefact import DESCRIPTION, TENSORS
from i2cl.core.injection import Injection
from i2cl.storage import hub
from i2cl.storage.card import CARD
from storage.test_hub import card_of, decoder_named, made


@pytest.fixture
def uploads(monkeypatch):
    """What the client was asked for, and the files of every folder it was to upload."""
    asked = []

    def create_repo(self, repo_id, **options):
        asked.append(("create_repo", repo_id, options | {"token": self.token}))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, repo_id, **options):
        asked.append(("create_branch", repo_id, options))

    def upload_folder(self, *, repo_id, folder_path, **options):
        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        asked.append(("upload_folder", repo_id, options | {"files": files}))
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/1")

    monkeypatch.setenv("HF_TOKEN", "stored")
    for method in (create_repo, create_branch, upload_folder):
        monkeypatch.setattr(HfApi, method.__name__, method)
    return asked


def test_a_push_uploads_the_artefact_and_its_card(uploads, tmp_path):
    home = tmp_path / "home" / "llama"
    home.mkdir(parents=True)
    injection = made(decoder_named(str(home)))
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


def test_push_on_the_command_line(uploads, tmp_path, said):
    made().save_pretrained(tmp_path / "out")
    assert "Pushed" in said("push", tmp_path / "out", "me/films")
    assert uploads[0][2]["private"] is False
    assert uploads[1][2]["commit_message"] == "I2CL injection for films"
    told = said("push", tmp_path / "out", "me/films", "--private", "--branch", "v2", "--json")
    assert json.loads(told)["commit"].startswith("https://")
    assert uploads[-1][2]["revision"] == "v2"


def unauthorised(status):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("refused", response=response)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (unauthorised(401), "does not know this token: log in with `hf auth login`"),
        (unauthorised(403), "may not write there"),
        (unauthorised(500), "try again later"),
        (OfflineModeIsEnabled("offline"), "OfflineModeIsEnabled"),
        (HFValidationError("bad\nname"), r"HFValidationError \(bad\)"),
        (hub._HTTP_ERROR("no route"), "no route"),
    ],
    ids=str,
)
def test_a_push_that_fails_is_one_line(error, told, tmp_path, monkeypatch, refused):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(HfApi, "create_repo", Mock(side_effect=error))
    one_line(told, made().push_to_hub, "me/films")
    made().save_pretrained(tmp_path / "out")
    assert "cannot push to 'me/films'" in refused("push", tmp_path / "out", "me/films")


def test_a_name_that_is_none_never_reaches_the_hub(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_TOKEN", "secret")
    made().save_pretrained(tmp_path / "out")
    for name in ("a/b/c", "no spaces", ""):
        assert "cannot push to" in refused("push", tmp_path / "out", name)
    assert "is no folder" in refused("push", tmp_path / "none", "me/films")


def test_nobody_is_logged_in(uploads, tmp_path, refused, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    made().save_pretrained(tmp_path / "out")
    told = refused("push", tmp_path / "out", "me/films")
    assert "you are not logged in: log in with `hf auth login`, or set HF_TOKEN" in told
    assert uploads == []
