"""Helpers that run commands."""

import csv
import json

import pytest

from i2cl.interfaces.cli import main


def run(*words):
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    return stop.value.code


def run_command(capsys, *words):
    """Run a command and return its exit code, stdout and stderr."""
    capsys.readouterr()
    return run(*words), *capsys.readouterr()


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_csv(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path
