"""Reports from records made by hand, so that every number can be checked."""

import csv
import io
import re
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from i2cl.errors import I2CLError
from i2cl.experiments.confidence import NAMES, confidence
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.grid import Cell, Experiment, GridRow, Scale
from i2cl.experiments.library import load_experiment
from i2cl.experiments.records import COUNTS, Record, Run, Scores
from i2cl.experiments.report.document import CAPTIONS, build
from i2cl.experiments.report.page import write
from i2cl.experiments.report.printed import PrintedRow, PrintedTable, printed_for
from i2cl.experiments.report.render import csv_text, html, latex, markdown
from i2cl.experiments.report.results import results_of, right
from i2cl.experiments.statistics import accuracy, difference
from i2cl.injections.temperature import best_temperature, normalised

LLAMA = "meta-llama/Llama-2-7b-hf"
LLAMA3 = "meta-llama/Meta-Llama-3-8B"
METHODS = {"Zero-shot": "zero_shot", "Few-shot (ICL)": "few_shot", "ICV": "icv", "I2CL": "i2cl"}


def experiment(rows=("Zero-shot", "I2CL"), *, seeds=3, **fields):
    made = [
        row
        if isinstance(row, GridRow)
        else GridRow(name=row, method=METHODS[row], seeds=1 if row == "Zero-shot" else None)
        for row in rows
    ]
    fields = {"views": ("tasks", "average", "comparison", "cost"), "title": "Trial", **fields}
    scale = Scale(seeds=seeds, limit=40)
    return Experiment(name="trial", measures="Accuracy.", rows=tuple(made), full=scale, **fields)


def record(method, task, seed, answers, model="reference", **more):
    """``answers`` as a string of 1 (right) and 0, or as booleans."""
    right = np.array([answer == "1" for answer in answers] if isinstance(answers, str) else answers)
    outcome = {name: more.pop(name) for name in tuple(more) if name in {*Run.model_fields, *COUNTS}}
    provenance = more.pop("provenance", {"i2cl": "0.1.0", "torch": "2.9", "device": "cpu"})
    cell = Cell(**{"model": model, "task": task, "method": method, "seed": seed, "limit": 40, **more})
    found = {
        "accuracy": float(right.mean()),
        "macro_f1": 0.5,
        "gold": tuple(int(place % 2) for place in range(len(right))),
        "predictions": tuple(int(place % 2 == ok) for place, ok in enumerate(right)),
        "labels": ("a", "b"),
        "demonstrations": (0, 1),
        "fit_seconds": 1.0,
        "predict_seconds": 2.0,
        **outcome,
    }
    return Record(
        key=cell.key,
        cell=cell,
        status="done",
        outcome=found,
        started="2025-01-02T03:04:05+00:00",
        provenance=provenance,
    )


def failed(method, task, seed, error):
    cell = Cell(model="reference", task=task, method=method, seed=seed, limit=40)
    return Record(key=cell.key, cell=cell, status="failed", error=error, started="2025-01-02T03:04:05+00:00")


SEEDS = ("1111111000", "1111100000", "1111111111")
"""70, 50 and 100 % right: mean 73.3, standard deviation 25.2."""


def trial():
    """Zero-shot 40 % and 20 %; I2CL 73.3 ± 25.2 and 50 ± 0, which on average is 61.7 ± 12.6."""
    made = [record("zero_shot", "sst2", 0, "1111000000"), record("zero_shot", "trec", 0, "1100000000")]
    for seed, answers in enumerate(SEEDS):
        made.append(record("i2cl", "sst2", seed, answers))
        made.append(record("i2cl", "trec", seed, "1111100000"))
    return made


def section(experiment, records, **more):
    (only,) = build([experiment], records, {}, figures=False, **more).sections
    return only


def table(view, experiment, records, place=0, **more):
    """One of a view's tables; of the others, nothing is computed."""
    return section(experiment.model_copy(update={"views": (view,)}), records, **more).tables[place]


def texts(table):
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def cells(table):
    return {row[0].text: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}


def noted(table, part):
    found = [note for note in table.notes if part in note]
    assert len(found) == 1, table.notes
    return found[0]


def random(share, seed, queries=40):
    return np.random.default_rng(seed).random(queries) < share


# Numbers, in tables and everything that they are rendered to.


def test_accuracy_by_task_and_average_by_hand():
    found = table("tasks", experiment(), trial())
    assert found.columns == ("Row", "Average", "sst2", "trec")
    assert texts(found) == {
        "Zero-shot": ["30.0", "40.0", "20.0"],
        "I2CL": ["61.7 ± 12.6", "73.3 ± 25.2", "50.0 ± 0.0"],
    }
    assert "3 seeds" in found.notes[0]
    assert "a single seed has no ±" in found.notes[0]
    assert "10 queries per task" in found.notes[0]
    assert not any("†" in note for note in found.notes)


def test_average_with_its_interval():
    found = texts(table("average", experiment(), trial()))
    rows = [
        np.array([[answer == "1" for answer in one] for one in SEEDS]),
        np.tile(np.arange(10) < 5, (3, 1)),
    ]
    expected = accuracy(rows)
    assert found["I2CL"] == [
        "61.7 ± 12.6",
        f"{100 * expected.low:.1f} to {100 * expected.high:.1f}",
        "2",
        "3",
    ]
    assert found["Zero-shot"][0] == "30.0"


def test_cost_by_hand():
    made = [
        record("i2cl", "sst2", 0, "10", fit_seconds=1.0, predict_seconds=0.5, cached_values=768),
        record("i2cl", "sst2", 1, "10", fit_seconds=3.0, predict_seconds=1.5, cached_values=768),
        record("i2cl", "trec", 0, "1010", fit_seconds=5.0, predict_seconds=1.0, cached_values=3072),
        record("i2cl", "trec", 1, "1010", fit_seconds=7.0, predict_seconds=1.0, cached_values=3072),
    ]
    made = [
        one.model_copy(
            update={"outcome": one.outcome.model_copy(update={"cost": replace(one.outcome.cost, trained=16)})}
        )
        for one in made
    ]
    found = cells(table("cost", experiment(["I2CL"], seeds=2), made))["I2CL"]
    assert found["Values kept"].text == "768–3,072"
    assert found["Trained parameters"].text == "16"
    assert found["Fit, s"].text == "4.00"
    assert found["Query, ms"].text == "375"


