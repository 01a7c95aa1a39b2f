"""Running grids: studies, failures, resuming, kills, the command line."""

import json
import signal
import socket
import time
from functools import partial

import psutil
import pytest
import torch
from safetensors.torch import load_file

from i2cl import CalibrationConfig, Decoder, I2CLError, Injection, calibrate_many, extract, load_task
from i2cl.experiments import studies
from i2cl.experiments.evaluation import fit_seeds
from i2cl.experiments.grid import Cell, Experiment
from i2cl.experiments.library import BROUGHT, ORDER, compared_with, limited, load_experiment
from i2cl.experiments.report.document import build
from i2cl.experiments.runner import Group, GroupJob, pending, run_groups
from i2cl.experiments.store import Store
from i2cl.experiments.studies import Bench, plain, run_study, worst_group
from i2cl.injections.transfer import transfer
from i2cl.interfaces.cli import main
from i2cl.interfaces.cli.experiment import _cells
from i2cl.methods import make_methods
from i2cl.methods.few_shot import FewShot
from i2cl.methods.i2cl import I2CL
from i2cl.methods.prompts import PromptPredictor
from i2cl.models.scoring import Questions
from processes import COMMAND, Program, finished
from tiny import tiny_model, tiny_tokenizer

ONE, OTHER = "mood-colour-1", "job-letter-1"
GRID = """
title = "cheap"
measures = "cheap methods"
views = ["tasks"]
tasks = ["mood-colour-1", "job-letter-1"]
rows = [
  { name = "Zero-shot", method = "zero_shot", seeds = 1 },
  { name = "Few-shot (ICL)", method = "few_shot" },
  { name = "I2CL", method = "i2cl", options = { epochs = 1 } },
]
full = { seeds = 3, limit = 12 }
"""


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained("reference")


@pytest.fixture
def bench(decoder, tmp_path):
    return Bench(decoder, None, tmp_path / "vectors")


def cell(**changes):
    return Cell.model_validate({"model": "reference", "task": ONE, "limit": 12} | changes)


def run_alone(cell, decoder, folder):
    """The record of a cell that is run by itself."""
    (record,) = GroupJob((Group((cell,), (cell,)),), None, folder).run(decoder)
    return record


@pytest.fixture(scope="module")
def alone(decoder, tmp_path_factory):
    """The record of a cell that is run by itself, in this process; each once."""
    found = {}

    def run(one):
        if one.key not in found:
            found[one.key] = run_alone(one, decoder, tmp_path_factory.mktemp("alone"))
        return found[one.key]

    return run


def keep_short(bench, task):
    """As if an earlier cell had fitted plain I2CL, in a few epochs."""
    own = cell(task=task)
    found = bench.task(own)
    shown = found.sample(None, 0)
    (method,) = make_methods(["i2cl"], {"epochs": 3})
    (fitted,) = fit_seeds(bench.decoder, found, method, [shown], [0])
    bench.keep(own, fitted)
    return fitted.predictor


def test_a_method_cell_keeps_predictions_and_their_origin(bench):
    outcome = run_study(bench, cell(method="few_shot", seed=4))
    task = load_task(ONE)
    queries = task.queries(12)
    assert outcome.gold == tuple(query.label for query in queries)
    assert [task.train[place] for place in outcome.demonstrations] == list(task.sample(None, 4))
    right = sum(a == b for a, b in zip(outcome.gold, outcome.predictions, strict=True))
    assert outcome.accuracy == right / 12
    assert outcome.labels == task.labels
    assert outcome.coefficients is None
    assert list(bench.vectors.glob("*")) == []


def test_a_chat_is_asked_in_the_tokenizers_template(bench, monkeypatch):
    wanted = cell(method="zero_shot", chat=True)
    with pytest.raises(I2CLError, match="chat template"):
        run_study(bench, wanted)
    said = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    said += "{% if add_generation_prompt %}<assistant>{% endif %}"
    monkeypatch.setattr(bench.decoder.tokenizer, "chat_template", said)
    asked = load_task(ONE).chat(bench.decoder.tokenizer)
    assert asked.template.query("x").endswith("<assistant>")
    scores = Questions(bench.decoder, asked).scores([query.text for query in asked.queries(12)])
    assert run_study(bench, wanted).predictions == tuple(scores.argmax(-1).tolist())


