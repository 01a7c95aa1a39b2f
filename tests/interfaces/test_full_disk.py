"""A disk that is full, or a limit on the size of files: one line with place and cause, nothing left."""

import errno
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from commands import run
from processes import COMMAND, Program

resource = pytest.importorskip("resource", reason="limits of POSIX")

TASK, QUICK = "mood-colour-1", "--set epochs=1"
GRID = """
title = "one cell"
measures = "nothing"
views = ["tasks"]
tasks = ["mood-colour-1"]
rows = [{ name = "I2CL", method = "i2cl", shots = [1], options = { epochs = 1 } }]
full = { seeds = 1, limit = 2 }
"""


def listed(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@contextmanager
def files_up_to(size):
    """Limit the size of files that this process writes, in bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


# What is run, and sizes that one of its files exceeds: its first, or a later one.
COMMANDS = {
    "fit": (f"fit reference {TASK} -o {{new}} --shots 1 {QUICK} --set formula=add --evaluate 0", 100, 3000),
    "classifier": ("export {home}/mood {new}", 100, 100_000),
    "causal-lm": ("export {home}/mood {new} --to causal-lm", 100, 100_000),
    "peft": ("export {home}/mood {new} --to peft", 2000),
    "gguf": ("export {home}/mood {new}.gguf --to gguf", 100, 100_000),
    "run": ("experiment run {home}/grid.toml --store {new} --workers 1", 100, 4000),
    "pack": ("experiment pack {home}/store {new}", 100, 2000),
    "unpack": ("experiment unpack {home}/packed {new}", 100, 2000),
    "report": ("report {home}/store --experiments {home}/grid.toml -o {new}", 3000),
    "predict": ("predict {home}/mood {home}/texts.txt -o {new}", 10, 60),
}


def arguments(command, home, new):
    return [word.format(home=home, new=new) for word in COMMANDS[command][0].split()]


@pytest.fixture(autouse=True, scope="module")
def _vectors_are_kept():
    """An injection like that of plain I2CL, which would take longer to fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("i2cl.experiments.runner.default_i2cl", lambda cell, _task: cell)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An artefact, texts, a grid, its store and the same packed."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "texts.txt").write_text("the letter arrived\n")
    (folder / "grid.toml").write_text(GRID)
    for command, place in (("fit", "mood"), ("run", "store"), ("pack", "packed")):
        assert run(*arguments(command, folder, folder / place)) == 0
    return folder


@pytest.mark.usefixtures("few_golden_prompts")
@pytest.mark.parametrize(
    ("command", "size"), [(name, size) for name, (_, *sizes) in COMMANDS.items() for size in sizes]
)
def test_a_full_disk_is_one_line_and_leaves_nothing(call, home, tmp_path, command, size):
    before = listed(home)
    with files_up_to(size):
        code, out, err = call(*arguments(command, home, tmp_path / "new"))
    assert (code, out) == (2, "")
    *before_it, line = err.splitlines()
    assert all("`i2cl verify` of a GGUF file" in note for note in before_it)  # which needs a package more
    assert line.startswith("error: cannot write ")
    assert str(tmp_path / "new") in line
    assert os.strerror(errno.EFBIG) in line or "is the disk full?" in line
    assert (listed(tmp_path), listed(home)) == ([], before)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", ["ls tasks", "ls methods --json", "predict {home}/mood {home}/texts.txt"])
def test_stdout_that_takes_nothing_is_one_line(home, words):
    program = Program(COMMAND, *words.format(home=home).split(), out=Path("/dev/full"))
    program.process.join()
    (line,) = program.err.read_text().splitlines()
    assert line.startswith(f"error: cannot write stdout ({os.strerror(errno.ENOSPC)})")
    assert program.process.exitcode == 2


def test_no_temporary_folder_is_one_line(refused, home, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "_get_default_tempdir", Mock(side_effect=none))
    line = refused("push", home / "mood", "someone/mood")
    assert line.startswith("error: ")
    assert "No usable temporary directory" in line