def test_times_from_several_places_are_said_to_be_incomparable():
    made = [
        record("zero_shot", "sst2", 0, "10", provenance={"device": "cpu", "threads": "2"}),
        record("i2cl", "sst2", 0, "10", provenance={"device": "cuda:0", "threads": "2"}),
    ]
    note = noted(table("cost", experiment(seeds=1), made), "cannot be compared")
    assert "device cpu, threads 2; device cuda:0, threads 2" in note


def test_comparison_is_row_minus_i2cl_corrected_over_the_table():
    rows = ("Zero-shot", "Few-shot (ICL)", "ICV", "I2CL")
    shares = {"zero_shot": 0.2, "few_shot": 0.8, "icv": 0.5, "i2cl": 0.5}
    made = [
        record(method, task, seed, random(share, [place, seed, len(task)]))
        for place, (method, share) in enumerate(shares.items())
        for task in ("sst2", "agnews")
        for seed in range(1 if method == "zero_shot" else 5)
    ]
    asked = experiment(rows)
    (results,) = results_of(asked, made)
    expected = {}
    for row in results.rows[:3]:
        lines = [next(one for one in results.lines if one.row is wanted) for wanted in (row, results.default)]
        pair = [[right([*results.records(one, task).values()]) for task in results.tasks] for one in lines]
        expected[row.name] = difference(*pair)
    corrected = dict(zip(expected, holm([one.p for one in expected.values()]), strict=True))
    values = {one["row"]: one for one in table("comparison", asked, made).values}
    assert list(values) == list(expected)
    for name, one in expected.items():
        assert values[name]["mean"] == pytest.approx(100 * one.mean)
        assert values[name]["low"] == pytest.approx(100 * one.low)
        assert values[name]["high"] == pytest.approx(100 * one.high)
        assert values[name]["p"] == one.p
        assert values[name]["q"] == corrected[name]
    verdicts = {name: found[-1] for name, found in texts(table("comparison", asked, made)).items()}
    assert verdicts == {"Zero-shot": "lower", "Few-shot (ICL)": "higher", "ICV": "no difference shown"}
    by_task = table("comparison", asked, made, place=1)
    marks = {name: "".join(text[-1] for text in found) for name, found in texts(by_task).items()}
    assert marks == {"Zero-shot": "▼▼", "Few-shot (ICL)": "▲▲", "ICV": "··"}
    assert "the family is all 6 tests of this table" in noted(by_task, "Holm")
    assert "the family is all 3 tests of this table" in noted(table("comparison", asked, made), "Holm")
    for one in (by_task, table("comparison", asked, made)):
        assert "q < 0.05" in noted(one, "Shown:")
    q = holm([one["p"] for one in by_task.values])
    assert [one["q"] for one in by_task.values] == q


def test_the_p_that_is_printed_is_the_one_that_decides():
    """Over queries alone the difference of one lucky seed is certain; over seeds it is not."""
    made = [record("icv", "sst2", seed, ("1" if seed == 0 else "0") * 40) for seed in range(4)]
    made += [record("i2cl", "sst2", seed, "0" * 40) for seed in range(4)]
    asked = experiment(("ICV", "I2CL"), seeds=4, views=("comparison",))
    (results,) = results_of(asked, made)
    tested = results.difference(*results.lines)
    assert tested.p_queries < 0.001 < 0.3 < tested.p_seeds
    found = table("comparison", asked, made)
    assert texts(found)["ICV"][2] == f"{tested.p_seeds:.3f}"
    (row,) = csv.DictReader(io.StringIO(csv_text(build([asked], made, {}, figures=False))))
    assert float(row["p"]) == tested.p_seeds
    assert not {"p_queries", "p_seeds"} & row.keys()
    few = [one for one in made if one.cell.seed < 3]
    (row,) = csv.DictReader(io.StringIO(csv_text(build([asked], few, {}, figures=False))))
    assert (row["p"], float(row["q"])) == ("", 1)  # too few seeds decide nothing


def test_one_task_needs_neither_average_nor_a_table_by_task():
    made = [one for one in trial() if one.cell.task == "sst2"]
    found = section(experiment(), made)
    titles = ["Accuracy by task", "Average accuracy over tasks", "Difference from I2CL", "Cost"]
    assert [one.title for one in found.tables] == titles
    assert found.tables[0].columns == ("Row", "sst2")


def test_many_tasks_are_lines():
    tasks = [f"task{number:02}" for number in range(11)]
    made = [record("i2cl", task, 0, "1" * number + "0") for number, task in reversed([*enumerate(tasks)])]
    made += [record("zero_shot", task, 0, "0" * number + "0") for number, task in enumerate(tasks)]
    found = table("tasks", experiment(seeds=1), made)
    assert found.columns == ("Task", "Zero-shot", "I2CL")
    assert [row[0].text for row in found.rows] == ["Average", *tasks]
    assert texts(found)["task01"] == ["0.0", "50.0"]
    by_task = table("comparison", experiment(seeds=1), made, place=1)
    assert by_task.columns == ("Task", "Zero-shot")
    assert texts(by_task)["task01"] == ["−50.0 ·"]


def test_demonstrations_per_class():
    made = [record("i2cl", "sst2", 0, answers, shots=shots) for shots, answers in ((1, "1000"), (5, "1110"))]
    made.append(record("zero_shot", "sst2", 0, "1100"))
    rows = ("Zero-shot", GridRow(name="I2CL", shots=(1, 5)))
    asked = experiment(rows, seeds=1, views=("shots", "tasks"))
    assert texts(table("shots", asked, made)) == {"Zero-shot": ["50.0", "50.0"], "I2CL": ["25.0", "75.0"]}
    assert list(texts(table("tasks", asked, made))) == ["Zero-shot", "I2CL, 1 per class", "I2CL, 5 per class"]