def test_only_plain_i2cl_keeps_vectors(bench):
    changed = run_study(bench, cell(options={"epochs": 1}))
    assert len(changed.coefficients) == bench.decoder.layers
    assert not bench.vectors.exists()
    predictor = keep_short(bench, ONE)
    found = bench.injection(cell())
    assert isinstance(found, Injection)
    torch.testing.assert_close(found.coefficients, predictor.edit.coefficients)
    torch.testing.assert_close(found.context.values, predictor.edit.values)
    task = bench.task(cell())
    shown = [one for one in task.sample(None, 0) if one.label == 2]
    (kept,) = bench.vectors.glob("*.safetensors")
    own = extract(bench.decoder, task, shown).values
    torch.testing.assert_close(load_file(kept)["class_vectors"][2].float(), own, atol=2e-3, rtol=2e-3)


def test_moving_injects_what_another_task_was_fitted_to(bench):
    source = keep_short(bench, OTHER)
    outcome = run_study(bench, cell(study="move", sources=(OTHER,)))
    task = bench.task(cell())
    scores = PromptPredictor(Questions(bench.decoder, task), edit=source.edit).scores(
        [q.text for q in task.queries(12)]
    )
    assert outcome.predictions == tuple(scores.argmax(-1).tolist())
    assert outcome.coefficients == source.edit.coefficients.tolist()


def test_a_transfer_cell_is_the_transfer_of_the_library(bench, monkeypatch):
    monkeypatch.setattr("i2cl.injections.transfer.CalibrationConfig", partial(CalibrationConfig, epochs=3))
    for task in (ONE, OTHER):
        keep_short(bench, task)
    outcome = run_study(bench, cell(study="transfer", sources=(OTHER,)))
    task = bench.task(cell())
    anchors = [bench.injection(plain(cell(), OTHER))]
    first = bench.injection(plain(cell(), ONE))
    expected = transfer(bench.decoder, task, task.sample(None, 0), anchors, first=first)
    assert outcome.coefficients == expected.injection.coefficients.tolist()
    assert outcome.weights == {OTHER: pytest.approx(1.0)}


def test_what_was_not_fitted_yet_is_fitted_now(bench, monkeypatch):
    calls = []
    monkeypatch.setattr("i2cl.methods.i2cl.calibrate_many", lambda *a, **k: calls.append(1) or quick(*a, **k))

    def quick(decoder, tasks, demonstrations, contexts, config, **more):
        short = config.model_copy(update={"epochs": 1})
        return calibrate_many(decoder, tasks, demonstrations, contexts, short, **more)

    bench.injection(cell(task=OTHER))
    bench.injection(cell(task=OTHER))
    assert calls == [1]


def test_the_worst_group_is_the_one_few_shot_does_worst_with(bench, monkeypatch):
    monkeypatch.setattr("i2cl.experiments.studies.JUDGED_ON", 10)
    monkeypatch.setattr("i2cl.experiments.studies.GROUPS", 6)
    task = bench.task(cell())
    chosen, judged = worst_group(bench.decoder, task, 1, seed=3)
    groups = [task.sample(1, 1_000_000 + 6 * 3 + number) for number in range(6)]
    texts = [one.text for one in judged]
    (few_shot,) = make_methods(["few_shot"])
    gold = torch.tensor([one.label for one in judged])
    accuracies = [
        (few_shot.fit(bench.decoder, task, group, 0).scores(texts).argmax(-1) == gold).float().mean().item()
        for group in groups
    ]
    assert chosen == groups[accuracies.index(min(accuracies))]
    assert not {one.text for group in groups for one in group} & set(texts)
    assert not {one.text for one in task.test} & set(texts)
    outcome = run_study(bench, cell(method="zero_shot", demonstrations="worst", shots=1, seed=3))
    assert [task.train[place] for place in outcome.demonstrations] == list(chosen)
    assert outcome.cost.held_out == len(judged) == 10


def test_a_failing_cell_is_a_record(decoder, tmp_path):
    record = run_alone(cell(shots=100_000), decoder, tmp_path)
    assert (record.status, record.outcome) == ("failed", None)
    assert record.error.startswith("I2CLError: task 'mood-colour-1'")


