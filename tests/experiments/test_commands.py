"""Running grids by the command line: resuming, kills, many processes, bad input."""

import json
import signal
import socket
from unittest.mock import Mock

import psutil
import pytest

import commands
from experiments.runs import GRID, ONE, cell, kept, run_alone
from fitting import one_line
from i2cl import Decoder, load_task
from i2cl.experiments.library import BROUGHT, ORDER, compared_with, limited, load_experiment
from i2cl.experiments.store import Store
from i2cl.experiments.studies import Bench
from i2cl.interfaces.cli.experiment import _cells
from processes import COMMAND, Program, finished, until


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference")


@pytest.fixture(scope="module")
def alone(decoder, tmp_path_factory):
    """The record of a cell that is run by itself, in this process; each once."""
    found = {}

    def run(one):
        if one.key not in found:
            found[one.key] = run_alone(one, decoder, tmp_path_factory.mktemp("alone"))
        return found[one.key]

    return run


def run(tmp_path, capsys, *more, grid=GRID):
    file = tmp_path / "mine.toml"
    file.write_text(grid)
    words = ("experiment", "run", file, "--store", tmp_path / "store", "--workers", 1, *more)
    return commands.run(*words), capsys.readouterr()


def test_run_then_run_again_then_report(tmp_path, capsys):
    code, told = run(tmp_path, capsys, "--json")
    assert (code, json.loads(told.out)["done"]) == (0, 2 + 6 + 6)
    code, told = run(tmp_path, capsys, "--json", "--seeds", "4")
    told = json.loads(told.out)
    assert told.pop("store")
    assert told == {"done": 4, "failed": 0, "skipped": 0, "kept": 14}
    assert reported(capsys, tmp_path / "store", "--experiments", tmp_path / "mine.toml")[0] == 0
    text = (tmp_path / "store" / "report" / "report.md").read_text()
    assert "mood-colour-1" in text
    assert "Few-shot (ICL)" in text


def test_a_file_of_rows_is_a_task_of_a_grid_in_words_of_its_own(tmp_path, capsys):
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
    code, told = run(tmp_path, capsys, grid=grid)
    assert code == 0, told
    last = told.out.splitlines()[-1]
    assert last == f"next: i2cl report {tmp_path / 'store'} --experiments {tmp_path / 'mine.toml'}"
    cells = [record.cell for record in Store.open(tmp_path / "store").records.values()]
    assert {cell.wording.template for cell in cells} == {words}
    decoder = Decoder.from_pretrained("reference")
    assert Bench(decoder, None, tmp_path).task(cells[0]).template.format == words
    code, told = reported(capsys, *last.split()[3:])
    text = (tmp_path / "store" / "report" / "report.md").read_text()
    assert (code, "Difference from Zero-shot" in text) == (0, True), "the first row, where no I2CL is"
    code, told = run(tmp_path, capsys, grid=grid.replace("A: {label}", "A: "))
    assert (code, "{label} 0 times" in told.err) == (2, True)


def reported(capsys, *words):
    return commands.run("report", *words, "--formats", "md"), capsys.readouterr()


def test_a_grid_that_names_tasks_runs_on_some_of_them_and_is_compared_with_any_row(tmp_path, capsys):
    named = GRID.replace('tasks"', 'tasks", "comparison"')
    code, told = run(tmp_path, capsys, "--json", "--tasks", "job-letter-1", "--seeds", "1", grid=named)
    tasks = {record.cell.task for record in Store.open(tmp_path / "store").records.values()}
    assert (code, tasks) == (0, {"job-letter-1"})
    code, told = run(tmp_path, capsys, "--tasks", "sst2", grid=named)
    known = "no chosen experiment has the task 'sst2': known are mood-colour-1, job-letter-1"
    assert (code, known in told.err) == (2, True)
    run(tmp_path, capsys, "--seeds", "1", grid=named)
    words = [tmp_path / "store", "--experiments", tmp_path / "mine.toml"]
    code, told = reported(capsys, *words, "--tasks", "mood-colour-1", "--against", "Few-shot (ICL)")
    text = (tmp_path / "store" / "report" / "report.md").read_text()
    assert code == 0
    assert "Difference from Few-shot (ICL)" in text
    assert "job-letter-1" not in text
    code, told = reported(capsys, *words, "--tasks", "all")
    assert "job-letter-1" in (tmp_path / "store" / "report" / "report.md").read_text()
    code, told = reported(capsys, tmp_path / "store", "--experiments", "main", "--tasks", "mood-color-1")
    hint = "this store has the task 'mood-color-1': did you mean 'mood-colour-1'"
    assert (code, hint in told.err) == (2, True)
    code, told = reported(capsys, *words, "--against", "Few-shot")
    assert (code, "did you mean 'Few-shot (ICL)'" in told.err) == (2, True)


def test_grids_are_limited_each_to_its_own_tasks_and_compared_with_a_row_that_they_have():
    main_grid, real, chat = (load_experiment(name) for name in ("main", "real", "chat"))
    found = limited([main_grid, real, chat], ["intents", "sst2", "rte"])
    assert [one.tasks for one in found] == [("intents", "sst2", "rte"), ("sst2", "intents"), ("sst2",)]
    assert [one.name for one in limited([real, chat], ["intents"])] == ["real"]
    one_line(r"task 'trecc': did you mean 'trec'", limited, [real, chat], ["sst2", "trecc"])
    assert [one.against for one in compared_with([main_grid, real], "IA3")] == ["I2CL", "IA3"]