def test_moved_rows_have_a_matrix_and_stay_out_of_other_tables():
    made = [*trial()]
    for number, source in enumerate(("sst2", "trec")):
        for place, task in enumerate(("sst2", "trec")):
            answers = "1" * (1 + 2 * number + place) + "0" * 6
            made.append(record("i2cl", task, 0, answers[:10].ljust(10, "0"), study="move", sources=(source,)))
    rows = ("Zero-shot", "I2CL", GridRow(name="Moved", study="move"))
    asked = experiment(rows, views=("tasks", "comparison", "matrix"))
    assert list(texts(table("tasks", asked, made))) == ["Zero-shot", "I2CL"]
    found = table("matrix", asked, made)
    assert found.columns == ("From", "sst2", "trec")
    assert texts(found) == {"sst2": ["10.0", "20.0"], "trec": ["30.0", "40.0"]}
    assert "1 of 3 seeds: all rows." in noted(found, "†")


def with_scores(method, task, seed, sharper=3.0, queries=60):
    """Scores that are sharper than they should be, so that their best temperature is near that."""
    gold = np.arange(queries) % 2
    fair = np.random.default_rng([seed, len(task), len(method)]).standard_normal(queries) + gold - 0.5
    scores = normalised(np.stack([-fair / 2, fair / 2], 1))  # by Bayes' rule for two normal distributions
    best = scores.argmax(1)
    return record(method, task, seed, best == gold, scores=Scores.of(scores * sharper))


def trusted(seeds=3):
    made = [with_scores("i2cl", task, seed) for task in ("sst2", "agnews") for seed in range(seeds)]
    return made + [record("icv", task, 0, "10" * 30) for task in ("sst2", "agnews")]


def test_confidence_as_it_is_and_at_the_best_temperature_of_each_task():
    made = trusted()
    found = table("confidence", experiment(("ICV", "I2CL")), made)
    each, best, temperatures = [], [], []
    for task in ("sst2", "agnews"):
        runs = [one.outcome for one in made if (one.cell.task, one.cell.method) == (task, "i2cl")]
        arrays = [run.scores.array for run in runs]
        gold = [np.array(run.gold) for run in runs]
        answers = [np.array(run.predictions) for run in runs]
        temperatures.append(best_temperature(np.concatenate(arrays), np.concatenate(gold)))
        sets = [*zip(arrays, gold, answers, strict=True)]
        each.append([confidence(*one) for one in sets])
        best.append([confidence(normalised(a, temperatures[-1]), g, p) for a, g, p in sets])
    row = cells(found)["I2CL"] | {"plain": None}
    shown = [cell.text for cell in found.rows[1][1:]]
    expected = []
    for name, factor, digits in (("log_loss", 1, 3), ("brier", 1, 3), ("ece", 100, 1), ("aurc", 100, 1)):
        for held in (each, best):
            seeds = factor * np.mean([[getattr(one, name) for one in task] for task in held], axis=0)
            expected.append(f"{seeds.mean():.{digits}f} ± {seeds.std(ddof=1):.{digits}f}")
    assert shown == [*expected, f"{np.median(temperatures):.2f}"]
    assert row["Best T"].text == shown[-1]
    assert 1.5 < np.median(temperatures) < 6
    losses = [float(text.split()[0]) for text in shown[:2]]
    assert losses[1] < losses[0]


def test_rows_without_scores_have_no_confidence_and_are_named():
    found = table("confidence", experiment(("ICV", "I2CL")), trusted())
    assert set(texts(found)["ICV"]) == {"–"}
    assert noted(found, "cells without scores").endswith(": ICV.")
    views = ("tasks", "confidence", "reliability", "risk-coverage")
    (only,) = build([experiment(views=views)], trial(), {}).sections
    assert [one.title for one in only.tables] == ["Accuracy by task"]
    assert only.missing[-1].startswith("confidence, reliability, risk-coverage: no row has the scores")


def test_the_file_has_a_line_for_each_number_of_confidence():
    report = build([experiment(("ICV", "I2CL"), views=("confidence",))], trusted(), {}, figures=False)
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    assert {one["task"] for one in rows} == {"sst2", "agnews", "(average)"}
    assert {one["measure"] for one in rows} == {*NAMES, *(f"{name}_at_best" for name in NAMES)}
    (one,) = (one for one in rows if (one["task"], one["measure"]) == ("sst2", "ece_at_best"))
    assert (one["unit"], one["seeds"], one["queries"]) == ("percent", "3", "60")
    assert float(one["temperature"]) > 1.5
    assert "| I2CL" in markdown(report)


# Bold: only what can be told from all others.


def bold(table):
    return [
        (row[0].text, name)
        for row in table.rows
        for name, one in zip(table.columns, row, strict=True)
        if one.bold
    ]


@pytest.mark.parametrize("view", ["tasks", "average"])
def test_nothing_is_bold_among_equals(view):
    made = [
        record(method, task, seed, random(0.7, [seed, len(task)]))
        for method in ("few_shot", "i2cl")
        for task in ("sst2", "agnews")
        for seed in range(3)
    ]
    found = table(view, experiment(("Few-shot (ICL)", "I2CL")), made)
    assert bold(found) == []
    assert "Nothing is bold" in noted(found, "bold")


def always_right(method="few_shot", tasks=("sst2", "trec"), wrong=("i2cl", "icv")):
    answers = {method: "1" * 40, **dict.fromkeys(wrong, "0" * 40)}
    return [record(one, task, seed, answers[one]) for one in answers for task in tasks for seed in range(4)]


def test_what_is_right_everywhere_is_bold():
    asked = experiment(("Few-shot (ICL)", "ICV", "I2CL"))
    found = table("tasks", asked, always_right())
    assert bold(found) == [("Few-shot (ICL)", column) for column in ("Average", "sst2", "trec")]
    assert "better than every other row: q < 0.05" in noted(found, "Bold")
    assert "the family is the other rows" in noted(found, "Bold")
    assert bold(table("average", asked, always_right())) == [("Few-shot (ICL)", "Average")]