def test_a_compressor_that_the_model_has_not_is_skipped_and_not_tried_again(tmp_path):
    decoder = Decoder(tiny_model("gpt2"), tiny_tokenizer(), name="tiny")
    names = ("autocompressor", "icae", "cepe")
    cells = [cell(method=name) for name in ("zero_shot", *names)]
    with Store.writing(tmp_path / "store") as store:
        tally = run_groups(
            pending(cells, store), store, lambda jobs: (job.run(decoder) for job in jobs), None
        )
        assert (tally.done, tally.failed, tally.skipped) == (1, 0, 3)
        assert pending(cells, store) == []
    rows = ({"name": "I2CL", "method": "zero_shot"}, {"name": "AutoComp.", "method": "autocompressor"})
    plan = Experiment(name="mine", title="T", measures="M", rows=rows)
    (section,) = build([plan], store.records.values(), {}, figures=False).sections
    told = "AutoComp. was skipped: autocompressor is known for llama and opt, not for 'gpt2'"
    assert told in section.missing
    assert not any("makes them" in one for one in section.missing)


def test_records_say_where_they_come_from(decoder, tmp_path):
    record = run_alone(cell(method="zero_shot"), decoder, tmp_path)
    assert record.key == cell(method="zero_shot").key
    assert record.provenance["weights"] == decoder.base.weights
    assert {"i2cl", "torch", "transformers", "device", "dtype", "commit", "machine"} <= set(record.provenance)
    assert record.peak_memory_bytes > 10**7


def single(*cells):
    return [Group((one,), (one,)) for one in cells]


def shot(seed, **changes):
    """A cell that gains nothing from others."""
    return cell(method="few_shot", seed=seed, **changes)


def quick(seed, **changes):
    """A cell that is calibrated with those of other seeds."""
    return cell(seed=seed, options={"epochs": 2}, **changes)


def test_pending_cells_come_once_seed_by_seed_and_fits_before_what_uses_them(tmp_path):
    moved = cell(study="move", sources=(OTHER,))
    cells = [shot(1), moved, cell(), cell(), shot(0), shot(1), cell(seed=1)]
    with Store.writing(tmp_path) as store:
        assert pending(cells, store) == single(cell(), shot(0), moved, shot(1), cell(seed=1))


def test_seeds_go_together_unless_they_are_timed_or_used_by_others(tmp_path):
    cells = [quick(seed) for seed in (2, 0, 1)]
    other = [quick(seed, task=OTHER) for seed in (0, 1)]
    moved = cell(study="move", sources=(OTHER,))
    plain_ones = [cell(seed=seed, task=OTHER) for seed in (0, 1, 2)]
    with Store.writing(tmp_path) as store:
        assert [group.cells for group in pending([*cells, *other], store)] == [
            (quick(0), quick(1), quick(2)),
            tuple(other),
        ]
        assert pending(cells, store, {quick(1).key}) == [
            Group((quick(0), quick(2)), (quick(0), quick(2))),
            *single(quick(1)),
        ]
        assert pending([moved, *plain_ones], store) == [
            *single(plain_ones[0], moved),
            Group(tuple(plain_ones[1:]), tuple(plain_ones[1:])),
        ]


@pytest.mark.parametrize("options", [{"optimizer": "lbfgs"}, {"positions": "random"}, {"epochs": "many"}])
def test_what_gains_nothing_stays_alone(options, tmp_path):
    cells = [cell(seed=seed, options=options) for seed in (0, 1)]
    with Store.writing(tmp_path) as store:
        assert pending(cells, store) == single(*cells)


def kept(record):
    """What may not depend on when a cell is run."""
    numbers = {"coefficients", "predictions", "cost", "together", "accuracy", "demonstrations"}
    return record.outcome.model_dump(include=numbers)


