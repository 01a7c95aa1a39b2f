"""Append-only files: complete lines, a single writer, resuming after a kill."""

import os
from types import SimpleNamespace

import pytest

from i2cl.errors import I2CLError
from i2cl.storage.journal import Journal, complete_lines, exclusive_lock


def add(path, *lines, **options):
    with Journal.open(path, **options) as journal:
        for line in lines:
            journal.append(line)
    return journal.kept


def test_lines_are_appended_and_counted(tmp_path):
    path = tmp_path / "j"
    assert add(path, b"one\n", b"two\nthree\n") == 0
    assert add(path, b"four\n") == 3
    assert complete_lines(path) == [b"one\n", b"two\n", b"three\n", b"four\n"]


@pytest.mark.parametrize(
    ("content", "options", "kept", "left"),
    [
        *((b"1\n2\n3", {}, 2, b"1\n2\n"), (b"1", {}, 0, b""), (b"1\n\r2\xff\n", {}, 2, b"1\n\r2\xff\n")),
        *((b"1\n2\n3\n", {"group": 2}, 2, b"1\n2\n"), (b"1\n2\n", {"group": 0}, 0, b"")),
        (b"h\n1\n2", {"header": b"h\n"}, 1, b"h\n1\n"),
        *((content, {"header": b"h\n"}, 0, b"") for content in (b"h\n", b"h")),
    ],
)
def test_torn_lines_are_cut_off(tmp_path, content, options, kept, left):
    path = tmp_path / "j"
    path.write_bytes(content)
    assert add(path, **options) == kept
    assert path.read_bytes() == left
    add(path, b"new\n", **options)
    assert path.read_bytes() == left + b"new\n"


def test_append_completes_partial_writes_and_syncs(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "j").open("ab", buffering=0) as file:
        slow = SimpleNamespace(write=lambda data: file.write(data[:3]), fileno=file.fileno)
        Journal(slow, 0).append(b"a long line\n")
        assert (tmp_path / "j").read_bytes() == b"a long line\n"
        assert synced == [file.fileno()]


def test_exclusive_lock_is_held_once_and_removed(tmp_path):
    lock = tmp_path / "lock"
    with exclusive_lock(lock, "busy"):
        with pytest.raises(I2CLError, match=r"^busy$"), exclusive_lock(lock, "busy"):
            pass
        assert lock.exists()
    with pytest.raises(ZeroDivisionError), exclusive_lock(lock, "busy"):
        _ = 1 / 0
    with exclusive_lock(lock, "busy"):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="none"), exclusive_lock(tmp_path / "none" / "lock", "busy"):
        pass