# The paper's numbers.


def llama(method="i2cl", model=LLAMA, shares=(0.5, 0.5), tasks=("sst2", "trec"), **more):
    return [
        record(method, task, seed, random(share, [seed, len(task)]), model=model, **more)
        for task, share in zip(tasks, shares, strict=True)
        for seed in range(3)
    ]


def test_printed_rows_stand_below_ours_by_name_of_task():
    found = table("tasks", experiment(["I2CL"], printed="main"), llama(tasks=("trec", "sst2")))
    assert [row[0].text for row in found.rows] == ["I2CL", "I2CL (paper)"]
    printed = cells(found)["I2CL (paper)"]
    assert printed["trec"].text == "78.56 ± 5.32"
    assert printed["sst2"].text == "87.68 ± 2.47"
    assert printed["Average"].text == "75.12"
    assert all(cell.printed for cell in printed.values())
    assert printed["sst2"].mark == "‡"
    assert "outside our 95 % interval" in noted(found, "‡")
    assert "as printed in Table 1" in noted(found, "(paper)")
    assert "2 here, 9 there" in noted(found, "other tasks than the paper's")
    assert printed["Average"].mark == ""  # other tasks: nothing to compare
    assert noted(found, "without results here").endswith("Task-vector, ICV and 3 more.")


def test_a_task_that_the_paper_lacks_stays_empty():
    found = table("tasks", experiment(["I2CL"], printed="main"), llama(tasks=("sst2", "mine")))
    assert cells(found)["I2CL (paper)"]["mine"].text == ""


@pytest.mark.parametrize("view", ["tasks", "average", "cost"])
@pytest.mark.parametrize(("model", "name"), [("reference", "main"), (LLAMA, None), (LLAMA3, "peft")])
def test_no_printed_rows_for_other_models_and_experiments(view, model, name):
    found = table(view, experiment(["I2CL"], printed=name), llama(model=model))
    assert "(paper)" not in str((found.columns, found.rows, found.notes))


@pytest.mark.parametrize("view", ["tasks", "average"])
def test_averages_that_contradict_their_rows_are_flagged(view):
    asked = experiment(["Few-shot (ICL)", "I2CL"], printed="main", views=("tasks", "average"))
    tasks = printed_for("main", LLAMA3).tasks
    made = [
        one for method in ("few_shot", "i2cl") for one in llama(method, LLAMA3, [0.72] * len(tasks), tasks)
    ]
    found = table(view, asked, made)
    column = "Average" if view == "tasks" else "(paper)"
    lines = cells(found)
    flagged = lines["I2CL (paper)" if view == "tasks" else "I2CL"][column]
    assert (flagged.text, flagged.mark) == ("81.18", "‡§")
    notes = [note for note in found.notes if note.startswith("§")]
    assert [re.findall(r"\d+\.\d\d", note) for note in notes] == [["81.26", "72.23"], ["81.18", "72.17"]]
    assert not any("other tasks" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "row", "sst2", "average"),
    [
        ("princeton-nlp/AutoCompressor-Llama-2-7b-6k", "AutoComp.", "92.44 ± 3.29", "63.94"),
        ("Llama-2-7b-chat-icae", "ICAE", "91.64 ± 1.69", "64.83"),
        ("hyen/CEPE-LLaMA-2-7B", "CEPE", "74.28 ± 3.90", "64.08"),
    ],
)
def test_a_compressor_stands_above_its_printed_row_alone(model, row, sst2, average):
    asked = load_experiment("main")
    method = next(one.method for one in asked.rows if one.name == row)
    tasks = printed_for("main", LLAMA).tasks
    made = [one for name in (method, "i2cl") for one in llama(name, model, [0.72] * len(tasks), tasks)]
    found = table("tasks", asked, made)
    assert [one[0].text for one in found.rows] == [row, f"{row} (paper)", "I2CL"]
    printed = cells(found)[f"{row} (paper)"]
    assert (printed["sst2"].text, printed["Average"].text) == (sst2, average)
    assert ("§" in printed["Average"].mark) == (row == "AutoComp.")
    assert "Table 1" in noted(found, "(paper)")
    assert ("65.05" in str(found.notes)) == (row == "AutoComp.")


def test_compressors_have_a_row_where_a_model_has_them_all():
    asked = load_experiment("main")
    made = [one for name in ("autocompressor", "icae", "cepe", "i2cl") for one in llama(name, "reference")]
    assert list(texts(table("tasks", asked, made))) == ["AutoComp.", "ICAE", "CEPE", "I2CL"]


def test_a_table_of_averages_alone_is_compared_over_the_nine_tasks():
    asked = experiment(["I2CL"], printed="ablation-module", views=("average",))
    tasks = printed_for("main", LLAMA).tasks
    found = table("average", asked, llama(shares=[0.5] * 9, tasks=tasks))
    assert (found.rows[0][-1].text, found.rows[0][-1].mark) == ("75.12", "‡")
    fewer = table("average", asked, llama())
    assert (fewer.rows[0][-1].text, fewer.rows[0][-1].mark) == ("75.12", "")


def test_printed_costs():
    found = cells(table("cost", experiment(["I2CL"], printed="peft"), llama()))["I2CL"]
    assert found["Trained, thousands (paper)"].text == "0.13"
    found = cells(table("cost", experiment(["I2CL"], printed="main"), llama()))["I2CL"]
    assert found["Values kept (paper)"].text == "2DL"


def test_another_source_of_printed_tables():
    mine = PrintedTable(
        name="x", paper="Table 9: mine", model="m", tasks=("sst2",), rows={"I2CL": PrintedRow(mean=(12.5,))}
    )
    found = table("tasks", experiment(["I2CL"], printed="x"), trial(), printed=lambda *_: mine)
    assert texts(found)["I2CL (paper)"] == ["", "12.50", ""]
    assert not any("other tasks" in note for note in found.notes)  # no average is printed