def test_a_group_is_fitted_whole_also_where_only_a_part_is_lacking(decoder, tmp_path):
    cells = tuple(quick(seed) for seed in range(3))
    with Store.writing(tmp_path / "store") as store:
        (whole,) = pending(cells, store)
        straight = {one.key: one for one in GroupJob((whole,), None, tmp_path).run(decoder)}
        store.append(straight[cells[1].key])  # as if a kill had come then
        (rest,) = pending(cells, store)
        assert rest == Group(cells, (cells[0], cells[2]))
        again = GroupJob((rest,), None, tmp_path).run(decoder)
        assert pending(cells, store, {cells[1].key}) == [
            Group((cells[0], cells[2]), (cells[0], cells[2])),
            *single(cells[1]),  # its seconds are a share
        ]
    assert [one.key for one in again] == [cells[0].key, cells[2].key]
    for one in again:
        assert kept(one) == kept(straight[one.key])
        assert one.outcome.together == 3
        by_itself = run_alone(one.cell, decoder, tmp_path)
        assert by_itself.outcome.together == 1
        torch.testing.assert_close(
            torch.tensor(one.outcome.coefficients),
            torch.tensor(by_itself.outcome.coefficients),
            atol=1e-4,
            rtol=1e-4,
        )
    assert len({one.outcome.fit_seconds for one in straight.values()}) == 1


def test_a_seed_that_fails_fails_no_other(decoder, tmp_path, monkeypatch):
    cells = tuple(quick(seed) for seed in range(3))

    def refuse(self, decoder, task, demonstrations, seed, plan=I2CL.plan):
        if seed == 1:
            raise I2CLError("not this one")
        return plan(self, decoder, task, demonstrations, seed)

    monkeypatch.setattr(I2CL, "plan", refuse)
    records = GroupJob((Group(cells, cells),), None, tmp_path).run(decoder)
    assert [one.status for one in records] == ["done", "failed", "done"]
    assert records[1].error == "I2CLError: not this one"
    assert {one.outcome.together for one in (records[0], records[2])} == {1}


def test_cells_that_stand_on_the_same_fit_are_one_job(decoder, tmp_path, monkeypatch):
    def asked(method, **changes):
        return cell(method=method, **{"limit": 40} | changes)

    skewed = asked("few_shot+label_prior", skew=3)
    cells = [
        asked("zero_shot"),
        asked("few_shot"),
        asked("contextual_calibration"),
        skewed,
        asked("few_shot", seed=1),
    ]
    fits, jobs = [], []

    def execute(given):
        jobs.extend([[one.key for group in job.groups for one in group.lacking] for job in given])
        yield from (job.run(decoder) for job in given)

    def counted(self, *arguments, fit=FewShot.fit):
        fits.append(1)
        return fit(self, *arguments)

    monkeypatch.setattr(FewShot, "fit", counted)
    with Store.writing(tmp_path) as store:
        run_groups(pending(cells, store), store, execute, None)
        found = dict(store.records)
    zero, few, over, prior, other = (one.key for one in cells)
    assert jobs == [[zero], [few, over, prior], [other]]
    assert len(fits) == 2
    for one in cells:
        by_itself = run_alone(one, decoder, tmp_path / "alone")
        assert kept(found[one.key]) == kept(by_itself)
    assert found[over].outcome.fit_seconds > found[few].outcome.fit_seconds
    gold = found[prior].outcome.gold
    assert sorted(map(gold.count, set(gold))) != sorted(map(found[few].outcome.gold.count, set(gold)))


def test_grids_that_show_costs_are_timed():
    assert [name for name in ORDER if load_experiment(name).timed] == ["main", "peft", "efficiency"]


# The command line


def run(tmp_path, capsys, *more, grid=GRID):
    file = tmp_path / "mine.toml"
    file.write_text(grid)
    with pytest.raises(SystemExit) as stop:
        main(["experiment", "run", str(file), "--store", str(tmp_path / "store"), "--workers", "1", *more])
    return stop.value.code, capsys.readouterr()


def test_run_then_run_again_then_report(tmp_path, capsys):
    code, told = run(tmp_path, capsys, "--json")
    assert (code, json.loads(told.out)["done"]) == (0, 2 + 6 + 6)
    code, told = run(tmp_path, capsys, "--json", "--seeds", "4")
    assert {k: v for k, v in json.loads(told.out).items() if k != "store"} == {
        "done": 4,
        "failed": 0,
        "skipped": 0,
        "kept": 14,
    }
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "report",
                str(tmp_path / "store"),
                "--experiments",
                str(tmp_path / "mine.toml"),
                "--formats",
                "md",
            ]
        )
    assert stop.value.code == 0
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
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, words), "--formats", "md"])
    return stop.value.code, capsys.readouterr()


