import errno
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors.numpy import save_file

from commands import listed
from fitting import raises
from i2cl.errors import I2CLError
from i2cl.storage.atomic import new_file, new_folder, require_writable, system_cause, write_errors

MARKER = "marker.json"
OWNED = {MARKER, "data"}


def write(path, content="new"):
    """Write a folder, check that it only appears at the end. Exceptions as content are raised half-way."""
    before = contents(path) if path.is_dir() else None
    with new_folder(path, OWNED) as fresh:
        (fresh / MARKER).write_text(str(content))
        assert (contents(path) if path.is_dir() else None) == before
        assert fresh.is_relative_to(path.parent)  # a rename across file systems is not atomic
        if not isinstance(content, str):
            raise content
        (fresh / "data").write_text(content)


def contents(path):
    return {entry.name: entry.read_text() for entry in path.iterdir()}


@pytest.mark.parametrize("before", ["nothing", "empty folder", "older", "missing parents"])
def test_new_folder_replaces_the_old_one(tmp_path, before):
    path = tmp_path / "some" / "where" / "out" if before == "missing parents" else tmp_path / "out"
    if before == "empty folder":
        path.mkdir()
    if before == "older":
        write(path, "old")
    write(path)
    assert contents(path) == {MARKER: "new", "data": "new"}
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077], ids=oct)
def test_files_follow_the_umask(tmp_path, umask):
    """Safetensors creates files that only their owner can read."""
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "out", OWNED) as fresh:
            (fresh / "deeper").mkdir()
            for path in (fresh / "data", fresh / "deeper" / "data"):
                save_file({"x": np.zeros(1)}, path)
    finally:
        os.umask(before)
    for path in (tmp_path / "out" / "data", tmp_path / "out" / "deeper" / "data"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("older", [True, False])
def test_error_leaves_the_old_folder(tmp_path, older, error):
    path = tmp_path / "out"
    if older:
        write(path, "old")
    with pytest.raises(error):
        write(path, error)
    assert contents(tmp_path / "out") == {MARKER: "old", "data": "old"} if older else not path.exists()
    assert len(list(tmp_path.iterdir())) == older


def test_failed_rename_restores_the_old_folder(tmp_path, monkeypatch):
    path = tmp_path / "out"
    write(path, "old")
    rename = Path.rename

    def failing(self, target):
        if self.name == "new":
            raise OSError("no space left")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    raises(r"cannot write .*no space left", write, path)
    assert contents(path) == {MARKER: "old", "data": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_folder_with_other_files_and_existing_file_are_refused(tmp_path):
    path = tmp_path / "out"
    write(path, "old")
    (path / "thesis.txt").write_text("mine")
    raises(r"out' holds other files \(thesis.txt\)", write, path)
    assert contents(path) == {MARKER: "old", "data": "old", "thesis.txt": "mine"}
    assert listed(tmp_path) == ["out"]
    (tmp_path / "file").write_text("mine")
    raises("is a file", write, tmp_path / "file")
    raises("cannot write to", write, tmp_path / "file" / "deeper")
    assert (tmp_path / "file").read_text() == "mine"
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        raises("is a file", require_writable, tmp_path / "pipe", set())


def test_require_writable_writes_nothing(tmp_path, monkeypatch):
    require_writable(tmp_path / "out", OWNED)
    assert listed(tmp_path) == []
    denied = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("i2cl.storage.atomic.tempfile.TemporaryFile", denied)
    raises(r"cannot write to .*Permission denied", require_writable, tmp_path / "out", OWNED)


@pytest.mark.parametrize("links", [True, False])
def test_new_file_is_created_at_the_end_or_not_at_all(tmp_path, monkeypatch, links):
    if not links:
        refused = Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted"))
        monkeypatch.setattr(Path, "hardlink_to", refused)
    path = tmp_path / "some" / "out"
    with new_file(path) as fresh:
        fresh.write_text("whole")
        assert not path.exists()
    assert contents(path.parent) == {"out": "whole"}
    with pytest.raises(I2CLError, match="already exists"), new_file(path):
        pass
    with pytest.raises(ZeroDivisionError), new_file(path.with_name("half")) as fresh:
        assert fresh.write_text("half") / 0
    message = r"cannot write .*No space left.*free space"
    with pytest.raises(I2CLError, match=message), new_file(path.with_name("full")):
        raise OSError(28, "No space left on device")
    assert contents(path.parent) == {"out": "whole"}


def test_system_cause_of_python_rust_and_numpy_errors():
    assert system_cause(OSError(errno.EFBIG, "File too large")) == "File too large"
    rust = "Error while serializing: I/O error: File too large (os error 27)"
    assert system_cause(Exception(rust)) == "File too large"
    assert system_cause(OSError("9216 requested and 7048 written")).endswith("; is the disk full?")
    for other in (ValueError("size (3)"), I2CLError(rust), BrokenPipeError(errno.EPIPE, "Broken pipe")):
        assert system_cause(other) is None
    with pytest.raises(ValueError, match="size"), write_errors("here"):
        raise ValueError("size")


def test_new_folder_does_not_overwrite_a_concurrently_created_folder(tmp_path):
    path = tmp_path / "out"

    def write_late():
        with new_folder(path, OWNED) as fresh:
            (fresh / "data").write_text("new")
            path.mkdir()
            (path / "mine").write_text("other")

    raises(r"out' holds other files \(mine\)", write_late)
    assert contents(path) == {"mine": "other"}
    assert listed(tmp_path) == ["out"]


def test_new_file_does_not_overwrite_a_concurrently_created_file(tmp_path):
    path = tmp_path / "file"

    def write_late():
        with new_file(path) as fresh:
            fresh.write_text("new")
            path.write_text("other")

    raises("file' already exists", write_late)
    assert contents(tmp_path) == {"file": "other"}


def test_new_folder_is_synced_before_the_rename(tmp_path, monkeypatch):
    order, rename = [], Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: order.append("sync"))
    monkeypatch.setattr(Path, "rename", lambda path, target: (order.append("name"), rename(path, target))[1])
    write(tmp_path / "out")
    assert order == ["sync"] * 3 + ["name", "sync"]


def test_new_file_is_synced_before_the_rename(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "i2cl.storage.atomic.sync_to_disk", lambda *paths: synced.append([*map(Path.exists, paths)])
    )
    path = tmp_path / "new"
    with new_file(path) as fresh:
        fresh.write_text("content")
        assert synced == []
    assert synced == [[True], [True]], "the file, then its folder"
    assert path.read_text() == "content"