def test_an_unknown_printed_table_is_named_in_the_section():
    assert "no table 'x'" in section(experiment(printed="x"), trial()).missing[0]


# What is lacking is said.


def test_a_row_with_fewer_tasks_is_marked_and_noted():
    made = [one for one in trial() if (one.cell.method, one.cell.task) != ("i2cl", "trec")]
    made += [record("icv", task, seed, "1010101010") for task in ("sst2", "trec") for seed in range(3)]
    three = experiment(("Zero-shot", "ICV", "I2CL"))
    found = table("tasks", three, made)
    assert texts(found)["I2CL"] == ["73.3 ± 25.2", "73.3 ± 25.2", "–"]
    assert cells(found)["I2CL"]["Average"].mark == "†"
    assert cells(found)["Zero-shot"]["Average"].mark == ""
    assert "1 of 2 tasks, not trec: I2CL." in noted(found, "†")
    compared = table("comparison", three, made)
    assert compared.values[0]["mean"] == pytest.approx(40 - 220 / 3)  # on sst2 alone
    assert compared.rows[0][0].mark == "†"
    assert texts(table("comparison", three, made, place=1))["Zero-shot"][1] == "–"


def test_tasks_that_other_experiments_ran_are_left_out_and_named():
    made = [one for one in trial() if (one.cell.method, one.cell.task) != ("i2cl", "trec")]
    found = section(experiment(), made)
    assert texts(found.tables[0])["I2CL"][0] == "73.3 ± 25.2"
    assert "trec" not in found.tables[0].columns
    assert "tasks that at most half of the rows have: trec" in found.missing


def test_a_row_with_fewer_seeds_is_marked_and_averaged_over_what_its_tasks_share():
    made = [one for one in trial() if (one.cell.task, one.cell.seed) != ("sst2", 2)]
    found = table("tasks", experiment(), made)
    assert texts(found)["I2CL"] == ["55.0 ± 7.1", "60.0 ± 14.1", "50.0 ± 0.0"]
    assert cells(found)["I2CL"]["Average"].mark == "†"
    assert "fewer than 3 seeds on sst2 (2);" in noted(found, "†")
    made = [one for one in trial() if one.cell.seed < 2]
    for view in ("tasks", "cost"):
        assert noted(table(view, experiment(), made), "†") == "† 2 of 3 seeds: I2CL."


def test_what_all_rows_lack_is_said_once():
    made = [record("icv", task, seed, "1010101010") for task in ("sst2", "trec") for seed in range(2)]
    made += [one for one in trial() if one.cell.seed < 2]
    everyone = experiment(("ICV", "I2CL"))
    assert noted(table("average", everyone, made), "†") == "† 2 of 3 seeds: all rows."
    most = experiment(("Zero-shot", "ICV", "I2CL"))
    expected = "† 2 of 3 seeds: all rows but those that no seed can change."
    assert noted(table("average", most, made), "†") == expected


def test_tasks_without_common_seeds_have_no_average():
    made = [record("i2cl", "sst2", 0, "10"), record("i2cl", "trec", 1, "10")]
    made += [record("icv", "sst2", 1, "10"), record("icv", "trec", 1, "10")]
    asked = experiment(("ICV", "I2CL"), seeds=2)
    assert texts(table("tasks", asked, made))["I2CL"] == ["–", "50.0", "50.0"]
    assert texts(table("average", asked, made))["I2CL"][:2] == ["–", "–"]
    assert texts(table("comparison", asked, made))["ICV"][-1] == "nothing shared to compare"


def test_the_scale_that_was_run_says_how_many_seeds_are_wanted():
    made = [one for one in trial() if one.cell.seed == 0]
    quick = Scale(seeds=1, limit=40, tasks=None)
    asked = experiment(quick=quick).model_copy(update={"full": Scale(seeds=5, limit=500)})
    assert not any("†" in note for note in table("tasks", asked, made).notes)


def test_tasks_that_were_asked_for_by_name():
    found = table("tasks", experiment(tasks=("sst2", "trec", "mr")), trial())
    assert "No results on mr." in found.notes


def test_rows_and_views_without_results():
    found = section(experiment(("Zero-shot", "ICV"), views=("comparison", "matrix", "bars")), trial())
    assert found.tables == ()
    assert found.missing[0] == "rows without results: ICV (`i2cl experiment run trial` makes them)"
    assert [line.split(":")[0] for line in found.missing[1:]] == ["comparison", "matrix, bars"]
    elsewhere = section(experiment(("I2CL", "ICV")), llama())
    assert f"run trial --model {LLAMA}` makes them" in elsewhere.missing[0]
    own = experiment(("I2CL", "ICV")).model_copy(update={"file": "my grids/trial.toml"})
    line = section(own, llama(model="reference", limit=100)).missing[0]
    assert line.endswith("(`i2cl experiment run 'my grids/trial.toml' --limit 100` makes them)")


def test_an_experiment_without_cells_says_so_in_one_line():
    found = build([experiment(("ICV",))], trial(), {})
    (only,) = found.sections
    assert only.missing == ("no cells in this store: `i2cl experiment run trial` makes them",)
    assert "no cells in this store: `i2cl experiment run trial` makes them" in markdown(found)
    assert r"no cells in this store: \texttt{i2cl experiment run trial} makes them" in latex(found)
    assert "no cells in this store: <code>i2cl experiment run trial</code> makes them" in html(found, {})


def test_different_queries_are_not_mixed():
    made = [record("i2cl", "sst2", 0, "1010"), record("i2cl", "sst2", 1, "101010")]
    assert "different queries of task 'sst2'" in section(experiment(), made).missing[-1]


def test_a_transfer_from_more_tasks_counts():
    some, more = (
        record("i2cl", "sst2", 0, answers, study="transfer", sources=sources)
        for answers, sources in (("10", ("a",)), ("11", ("a", "b")))
    )
    row = GridRow(name="I2CL", study="transfer")
    for made in ([some, more], [more, some]):
        assert texts(table("tasks", experiment([row], seeds=1), made))["I2CL"] == ["100.0"]