def test_failures_are_told_and_set_the_exit_code(tmp_path, capsys):
    wrong = GRID.replace('name = "Few-shot (ICL)"', 'name = "Few-shot (ICL)", shots = [1, 100000]')
    code, told = run(tmp_path, capsys, grid=wrong)
    assert code == 1
    assert "14 cells done, 6 failed" in told.out
    assert "failed: mood-colour-1 few_shot seed 0: I2CLError: task 'mood-colour-1'" in told.out
    store = Store.open(tmp_path / "store")
    assert sum(record.status == "failed" for record in store.records.values()) == 6


def test_ls_lists_every_experiment(capsys):
    commands.run("experiment", "ls", "--json")
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(listed) == list(BROUGHT)
    assert listed["main"]["paper"].startswith("Table 1")
    asked = load_experiment("real")
    cells = sum(min(asked.full.seeds, row.seeds or 99) for row in asked.rows)
    assert listed["real"]["cells_per_task"] == cells
    assert [name for name in ORDER if load_experiment(name).timed] == ["main", "peft", "efficiency"]


def test_ctrl_c_says_that_cells_are_kept(tmp_path, monkeypatch, capsys):
    pressed = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("i2cl.interfaces.cli.experiment._watch", lambda _bar: pressed)
    code, told = run(tmp_path, capsys)
    assert code == 130
    assert told.err == "error: interrupted: 1 cells are kept: the same command goes on with them\n"


FORKING = """
from multiprocessing import get_context
from i2cl.experiments.workers import processes
processes.get_context = lambda _: get_context("fork")
"""
"""Before a program whose workers are to start as fast as it does itself."""


@pytest.mark.parametrize("workers", [1, 2])
def test_kills_lose_nothing_and_corrupt_nothing(tmp_path, workers):
    """Every kill leaves a store that reads; the run that follows adds what is lacking, no more."""
    file, folder = tmp_path / "mine.toml", tmp_path / "store"
    file.write_text(GRID)
    arguments = ["experiment", "run", file, "--store", folder, "--workers", workers]
    survivors = set()
    for more in (0, 1, 3):  # when it holds the lock, amid its first record, amid later ones
        program = Program(FORKING + COMMAND, *arguments)
        wanted = max(lines(folder), 0) + more
        until(lambda wanted=wanted: lines(folder) >= wanted, program=program)
        process = psutil.Process(program.process.pid)
        started, own = process.children(recursive=True), process.children()  # a worker may be asking git
        program.process.kill()
        code, _, told = program.wait()
        assert code == -signal.SIGKILL, told
        assert psutil.wait_procs(started, timeout=60)[1] == []
        assert len(own) == (workers if workers > 1 else 0) or not more
        store = Store.open(folder)
        assert survivors <= set(store.records)
        survivors = set(store.records)
    assert len(survivors) >= 4
    with (folder / "cells.jsonl").open("a") as handle:
        handle.write('{"key"')  # a torn line
    code, told, _ = finished(FORKING + COMMAND, *arguments, "--json")
    assert (code, json.loads(told)["done"]) == (0, 14 - len(survivors))
    store = Store.open(folder)
    assert all(one.status == "done" for one in store.records.values())
    written = (folder / "cells.jsonl").read_text().splitlines()
    assert len(written) == len({json.loads(line)["key"] for line in written}) == len(store.records) == 14
    straight = tmp_path / "straight"
    code, _, errors = finished(FORKING + COMMAND, *arguments[:3], "--store", straight, "--workers", "1")
    assert code == 0, errors
    for key, record in Store.open(straight).records.items():
        assert kept(record) == kept(store.records[key])


def lines(folder):
    """Whole lines of a store; -1 before there is one."""
    file = folder / "cells.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else -1


def test_two_processes_hold_one_model_together(tmp_path, alone):
    """Tensor parallel, as torchrun starts it: one store, written by the first, with one process's results."""
    file, folder = tmp_path / "mine.toml", tmp_path / "store"
    file.write_text(GRID)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    arguments = ["experiment", "run", file, "--store", folder, "--seeds", "1"]
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    programs = [
        Program(COMMAND, *arguments, "--device-map", "tensor_parallel", **rank, **meeting) for rank in ranks
    ]
    (first, told, errors), (second, *_) = [program.wait() for program in programs]
    assert (first, second) == (0, 0), errors
    assert told.count("6 cells done") == 1
    records = Store.open(folder).records
    assert len(records) == len((folder / "cells.jsonl").read_text().splitlines()) == 6
    for record in records.values():
        assert record.outcome.predictions == alone(record.cell).outcome.predictions
        assert record.provenance["weights"] == alone(record.cell).provenance["weights"]


def test_tasks_that_a_user_names_are_all_run():
    named = [f"mood-colour-{n}" for n in (1, 2)] + ["job-letter-1"]
    cells, _ = _cells("shots", cell(), named, named, True, None, None)
    assert {one.task for one in cells} == set(named)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('method = "few_shott"', "experiment 'mine', row 'a': unknown method 'few_shott'"),
        ('method = "few_shot", options = { colour = "red" }', "row 'a': no chosen method has the option"),
    ],
)
def test_rows_that_cannot_be_run_are_refused_first(row, message, tmp_path, capsys):
    grid = f'title = "T"\nmeasures = "M"\nrows = [{{ name = "a", {row} }}]\n'
    code, told = run(tmp_path, capsys, grid=grid)
    assert (code, message in told.err) == (2, True)
    assert not (tmp_path / "store").exists()


def test_a_grid_is_run_by_its_name_or_by_its_file(tmp_path):
    file = tmp_path / "my grid.toml"
    file.write_text('title = "x"\nmeasures = "y"\nrows = [{ name = "a", method = "zero_shot" }]\n')
    assert load_experiment(file).command == f"i2cl experiment run '{file}'"
    assert load_experiment("real").command == "i2cl experiment run real"
