"""Grids on the command line: resuming, kills, several processes, bad input."""

import json
import signal
from unittest.mock import Mock

import psutil
import pytest

from commands import run
from experiments.runs import GRID, ONE, cell, kept, run_alone
from fitting import raises
from i2cl import Decoder, load_task
from i2cl.experiments.library import BUILTIN, compare_with, load_experiment, restrict_tasks
from i2cl.experiments.runner import Bench
from i2cl.experiments.store import Store
from i2cl.interfaces.cli.experiment import _cells
from processes import COMMAND, Program, finished, until


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference")


@pytest.fixture(scope="module")
def alone(decoder, tmp_path_factory):
    """Run a cell separately in this process, and cache its record."""
    result = {}

    def run(one):
        if one.key not in result:
            result[one.key] = run_alone(one, decoder, tmp_path_factory.mktemp("alone"))
        return result[one.key]

    return run


def written(tmp_path, *more, grid=GRID):
    """Write a grid's file, and return the arguments that run it."""
    file = tmp_path / "mine.toml"
    file.write_text(grid)
    return "experiment", "run", file, "--store", tmp_path / "store", "--workers", 1, *more


@pytest.fixture
def reported(stdout, tmp_path):
    """Write a report of the test's store, and return its Markdown."""

    def report(*words):
        stdout("report", tmp_path / "store", *words, "--formats", "md")
        return (tmp_path / "store" / "report" / "report.md").read_text()

    return report


def test_second_run_adds_only_missing_cells(tmp_path, stdout, reported):
    assert json.loads(stdout(*written(tmp_path, "--json")))["done"] == 2 + 6 + 6
    record = json.loads(stdout(*written(tmp_path, "--json", "--seeds", "4")))
    assert record.pop("store")
    assert record == {"done": 4, "failed": 0, "skipped": 0, "kept": 14}
    text = reported("--experiments", tmp_path / "mine.toml")
    assert "mood-colour-1" in text
    assert "Few-shot (ICL)" in text


def test_grid_with_a_task_from_files_and_its_own_template(tmp_path, stdout, reported, refused):
    task = load_task(ONE)
    rows = [{"text": row.text, "label": task.labels[row.label]} for row in task.train[:80]]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = "Q: {text} A: {label}"
    name, test = (json.dumps(str(tmp_path / f"{one}.jsonl")) for one in ("train", "test"))
    grid = f"""
title = "mine"
measures = "m"
tasks = [{name}]
own.{name} = {{ template = {json.dumps(words)}, test = {test} }}
rows = [{{ name = "Zero-shot", method = "zero_shot" }}, {{ name = "Few-shot", method = "few_shot" }}]
full = {{ seeds = 1, limit = 8 }}
"""
    last = stdout(*written(tmp_path, grid=grid)).splitlines()[-1]
    assert last == f"next: i2cl report {tmp_path / 'store'} --experiments {tmp_path / 'mine.toml'}"
    cells = [record.cell for record in Store.open(tmp_path / "store").records.values()]
    assert {cell.wording.template for cell in cells} == {words}
    decoder = Decoder.from_pretrained("reference")
    assert Bench(decoder, None, tmp_path).task(cells[0]).template.format == words
    assert "Difference from Zero-shot" in reported(*last.split()[4:]), (
        "the first row is the reference without a row I2CL"
    )
    assert "then {label} at the end" in refused(*written(tmp_path, grid=grid.replace("A: {label}", "A: ")))


def test_tasks_and_against_options(tmp_path, stdout, reported, refused):
    named = GRID.replace('tasks"', 'tasks", "comparison"')
    stdout(*written(tmp_path, "--tasks", "job-letter-1", "--seeds", "1", grid=named))
    assert {one.cell.task for one in Store.open(tmp_path / "store").records.values()} == {"job-letter-1"}
    known = "no chosen experiment has the task 'sst2': use one of mood-colour-1, job-letter-1"
    assert known in refused(*written(tmp_path, "--tasks", "sst2", grid=named))
    stdout(*written(tmp_path, "--seeds", "1", grid=named))
    words = ["--experiments", tmp_path / "mine.toml"]
    text = reported(*words, "--tasks", "mood-colour-1", "--against", "Few-shot (ICL)")
    assert "Difference from Few-shot (ICL)" in text
    assert "job-letter-1" not in text
    assert "job-letter-1" in reported(*words, "--tasks", "all")
    report = ("report", tmp_path / "store", "--experiments")
    hint = "this store has the task 'mood-color-1': did you mean 'mood-colour-1'"
    assert hint in refused(*report, "main", "--tasks", "mood-color-1")
    assert "did you mean 'Few-shot (ICL)'" in refused(*report, words[1], "--against", "Few-shot")


def test_report_of_all_experiments_counts_the_cells_of_other_grids(tmp_path, call):
    before, after = GRID.split("rows = [")[0], GRID.split("]\n")[-1]
    row = '{ name = "mine", method = "zero_shot", options = { scoring = "sequence" } }'
    grid = f"{before}rows = [{row}]\n{after}"
    assert call(*written(tmp_path, "--seeds", "1", "--limit", "4", grid=grid))[0] == 0
    report = ("report", tmp_path / "store", "--formats", "md")
    code, _, err = call(*report)
    assert code == 0
    assert "2 of 2 cells belong to no built-in experiment: name the TOML files" in err
    assert "built-in" not in call(*report, "--experiments", tmp_path / "mine.toml")[2]