def test_a_transfer_is_not_averaged_over_different_sources():
    few = [record("i2cl", "sst2", seed, "00", study="transfer", sources=("a",)) for seed in range(3)]
    many = [record("i2cl", "sst2", seed, "11", study="transfer", sources=("a", "b")) for seed in range(2)]
    row = GridRow(name="I2CL", study="transfer")
    for made in ([*few, *many], [*many, *few]):
        assert texts(table("tasks", experiment([row]), made))["I2CL"] == ["0.0 ± 0.0"]


def test_different_rows_are_not_mixed():
    told = [{}, {"rows": "a"}, {"rows": "b"}]
    made = [record("i2cl", "sst2", seed, "10", provenance=one) for seed, one in enumerate(told)]
    assert "come from different rows of task 'sst2'" in section(experiment(), made).missing[-1]
    assert section(experiment(seeds=2), made[:2]).missing == section(experiment(seeds=1), made[:1]).missing


def test_different_weights_are_not_mixed():
    told = [{"rows": "a", "dtype": dtype, "weights": weights} for dtype, weights in ("1a", "2b", "2a")]
    made = [record("i2cl", "sst2", seed, "10", provenance=one) for seed, one in enumerate(told)]
    assert "come from different weights" in section(experiment(), made).missing[-1]
    assert not any("different" in one for one in section(experiment(seeds=2), made[:2]).missing)


def test_one_seed_of_a_method_that_draws_stands_for_no_other():
    """Zero-shot draws nothing, so that its one seed is paired with all; few-shot's is one seed."""
    rows = [GridRow(name="Few-shot (ICL)", method="few_shot", seeds=1), "ICV", "Zero-shot"]
    made = [
        record(method, "sst2", seed, random(share, [seed, len(method)]))
        for method, share in (("few_shot", 0.9), ("icv", 0.2), ("zero_shot", 0.2))
        for seed in range(1 if method != "icv" else 4)
    ]
    found = table("comparison", experiment(rows, seeds=4, against="Zero-shot"), made)
    assert texts(found)["Few-shot (ICL)"][-1] == "fewer than 4 seeds cannot tell"
    against = texts(table("comparison", experiment(rows, seeds=4, against="ICV"), made))
    assert against["Few-shot (ICL)"][-1] == "fewer than 4 seeds cannot tell"
    assert against["Zero-shot"][-1] != "fewer than 4 seeds cannot tell"


def test_seeds_beyond_the_scale_are_wanted_of_every_row():
    made = [record(name, "sst2", seed, "1") for name, n in (("i2cl", 4), ("icv", 3)) for seed in range(n)]
    found = table("tasks", experiment(("ICV", "I2CL"), seeds=2), made)
    assert noted(found, "3 of 4 seeds") == "† 3 of 4 seeds: ICV."


def test_queries_that_are_not_balanced_are_not_said_to_be():
    row = GridRow(name="Batch", method="zero_shot+batch_calibration", seeds=1)
    for skew, told in ((1, "of balanced classes"), (3, "which are not of balanced classes")):
        made = [record(row.method, "sst2", 0, "10", skew=skew)]
        asked = experiment([row], seeds=1, skews=(1, 3), against="Batch")
        assert noted(table("tasks", asked, made), told)
        assert f",{skew}," in csv_text(build([asked], made, {}, figures=False))


def test_shares_of_common_fits_are_no_seconds_of_single_ones():
    made = [record("i2cl", "sst2", seed, "10", together=2) for seed in range(2)]
    found = table("cost", experiment(("I2CL",), seeds=2), made)
    assert noted(found, "Seconds of equal shares of seeds that were fitted together: I2CL.")


def test_every_setting_has_a_section():
    made = [*trial(), *llama(), *llama("zero_shot")]
    found = build([experiment()], made, {}, figures=False)
    assert {one.setting.model for one in found.sections} == {"reference", LLAMA}
    assert len({one.anchor for one in found.sections}) == 2
    assert found.sections[1].heading == f"Trial ({found.sections[1].setting.model})"


def test_a_single_row_that_another_experiment_brought_makes_no_section():
    (only,) = build([experiment()], [*trial(), *llama()], {}, figures=False).sections
    assert only.setting.model == "reference"
    assert only.missing == (f"a section for {LLAMA}, at most 40 queries per task: only I2CL there",)
    (only,) = build([experiment()], llama(), {}, figures=False).sections
    assert only.setting.model == LLAMA
    assert only.tables


def test_a_pair_is_computed_once_and_turned_round():
    (results,) = results_of(experiment(("ICV", "I2CL")), [*llama(model="r"), *llama("icv", "r", (0.9, 0.9))])
    icv, ours = results.lines
    there, back = results.difference(icv, ours), results.difference(ours, icv)
    assert back == replace(there, mean=-there.mean, low=-there.high, high=-there.low)


# Renderers.


def odd():
    """A report with names that every format must escape, a bold cell and a failed cell."""
    asked = experiment(
        ("Few-shot (ICL)", "ICV", "I2CL"), title="50 % of A & B_c <b>x</b> | {y} #1", printed="main"
    )
    made = always_right(tasks=("hate_speech18", "sst2"))
    made = [
        *(one.model_copy(update={"cell": one.cell.model_copy(update={"model": LLAMA})}) for one in made),
        failed("icv", "trec", 1, "I2CLError: 100 % <script>alert(1)</script>\nof $memory_"),
    ]
    return build([asked], made, {}, figures=False)


