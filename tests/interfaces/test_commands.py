"""What all commands share (help, JSON, groups of options, bars, the process), lists, and the model cache."""

import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from itertools import count
from unittest.mock import Mock, patch

import pytest
import typer
from rich.console import Console

import processes
from i2cl.interfaces import cli
from i2cl.interfaces.cli import EXAMPLES, app, console
from i2cl.methods import METHODS
from i2cl.models import loading
from i2cl.storage import model_cache
from i2cl.version import __version__
from processes import until


def commands(group, *path):
    """Return every command of a group, by its words."""
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
    assert not [text for text in value.values() if re.search(r"(?<!\\)\[\w", text)], "hidden as markup"
    first, second = COMMANDS[words].help.split("\n\n")
    assert (first[-1], second[-1]) == (".", ".")
    assert f"Example: {EXAMPLES[' '.join(words)]}" in " ".join(out.split())


ELSEWHERE = {"demo", "serve", "push"}  # slow, endless, and for the hub: other tests run them


@pytest.mark.usefixtures("few_golden_prompts")
def test_examples_in_help_run(stdout, tmp_path, monkeypatch):
    assert sorted(EXAMPLES) == sorted(map(" ".join, COMMANDS))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("the gloomy baker rested\nthat merry pilot waved\n", encoding="utf-8")
    labelled = "text,label\nthe sad cook slept,blue\na grim dog,blue\nthe merry poet,red\na glad king,red\n"
    (tmp_path / "labelled.csv").write_text(labelled, encoding="utf-8")
    for name, typed in EXAMPLES.items():
        if name not in ELSEWHERE:
            program, *words = shlex.split(typed)
            assert program == "i2cl"
            stdout(*words)
    assert (tmp_path / "labels.csv").is_file()
    assert (tmp_path / "results" / "report" / "report.md").is_file()


def test_demo_fits_and_classifies_with_commands_that_can_be_repeated(stdout, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "find_spec", lambda _: None)  # SmolLM2 is not installed
    monkeypatch.chdir(tmp_path)
    out = stdout("demo", "--evaluate", "8")
    assert not list(tmp_path.iterdir())
    fit, write, predict = (line for line in out.splitlines() if line.startswith("$ "))
    assert all(part in out for part in ("bundled model", "Verdict: "))
    stdout(*shlex.split(fit)[2:])
    (tmp_path / "new.txt").write_text("\n".join(shlex.split(write)[3:6]), encoding="utf-8")
    assert stdout(*shlex.split(predict)[2:]) in out


@pytest.mark.parametrize("words", [("fit",), ("eval",)], ids=" ".join)
def test_help_groups_options(call, words):
    out = call(*words, "--help")[1]
    assert re.findall(r"─ (\w[\w ]*) ─", out) == ["Arguments", "Options", "Method", "Task", "Model"]
    tasks = out[out.index("─ Task ") : out.index("─ Model ")]
    assert ("--template" in tasks, "--device" in tasks) == (True, False)


def test_json_has_null_for_nonfinite_numbers(capsys):
    console.print_json({"worst": math.inf, "rows": [(math.nan, 1.5, "inf")]})
    assert json.loads(capsys.readouterr().out) == {"worst": None, "rows": [[None, 1.5, "inf"]]}


def test_no_command_lists_all_commands(call, stdout):
    out = stdout()
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
        until(lambda: shown.getvalue().count("loading") >= 3)
    assert "exporting" not in shown.getvalue().split("loading", 1)[1]  # before, it may be the innermost


def test_time_left_is_estimated_after_the_first_step(monkeypatch):
    shown = piped(monkeypatch)
    monkeypatch.setattr(console, "time", Mock(perf_counter=count(step=60.0).__next__))
    with console.progress(4, "fitting") as bar:
        bar.epoch(1, 4, 0.7)
        assert bar.what == "calibrating, loss 0.700, up to 3 minutes left"
    assert not shown.getvalue()


def test_ls_lists_tasks_architectures_and_methods(stdout):
    tasks, rows, methods = (json.loads(stdout("ls", kind, "--json")) for kind in LISTS)
    tasks, methods = ({record["name"]: record for record in one} for one in (tasks, methods))
    assert set(tasks) >= {"sst2", "dbpedia", "synthetic", "mood-letter-1"}
    assert tasks["sst2"]["labels"] == ["negative", "positive"]
    assert {"model_type": "gpt2", "layers": "h", "attention": "attn", "mlp": "mlp"} in rows
    assert list(methods) == list(METHODS)
    assert methods["task_vector"]["options"] == {}
    options = methods["i2cl"]["options"]
    assert options["formula"] == {"default": "linear", "choices": ["linear", "add", "balance"]}
    assert options["epochs"] == {"default": "100", "choices": []}