def test_a_grid_that_names_tasks_runs_on_some_of_them_and_is_compared_with_any_row(tmp_path, capsys):
    named = GRID.replace('tasks"', 'tasks", "comparison"')
    code, told = run(tmp_path, capsys, "--json", "--tasks", "job-letter-1", "--seeds", "1", grid=named)
    tasks = {record.cell.task for record in Store.open(tmp_path / "store").records.values()}
    assert (code, tasks) == (0, {"job-letter-1"})
    code, told = run(tmp_path, capsys, "--tasks", "sst2", grid=named)
    assert code == 2
    assert "no chosen experiment has the task 'sst2': known are mood-colour-1, job-letter-1" in told.err

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
    assert (code, "this store has the task 'mood-color-1': did you mean 'mood-colour-1'" in told.err) == (
        2,
        True,
    )
    code, told = reported(capsys, *words, "--against", "Few-shot")
    assert (code, "did you mean 'Few-shot (ICL)'" in told.err) == (2, True)


def test_grids_are_limited_each_to_its_own_tasks():
    main_grid, real, chat = (load_experiment(name) for name in ("main", "real", "chat"))
    found = limited([main_grid, real, chat], ["intents", "sst2", "rte"])
    assert [one.tasks for one in found] == [("intents", "sst2", "rte"), ("sst2", "intents"), ("sst2",)]
    assert [one.name for one in limited([real, chat], ["intents"])] == ["real"]
    with pytest.raises(I2CLError, match=r"task 'trecc': did you mean 'trec'"):
        limited([real, chat], ["sst2", "trecc"])


def test_only_grids_with_the_row_are_compared_with_it():
    found = compared_with([load_experiment("main"), load_experiment("real")], "IA3")
    assert [one.against for one in found] == ["I2CL", "IA3"]


def test_failures_are_told_and_set_the_exit_code(tmp_path, capsys):
    wrong = GRID.replace('name = "Few-shot (ICL)"', 'name = "Few-shot (ICL)", shots = [1, 100000]')
    code, told = run(tmp_path, capsys, grid=wrong)
    assert code == 1
    assert "14 cells done, 6 failed" in told.out
    assert "failed: mood-colour-1 few_shot seed 0: I2CLError: task 'mood-colour-1'" in told.out
    store = Store.open(tmp_path / "store")
    assert sum(record.status == "failed" for record in store.records.values()) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment", "run", "mian"], "did you mean 'main'"),
        (["experiment", "run", "main", "--tasks", "sst3"], "unknown task"),
        (["report", "nowhere"], "no store at"),
        (["report", "nowhere", "--formats", "pdf"], "known are md, tex, csv, html"),
    ],
)
def test_bad_input_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    told = capsys.readouterr()
    assert stop.value.code == 2
    assert message in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_ls_lists_every_experiment(capsys):
    with pytest.raises(SystemExit):
        main(["experiment", "ls", "--json"])
    listed = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(listed) == list(BROUGHT)
    assert listed["main"]["paper"].startswith("Table 1")
    asked = load_experiment("real")
    assert listed["real"]["cells_per_task"] == sum(
        min(asked.full.seeds, row.seeds or 99) for row in asked.rows
    )


# Kills


def test_ctrl_c_says_that_cells_are_kept(tmp_path, monkeypatch, capsys):
    def interrupt(_record):
        raise KeyboardInterrupt

    (tmp_path / "mine.toml").write_text(GRID)
    monkeypatch.setattr("i2cl.interfaces.cli.experiment._watch", lambda _bar: interrupt)
    words = [
        "experiment",
        "run",
        str(tmp_path / "mine.toml"),
        "--store",
        str(tmp_path / "store"),
        "--workers",
        "1",
    ]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 130
    assert (
        capsys.readouterr().err
        == "error: interrupted: 1 cells are kept: the same command goes on with them\n"
    )


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
        wanted = (lines(folder) or 0) + more
        while program.process.is_alive() and (lines(folder) is None or lines(folder) < wanted):
            time.sleep(0.001)
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
    """Whole lines of a store; None before there is one."""
    file = folder / "cells.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else None


