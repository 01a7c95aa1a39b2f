"""What tests of commands share."""

import json

import pytest

from i2cl.interfaces.cli import main


def run(*words):
    """The exit code of a command."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def heard(capsys, *words):
    """The exit code of a command, its stdout and its stderr."""
    capsys.readouterr()
    return run(*words), *capsys.readouterr()


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