def test_every_format_shows_the_same_numbers():
    report = build([experiment()], trial(), {}, figures=False)
    plain = re.sub(r"\\textbf{([^}]*)}", r"\1", latex(report))
    assert r"I2CL & 61.7 ± 12.6 & 73.3 ± 25.2 & 50.0 ± 0.0 \\" in plain
    assert r"\begin{tabular}{lrrr}" in plain
    page = html(report, {})
    assert ["I2CL", "61.7 ± 12.6", "73.3 ± 25.2", "50.0 ± 0.0"] in Page(page).rows
    assert '<th scope="row">I2CL</th>' in page
    text = markdown(report)
    lines = [[part.strip(" *") for part in line.split("|")] for line in text.splitlines()]
    assert ["", "I2CL", "61.7 ± 12.6", "73.3 ± 25.2", "50.0 ± 0.0", ""] in lines
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = block.splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_markdown_escapes_and_emphasises():
    text = markdown(odd())
    assert r"50 % of A & B_c \<b>x\</b> \| {y} #1" in text
    assert "**100.0 ± 0.0**" in text
    assert "*94.44 ± 1.44* ‡" in text
    assert "| hate_speech18 |" in text
    assert r"\<script>alert(1)" in text


def test_latex_escapes():
    text = latex(odd())
    assert r"50 \% of A \& B\_c <b>x" in text
    assert r"\{y\} \#1" in text
    assert r"hate\_speech18" in text
    assert r"\textbf{100.0 ± 0.0}" in text
    assert r"of \$memory\_" in text
    body = text.split(r"\begin{document}")[1]
    assert not re.search(r"(?<!\\)[%#]", body)
    assert sorted(re.findall(r"\\begin{(\w+)}", text)) == sorted(re.findall(r"\\end{(\w+)}", text))
    unescaped = re.sub(r"\\[{}]", "", body)
    assert unescaped.count("{") == unescaped.count("}")
    for row in re.findall(r"\\midrule\n(.*?)\n\\bottomrule", body, re.DOTALL):
        assert len({len(re.findall(r"(?<!\\)&", line)) for line in row.splitlines()}) == 1
    assert set(re.findall(r"[^\x00-\x7f]", body)) <= set("±–·†‡§−▲▼")  # LaTeX knows them or is told


def test_csv_holds_the_raw_numbers():
    report = build([experiment()], trial(), {}, figures=False)
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    found = {(one["row"], one["task"]): one for one in rows if one["view"] == "tasks"}
    assert len(found) == 6
    assert float(found["I2CL", "sst2"]["mean"]) == pytest.approx(220 / 3)
    assert float(found["I2CL", "sst2"]["sd"]) == pytest.approx(np.std([70, 50, 100], ddof=1))
    assert float(found["I2CL", "(average)"]["mean"]) == pytest.approx(185 / 3)
    assert float(found["Zero-shot", "trec"]["mean"]) == 20
    assert (found["I2CL", "sst2"]["seeds"], found["I2CL", "sst2"]["queries"]) == ("3", "10")
    assert found["I2CL", "sst2"]["model"] == "reference"
    assert {one["limit"] for one in rows} == {"40"}
    cost = {(one["row"], one["task"]): one for one in rows if one["view"] == "cost"}
    assert float(cost["I2CL", "trec"]["ms_per_query"]) == 200
    against = [one for one in rows if one["view"] == "comparison" and one["task"] == "(average)"]
    assert [(one["row"], one["against"]) for one in against] == [("Zero-shot", "I2CL")]
    assert float(against[0]["mean"]) == pytest.approx(30 - 185 / 3)


def test_csv_tells_printed_from_measured():
    report = build([experiment(["I2CL"], printed="main")], llama(), {}, figures=False)
    rows = list(csv.DictReader(io.StringIO(csv_text(report))))
    printed = {one["task"]: one for one in rows if one["view"] == "tasks" and one["origin"] == "paper"}
    assert len(printed) == 10
    assert (float(printed["sst2"]["mean"]), float(printed["sst2"]["sd"])) == (87.68, 2.47)
    assert float(printed["(average)"]["mean"]) == 75.12