LISTS = {"tasks": "agnews", "architectures": "gpt_neox", "methods": "zero_shot"}
"""What can be listed, and a name that people see then."""


def keys(value):
    """Return every key of nested JSON."""
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


OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
MALLOC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def variables_after_main(names, environment):
    """Return the variables of these names after a command that starts with this environment."""
    others = {name: value for name, value in os.environ.items() if name not in names}
    with patch.dict(os.environ, others | environment, clear=True):
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        return {name: os.environ[name] for name in names if name in os.environ}


def test_threads_spin_for_a_short_while():
    assert variables_after_main(OPENMP, {}) == {"GOMP_SPINCOUNT": cli.SPIN_COUNT}


@pytest.mark.skipif(sys.platform != "linux", reason="thresholds of glibc")
def test_freed_memory_is_kept():
    assert variables_after_main(MALLOC, {}) == dict.fromkeys(MALLOC[:2], str(cli.KEPT_BYTES))


@pytest.mark.parametrize(
    ("names", "environment"),
    [
        (OPENMP, {"OMP_WAIT_POLICY": "ACTIVE"}),
        (OPENMP, {"GOMP_SPINCOUNT": "1000"}),
        (MALLOC, {"MALLOC_TRIM_THRESHOLD_": "1000000"}),
        (MALLOC, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
    ],
)
def test_variables_of_the_user_are_kept(names, environment):
    assert variables_after_main(names, environment) == environment


def test_garbage_is_not_collected_at_exit():
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
    program += "from i2cl.interfaces.cli import main; main(['--version'])"
    command = [sys.executable, "-c", program]
    output = subprocess.check_output(command, env=processes.environment(), text=True)
    assert output.splitlines() == [__version__, "True"]


@pytest.fixture
def entries(tmp_path, monkeypatch):
    """A cache with two entries, a file of the user, and an interrupted conversion."""
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path))
    folder = model_cache.cache_folder()
    for dtype in ("float32", "bfloat16"):
        write = lambda fresh: (fresh / "model.safetensors").write_bytes(bytes(2_000_000))  # noqa: E731
        assert model_cache.add_entry(folder / f"abc-{dtype}", tmp_path / "film.gguf", dtype, 0, write)
    (folder / ".abc-float32-x1").mkdir()
    (folder / "own.gguf").write_text("")
    return folder


def test_cache_lists_file_dtype_and_size(stdout, entries):
    out = stdout("cache")
    assert out.count("film.gguf") == 2
    assert "bfloat16" in out
    assert f"2 converted models in {entries}." in out
    record = json.loads(stdout("cache", "--json"))
    assert record["folder"] == str(entries)
    assert [model["dtype"] for model in record["models"]] == ["bfloat16", "float32"]
    assert all(2_000_000 < model["bytes"] < 2_001_000 for model in record["models"])


def test_clear_deletes_entries_and_leaves_other_files(stdout, entries):
    assert stdout("cache", "--clear") == f"Deleted 2 converted models from {entries}.\n"
    assert [path.name for path in entries.iterdir()] == ["own.gguf"]
    assert stdout("cache") == f"0 converted models in {entries}.\n"


def test_missing_folder_is_an_empty_cache(stdout, tmp_path, monkeypatch):
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path / "none"))
    assert json.loads(stdout("cache", "--json"))["models"] == []
    assert json.loads(stdout("cache", "--clear", "--json"))["deleted"] == 0


def test_cache_entry_is_not_created_on_a_nearly_full_disk(tmp_path, monkeypatch):
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path))
    folder = model_cache.cache_folder() / "abc-float32"
    write = lambda fresh: pytest.fail("written")  # noqa: E731
    assert not model_cache.add_entry(folder, tmp_path / "film.gguf", "float32", 2**60, write)
    assert not folder.exists()


def test_default_folder_is_the_platforms_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(model_cache.CACHE_VARIABLE)
    monkeypatch.setattr(model_cache, "user_cache_path", lambda name, **_: tmp_path / name)
    assert model_cache.cache_folder() == tmp_path / "i2cl" / "gguf"