def test_restrict_tasks_and_compare_with():
    main_grid, real, chat = (load_experiment(name) for name in ("main", "real", "chat"))
    result = restrict_tasks([main_grid, real, chat], ["intents", "sst2", "rte"])
    assert [one.tasks for one in result] == [("intents", "sst2", "rte"), ("sst2", "intents"), ("sst2",)]
    assert [one.name for one in restrict_tasks([real, chat], ["intents"])] == ["real"]
    raises(r"task 'trecc': did you mean 'trec'", restrict_tasks, [real, chat], ["sst2", "trecc"])
    assert [one.against for one in compare_with([main_grid, real], "IA3")] == ["I2CL", "IA3"]
    named = ["mood-colour-1", "mood-colour-2", "job-letter-1"]
    cells = _cells("shots", cell(), named, named, True, None, None)
    assert {one.task for one in cells} == set(named)


def test_failures_are_reported_and_set_the_exit_code(tmp_path, stdout):
    wrong = GRID.replace('name = "Few-shot (ICL)"', 'name = "Few-shot (ICL)", shots = [1, 100000]')
    expected = stdout(*written(tmp_path, grid=wrong), code=1)
    assert "14 cells done, 6 failed" in expected
    assert "failed: mood-colour-1 few_shot seed 0: I2CLError: task 'mood-colour-1'" in expected
    assert sum(one.status == "failed" for one in Store.open(tmp_path / "store").records.values()) == 6


def test_ls_lists_every_experiment(stdout):
    listed = {row["name"]: row for row in json.loads(stdout("experiment", "ls", "--json"))}
    assert list(listed) == list(BUILTIN)
    assert listed["main"]["paper"].startswith("Table 1")
    asked = load_experiment("real")
    cells = sum(min(asked.full.seeds, row.seeds or 99) for row in asked.rows)
    assert listed["real"]["cells_per_task"] == cells


def test_ctrl_c_reports_the_stored_cells(tmp_path, monkeypatch, call):
    pressed = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("i2cl.interfaces.cli.experiment._show_progress", lambda _bar: pressed)
    code, _, expected = call(*written(tmp_path))
    assert code == 130
    assert expected == "error: interrupted: the store has 1 cells; run the same command to resume\n"


FORKING = """
from multiprocessing import get_context
from i2cl.experiments import workers
workers.get_context = lambda _: get_context("fork")
"""
"""Prepended to a program to make its workers start fast."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert run(*written(folder)) == 0
    return Store.open(folder / "store")


@pytest.mark.parametrize(("workers", "kills"), [(1, (1, 3)), (2, (0, 3))])
def test_run_resumes_after_kill(uninterrupted, tmp_path, workers, kills):
    """Every kill leaves a readable store, and the next run adds only missing cells.

    ``kills``: new records after which each run is killed; 0: while it starts.
    """
    folder = tmp_path / "store"
    arguments = [*written(tmp_path)[:-1], workers]
    survivors = set()
    for more in kills:
        program = Program(FORKING + COMMAND, *arguments)
        wanted = max(lines(folder), 0) + more
        until(lambda wanted=wanted: lines(folder) >= wanted, program=program)
        process = psutil.Process(program.process.pid)
        started, own = process.children(recursive=True), process.children()  # a worker may run git
        program.process.kill()
        code, _, expected = program.wait()
        assert code == -signal.SIGKILL, expected
        assert psutil.wait_procs(started, timeout=60)[1] == []
        assert len(own) == (workers if workers > 1 else 0) or not more
        store = Store.open(folder)
        assert survivors <= set(store.records)
        survivors = set(store.records)
    assert len(survivors) >= sum(kills)
    with (folder / "cells.jsonl").open("a") as handle:
        handle.write('{"key"')  # an incomplete line
    code, expected, _ = finished(FORKING + COMMAND, *arguments, "--json")
    assert (code, json.loads(expected)["done"]) == (0, 14 - len(survivors))
    store = Store.open(folder)
    assert all(one.status == "done" for one in store.records.values())
    on_disk = (folder / "cells.jsonl").read_text().splitlines()
    assert len(on_disk) == len({json.loads(line)["key"] for line in on_disk}) == len(store.records) == 14
    for key, record in uninterrupted.records.items():
        assert kept(record) == kept(store.records[key])


def lines(folder):
    """Number of complete lines of a store; -1 before it exists."""
    file = folder / "cells.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else -1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('method = "few_shott"', "experiment 'mine', row 'a': unknown method 'few_shott'"),
        ('method = "few_shot", options = { colour = "red" }', "row 'a': no chosen method has the option"),
    ],
)
def test_invalid_rows_are_rejected_before_anything_runs(row, message, tmp_path, refused):
    grid = f'title = "T"\nmeasures = "M"\nrows = [{{ name = "a", {row} }}]\n'
    assert message in refused(*written(tmp_path, grid=grid))
    assert not (tmp_path / "store").exists()