class Page(HTMLParser):
    """Tables as lists of texts; fails on tags that do not match."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.addresses, self.ids, self.strong = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.addresses += [attributes[name] for name in ("src", "href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        if "strong" in self.open:
            self.strong.append(data)
        assert "script" not in self.open


def test_accuracies_are_shaded_by_their_size_and_other_numbers_are_not():
    text = html(build([experiment()], trial(), {}, figures=False), {})
    assert '<td style="text-align:right;--share:25%" class="shaded">50.0 ± 0.0</td>' in text
    tables = dict(re.findall(r"<h3>(.*?)</h3>(.*?)</table>", text, re.DOTALL))
    assert [title for title, shown in tables.items() if "shaded" in shown] == ["Accuracy by task"]


def test_what_looks_like_markup_is_shown_as_it_is():
    title = "a &lt; b_ *c* `d` [e](f) ~ ^ \\g"
    report = build([experiment(title=title)], trial(), {}, figures=False)
    heading = re.search("<h2>(.*) .reference.</h2>", html(report, {}))[1]
    assert unescape(heading) == title
    tex = re.search(r"section{(.*) .reference.}", latex(report))[1]
    assert tex == (r"a \&lt; b\_ *c* `d` [e](f) \textasciitilde{} \textasciicircum{} \textbackslash{}g")


def test_html_escapes_and_asks_nobody():
    text = html(odd(), {})
    page = Page(text)
    assert "<script" not in text
    assert "50 % of A &amp; B_c &lt;b&gt;x&lt;/b&gt;" in text
    assert set(page.strong) == {"100.0 ± 0.0"}
    assert all(address.startswith("#") and address[1:] in page.ids for address in page.addresses)
    assert not re.search(r"(src|href)=.?http|@import|url\(", text)


def test_failed_cells_are_listed():
    made = [
        *trial(),
        failed("i2cl", "mr", 1, "I2CLError: too few\nrows"),
        failed("lora", "mr", 1, "elsewhere"),
    ]
    report = build([experiment()], made, {}, figures=False)
    assert len(report.failures.rows) == 1
    row = ["reference", "mr", "i2cl", "1", "I2CLError: too few rows"]
    assert row in Page(html(report, {})).rows
    assert " & ".join(row) in latex(report)
    assert all(part in markdown(report) for part in row)
    assert dict(report.provenance)["Cells"] == ("8 done, 1 failed",)


def test_provenance_names_everything_found():
    made = [
        record("i2cl", "sst2", seed, "10", fit_seconds=3600.0, provenance=provenance)
        for seed, provenance in enumerate(({"torch": "2.9", "extra": 1}, {"torch": "2.10", "commit": None}))
    ]
    found = dict(build([experiment()], made, {}, figures=False).provenance)
    assert found["PyTorch"] == ("2.9", "2.10")
    assert found["extra"] == ("1",)
    assert found["Hours"] == ("2.00 fitting, 0.00 predicting",)
    assert found["Run"] == ("2025-01-02",)
    assert "Commit" not in found


# Files.


@pytest.fixture
def drawn(monkeypatch):
    """Figures of one line, whatever the view."""
    matplotlib = pytest.importorskip("matplotlib.figure")

    def draw(*_):
        figure = matplotlib.Figure()
        figure.add_subplot().plot([0, 1], [1, 0])
        return figure

    monkeypatch.setattr("i2cl.experiments.report.document._drawn", draw)


@pytest.mark.usefixtures("drawn")
def test_all_files_are_written_and_read_again(tmp_path):
    report = build([experiment(views=("tasks", "bars"))], trial(), {})
    paths = write(report, tmp_path / "out")
    names = [str(path.relative_to(tmp_path / "out")) for path in paths]
    assert names == [
        "figures/trial-bars.png",
        "figures/trial-bars.svg",
        *(f"report.{end}" for end in ("csv", "html", "md", "tex")),
    ]
    text = (tmp_path / "out" / "report.html").read_text()
    addresses = Page(text).addresses
    caption = CAPTIONS["bars"]
    assert f'alt="{caption}"><figcaption>{caption}</figcaption></figure>' in text
    assert caption in (tmp_path / "out" / "report.tex").read_text()
    assert next(one for one in addresses if one[0] != "#").startswith("data:image/svg+xml;base64,")
    assert "(figures/trial-bars.svg)" in (tmp_path / "out" / "report.md").read_text()
    assert "{figures/trial-bars.png}" in (tmp_path / "out" / "report.tex").read_text()


@pytest.mark.usefixtures("drawn")
def test_one_format_replaces_an_older_report(tmp_path):
    write(build([experiment()], trial(), {}, figures=False), tmp_path / "out")
    paths = write(build([experiment(views=("bars",))], trial(), {}), tmp_path / "out", ["html"])
    assert [path.name for path in paths] == ["report.html"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]


@pytest.mark.usefixtures("drawn")
def test_large_drawings_are_shown_as_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr("i2cl.experiments.report.page.LARGEST_SVG", 10)
    (path,) = write(build([experiment(views=("bars",))], trial(), {}), tmp_path / "out", ["html"])
    assert 'src="data:image/png;base64,' in path.read_text()


@pytest.mark.usefixtures("drawn")
def test_an_error_leaves_the_older_report(tmp_path, monkeypatch):
    write(build([experiment()], trial(), {}), tmp_path / "out", ["md"])
    before = (tmp_path / "out" / "report.md").read_text()
    monkeypatch.setattr("i2cl.experiments.report.page.html", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write(build([experiment(("I2CL", "ICV"), views=("bars",))], trial(), {}), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]
    assert (tmp_path / "out" / "report.md").read_text() == before


@pytest.mark.parametrize("error", [ImportError(name="matplotlib"), I2CLError("no such map")])
def test_a_figure_that_cannot_be_drawn_is_named(monkeypatch, error):
    def fail(*_):
        raise error

    if isinstance(error, ImportError):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    else:
        monkeypatch.setattr("i2cl.experiments.report.document._drawn", fail)
    (only,) = build([experiment(views=("tasks", "bars"))], trial(), {}).sections
    assert only.figures == ()
    assert only.missing[0].startswith("figure bars: ")
    assert only.tables


@pytest.mark.parametrize("formats", [["pdf"], []])
def test_an_unknown_format_is_named(tmp_path, formats):
    with pytest.raises(I2CLError, match="use some of md, tex, csv, html"):
        write(build([experiment()], trial(), {}, figures=False), tmp_path / "out", formats)
    assert not (tmp_path / "out").exists()


def test_other_files_are_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(I2CLError, match="holds other files"):
        write(build([experiment()], trial(), {}, figures=False), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_rows_that_cannot_be_tested_cost_the_others_nothing():
    shares = {"icv": 0.45, "i2cl": 0.5}
    made = [
        record(method, "sst2", seed, random(share, [seed, len(method)]))
        for method, share in shares.items()
        for seed in range(5)
    ]
    alone = table("comparison", experiment(("ICV", "I2CL")), made).values
    made.append(record("zero_shot", "sst2", 0, random(0.1, [9])))
    made.append(record("few_shot", "sst2", 0, random(0.9, [10])))
    found = table("comparison", experiment(("Few-shot (ICL)", "ICV", "I2CL")), made)
    values = {one["row"]: one for one in found.values}
    assert values["ICV"]["p"] == values["ICV"]["q"] == alone[0]["q"] < 1
    assert values["Few-shot (ICL)"]["q"] == 1
    assert texts(found)["Few-shot (ICL)"][-3:] == ["–", "–", "fewer than 4 seeds cannot tell"]
    assert "the family is the one test" in noted(found, "Holm")


def test_what_no_single_query_could_be_asked_of_is_named_in_every_table():
    rows = [
        GridRow(name="Zero-shot", method="zero_shot", seeds=1),
        GridRow(name="Zero-shot, calibrated", method="zero_shot+batch_calibration", seeds=1),
        GridRow(name="I2CL", method="i2cl"),
    ]
    made = [*trial(), record("zero_shot+batch_calibration", "sst2", 0, "1" * 10)]
    for view in ("tasks", "average", "comparison"):
        found = table(view, experiment(rows), made)
        assert "of balanced classes: Zero-shot, calibrated." in noted(found, "Of all queries together")
        assert not any("together" in note for note in table(view, experiment(), trial()).notes)
