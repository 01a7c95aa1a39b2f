"""Files that grow: whole lines, one writer, going on after a kill."""

import os
from types import SimpleNamespace

import pytest

from i2cl.errors import I2CLError
from i2cl.storage.journal import Journal, only_writer, whole_lines


def add(path, *lines, **options):
    with Journal.opened(path, **options) as journal:
        for line in lines:
            journal.append(line)
    return journal.kept


def test_lines_are_added_and_counted(tmp_path):
    path = tmp_path / "j"
    assert add(path, b"one\n", b"two\nthree\n") == 0
    assert add(path, b"four\n") == 3
    assert whole_lines(path) == [b"one\n", b"two\n", b"three\n", b"four\n"]


@pytest.mark.parametrize(
    ("there", "options", "kept", "left"),
    [
        *((b"1\n2\n3", {}, 2, b"1\n2\n"), (b"1", {}, 0, b""), (b"1\n\r2\xff\n", {}, 2, b"1\n\r2\xff\n")),
        *((b"1\n2\n3\n", {"group": 2}, 2, b"1\n2\n"), (b"1\n2\n", {"group": 0}, 0, b"")),
        (b"h\n1\n2", {"header": b"h\n"}, 1, b"h\n1\n"),
        *((there, {"header": b"h\n"}, 0, b"") for there in (b"h\n", b"h")),
    ],
)
def test_what_a_kill_tore_is_cut_off(tmp_path, there, options, kept, left):
    path = tmp_path / "j"
    path.write_bytes(there)
    assert add(path, **options) == kept
    assert path.read_bytes() == left
    add(path, b"new\n", **options)
    assert path.read_bytes() == left + b"new\n"


def test_a_line_is_on_the_disk_at_once_however_it_is_cut_up(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with (tmp_path / "j").open("ab", buffering=0) as file:
        slow = SimpleNamespace(write=lambda data: file.write(data[:3]), fileno=file.fileno)
        Journal(slow, 0).append(b"a long line\n")
        assert (tmp_path / "j").read_bytes() == b"a long line\n"
        assert synced == [file.fileno()]


def test_one_writer_at_a_time_and_no_lock_left_behind(tmp_path):
    lock = tmp_path / "lock"
    with only_writer(lock, "busy"):
        with pytest.raises(I2CLError, match=r"^busy$"), only_writer(lock, "busy"):
            pass
        assert lock.exists()
    with pytest.raises(ZeroDivisionError), only_writer(lock, "busy"):
        _ = 1 / 0
    with only_writer(lock, "busy"):
        pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="none"), only_writer(tmp_path / "none" / "lock", "busy"):
        pass