# Many processes


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


def run_groups_of(cells, decoder, folder, data_dir=None):
    def execute(jobs):
        return (job.run(decoder) for job in jobs)

    with Store.writing(folder) as store:
        return run_groups(pending(cells, store), store, execute, data_dir)


def test_a_store_refuses_other_weights(tmp_path):
    first, other = (
        Decoder(tiny_model("llama", hidden_size=size), tiny_tokenizer(), name="m") for size in (32, 64)
    )
    cells = [cell(method="few_shot", seed=seed, limit=2, shots=1) for seed in range(3)]
    assert run_groups_of(cells[:1], first, tmp_path / "s").done == 1
    assert run_groups_of(cells[:2], first, tmp_path / "s").done == 1
    with pytest.raises(I2CLError, match="results of other weights than 'm' has now: choose another --store"):
        run_groups_of(cells, other, tmp_path / "s")
    assert len(Store.open(tmp_path / "s").records) == 2


def test_a_store_refuses_other_rows_of_a_task(tmp_path, decoder):
    for folder, word in (("one", "good"), ("other", "great")):
        (tmp_path / folder / "sst2").mkdir(parents=True)
        for split in ("train", "test"):
            lines = [{"text": f"{word} {n}", "label": n % 2} for n in range(12)]
            file = tmp_path / folder / "sst2" / f"{split}.jsonl"
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cells = [cell(task="sst2", method="few_shot", seed=seed, limit=2, shots=1) for seed in range(2)]
    assert run_groups_of(cells[:1], decoder, tmp_path / "s", str(tmp_path / "one")).done == 1
    with pytest.raises(I2CLError, match="the store has results on other rows of task 'sst2'"):
        run_groups_of(cells, decoder, tmp_path / "s", str(tmp_path / "other"))


def test_a_store_refuses_another_wording_of_a_task(tmp_path, decoder):
    rows = [json.dumps({"text": f"text {n}", "label": n % 2}) + "\n" for n in range(8)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(rows))

    def written(template):
        (tmp_path / "mine.toml").write_text(
            f'name = "mine"\nlabels = ["red", "blue"]\ntemplate = "{template}"\nshots = 1\n'
            '[files]\ntrain = "train.jsonl"\ntest = "test.jsonl"\n'
        )
        for kept in (studies._task, studies._rows, studies._wording):
            kept.cache_clear()

    cells = [
        cell(task=str(tmp_path / "mine.toml"), method="few_shot", seed=seed, limit=2) for seed in range(2)
    ]
    written("Text: {text} Colour: {label}")
    assert run_groups_of(cells[:1], decoder, tmp_path / "s").done == 1
    assert run_groups_of(cells[:1], decoder, tmp_path / "s").done == 0
    written("{text} is {label}")
    with pytest.raises(I2CLError, match="with another template, label words, instruction or shots"):
        run_groups_of(cells, decoder, tmp_path / "s")
    assert run_groups_of(cells, decoder, tmp_path / "other").done == 2


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
    file = tmp_path / "mine.toml"
    file.write_text(f'title = "T"\nmeasures = "M"\nrows = [{{ name = "a", {row} }}]\n')
    with pytest.raises(SystemExit) as stopped:
        main(["experiment", "run", str(file), "--store", str(tmp_path / "s")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment", "run", "main", "--address", "ray://x:1"], "add --executor ray, or leave it out"),
        (["eval", "reference", f"{ONE},{ONE}"], f"two tasks are called '{ONE}': leave one out"),
        (["eval", "reference", ONE, "--method", "few_shot,few_shot"], "two methods are called 'few_shot'"),
    ],
)
def test_what_would_do_nothing_or_mix_is_refused(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_grid_is_run_by_its_name_or_by_its_file(tmp_path):
    file = tmp_path / "my grid.toml"
    file.write_text('title = "x"\nmeasures = "y"\nrows = [{ name = "a", method = "zero_shot" }]\n')
    assert load_experiment(file).command == f"i2cl experiment run '{file}'"
    assert load_experiment("real").command == "i2cl experiment run real"
