"""`--help` of each command: two lines of what it is for, and an example that runs."""

import shlex

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.main import get_command

from i2cl.interfaces.cli import EXAMPLES, app

ELSEWHERE = {"demo", "serve", "push"}  # slow, endless, and for the hub: tests of their own run them


def command(name):
    found = get_command(app)
    for word in name.split():
        found = found.commands[word]
    return found


def names(group, prefix=""):
    for name, found in group.commands.items():
        yield from names(found, f"{prefix}{name} ") if hasattr(found, "commands") else [prefix + name]


def test_every_command_has_an_example():
    assert sorted(EXAMPLES) == sorted(names(get_command(app)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_lines_and_an_example(name, call):
    first, second = command(name).help.split("\n\n")
    assert max(len(first), len(second)) <= 76
    assert (first[-1], second[-1]) == (".", ".")
    shown = " ".join(call(*name.split(), "--help")[1].split())
    assert f"Example: {EXAMPLES[name]}" in shown


def test_the_examples_run_one_after_another(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("the gloomy baker rested\nthat merry pilot waved\n", encoding="utf-8")
    for name, typed in EXAMPLES.items():
        if name == "convert":
            pickled(tmp_path / "plain", tmp_path / "pickled")
        if name not in ELSEWHERE:
            program, *words = shlex.split(typed)
            code, _, err = call(*words)
            assert (program, code) == ("i2cl", 0), err
    assert (tmp_path / "labels.csv").is_file()
    assert (tmp_path / "results" / "report" / "report.md").is_file()


def pickled(folder, new):
    """A model as older programs save it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.save_pretrained(new)
    torch.save(model.state_dict(), new / "pytorch_model.bin")
