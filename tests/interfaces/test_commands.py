"""What all commands share: help, JSON, groups of options, bars; and lists."""

import io
import json
import math
import re
import shlex
import time
from functools import partial
from itertools import count
from unittest.mock import Mock

import pytest
import typer
from rich.console import Console

from i2cl.interfaces.cli import EXAMPLES, app, console
from i2cl.methods import METHODS
from i2cl.models import loading
from i2cl.version import __version__
from processes import until


def commands(group, *path):
    """Every command below a group, by its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))
# Commands that take --seed; a grid brings its own seeds.
RANDOM = {("demo",), ("fit",), ("eval",), ("suggest",), ("review",)}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_json_and_seed(call, words):
    code, out, err = call(*words, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: i2cl {' '.join(words)}" in out
    value = {name: option.help for option in COMMANDS[words].params for name in option.opts}
    assert value["--json"] == "Print JSON on stdout."
    assert ("--seed" in value) == ("--seed " in out) == (words in RANDOM)
    assert all(value.values())
    first, second = COMMANDS[words].help.split("\n\n")
    assert (first[-1], second[-1]) == (".", ".")
    assert f"Example: {EXAMPLES[' '.join(words)]}" in " ".join(out.split())


ELSEWHERE = {"demo", "serve", "push"}  # slow, endless, and for the hub: other tests run them


@pytest.mark.usefixtures("few_golden_prompts")
def test_examples_in_help_run(said, tmp_path, monkeypatch):
    assert sorted(EXAMPLES) == sorted(map(" ".join, COMMANDS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("the gloomy baker rested\nthat merry pilot waved\n", encoding="utf-8")
    labelled = "text,label\nthe sad cook slept,blue\na grim dog,blue\nthe merry poet,red\na glad king,red\n"
    (tmp_path / "labelled.csv").write_text(labelled, encoding="utf-8")
    for name, typed in EXAMPLES.items():
        if name not in ELSEWHERE:
            program, *words = shlex.split(typed)
            assert program == "i2cl"
            said(*words)
    assert (tmp_path / "labels.csv").is_file()
    assert (tmp_path / "results" / "report" / "report.md").is_file()


def test_demo_fits_and_classifies_with_commands_that_can_be_repeated(said, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "find_spec", lambda _: None)  # SmolLM2 is not installed
    monkeypatch.chdir(tmp_path)
    out = said("demo", "--evaluate", "8")
    assert not list(tmp_path.iterdir())
    fit, write, predict = (line for line in out.splitlines() if line.startswith("$ "))
    assert all(part in out for part in ("bundled model", "Verdict: "))
    said(*shlex.split(fit)[2:])
    (tmp_path / "new.txt").write_text("\n".join(shlex.split(write)[3:6]), encoding="utf-8")
    assert said(*shlex.split(predict)[2:]) in out


@pytest.mark.parametrize("words", [("fit",), ("eval",)], ids=" ".join)
def test_help_groups_options(call, words):
    out = call(*words, "--help")[1]
    assert re.findall(r"─ (\w[\w ]*) ─", out) == ["Arguments", "Options", "Method", "Task", "Model"]
    tasks = out[out.index("─ Task ") : out.index("─ Model ")]
    assert ("--template" in tasks, "--device" in tasks) == (True, False)


def test_json_has_null_for_nonfinite_numbers(capsys):
    console.print_json({"worst": math.inf, "rows": [(math.nan, 1.5, "inf")]})
    assert json.loads(capsys.readouterr().out) == {"worst": None, "rows": [[None, 1.5, "inf"]]}


def test_no_command_lists_all_commands(call, said):
    out = said()
    assert all(command in out for command in ("demo", "fit", "predict", "eval", "check", "ls"))
    assert call("--version") == (0, __version__ + "\n", "")


def test_progress_bar_shows_time_left_and_current_wait(monkeypatch):
    shown = Console(file=io.StringIO(), force_terminal=True, get_time=count(step=90.0).__next__)
    monkeypatch.setattr(console, "err", shown)
    with console.progress(10, "calibrating") as bar:
        for epoch in range(3):
            bar.epoch(epoch + 1, 10, 0.5)
        (task,) = bar._shown.tasks
        assert task.time_remaining
        assert "0.500" in task.description
    with console.progress(2, "evaluating") as bar:
        with console.waiting("loading [one]"):
            assert bar.what == "loading [one]"
        assert bar.what == "evaluating"


def piped(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=shown, force_terminal=False, width=200))
    return shown


@pytest.mark.parametrize("wait", [console.waiting, partial(console.progress, 4)])
def test_piped_output_gets_a_progress_line_per_minute(monkeypatch, wait):
    shown = piped(monkeypatch)
    monkeypatch.setattr(console, "HEARTBEAT_S", 0.01)
    with wait("folding weights"):
        until(lambda: shown.getvalue().count("folding weights: 1 s so far") >= 2)
    lines = shown.getvalue()
    time.sleep(0.05)
    assert shown.getvalue() == lines, "it ends with the block"


def test_piped_output_reports_innermost_work_only(monkeypatch):
    shown = piped(monkeypatch)
    monkeypatch.setattr(console, "HEARTBEAT_S", 0.01)
    with console.progress(None, "exporting"), console.waiting("loading"):
        until(lambda: "loading" in shown.getvalue())
    assert "exporting" not in shown.getvalue()


def test_time_left_is_estimated_after_the_first_step(monkeypatch):
    shown = piped(monkeypatch)
    monkeypatch.setattr(console, "time", Mock(perf_counter=count(step=90.0).__next__))
    with console.progress(4, "fitting") as bar:
        bar.expect(0.5)
        bar.epoch(1, 4, 0.7)
    assert "step 1 of 4 after 2 minutes, up to 2 minutes left" in shown.getvalue()


def test_ls_lists_tasks_architectures_and_methods(said):
    tasks, rows, methods = (json.loads(said("ls", kind, "--json")) for kind in LISTS)
    tasks, methods = ({record["name"]: record for record in one} for one in (tasks, methods))
    assert set(tasks) >= {"sst2", "dbpedia", "synthetic", "mood-letter-1"}
    assert tasks["sst2"]["labels"] == ["negative", "positive"]
    assert {"model_type": "gpt2", "layers": "h", "attention": "attn", "mlp": "mlp"} in rows
    assert list(methods) == list(METHODS)
    assert methods["task_vector"]["options"] == {}
    assert methods["i2cl"]["paper_row"] == "I2CL (ours)"
    options = methods["i2cl"]["options"]
    assert options["formula"] == {"default": "linear", "choices": ["linear", "add", "balance"]}
    assert options["epochs"] == {"default": "100", "choices": []}


LISTS = {"tasks": "agnews", "architectures": "gpt_neox", "methods": "zero_shot"}
"""What can be listed, and a name that people see then."""


def keys(value):
    """Every key of nested JSON."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    return set().union(*map(keys, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize(
    ("words", "shown"), [(("experiment", "ls"), "main"), *((("ls", kind), LISTS[kind]) for kind in LISTS)]
)
def test_lists_as_json_and_as_tables(call, words, shown):
    result = keys(json.loads(call(*words, "--json")[1]))
    assert result
    assert [key for key in result if not key.isidentifier()] == []
    code, out, err = call(*words)
    assert (code, err, shown in out) == (0, "", True)
