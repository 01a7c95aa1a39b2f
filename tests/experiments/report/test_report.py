"""Numbers and notes of reports on synthetic records."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from experiments.report.synthetic import (
    SEEDS,
    always_right,
    cells,
    changed,
    csv_lines,
    grid,
    noted,
    numbers,
    random,
    record,
    section,
    table,
    texts,
    trial,
)
from i2cl.experiments.confidence import confidence
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.grid import GridRow
from i2cl.experiments.records import Scores
from i2cl.experiments.report.document import build
from i2cl.experiments.report.results import results_of
from i2cl.experiments.statistics import accuracy, difference
from i2cl.injections.temperature import best_temperature, log_softmax


def test_accuracies_by_task_and_average_with_interval():
    result = table("tasks", grid(), trial())
    assert result.columns == ("Row", "Average", "sst2", "trec")
    ours, free = ["61.7 ± 12.6", "73.3 ± 25.2", "50.0 ± 0.0"], ["30.0", "40.0", "20.0"]
    assert texts(result) == {"Zero-shot": free, "I2CL": ours}
    for part in ("3 seeds", "no ± for a single seed", "10 queries per task"):
        assert part in result.notes[0]
    assert not any("†" in note for note in result.notes)
    result = texts(table("average", grid(), trial()))
    right = np.array([[answer == "1" for answer in one] for one in SEEDS])
    expected = accuracy([right, np.tile(np.arange(10) < 5, (3, 1))])
    interval = f"{100 * expected.low:.1f} to {100 * expected.high:.1f}"
    assert result["I2CL"] == ["61.7 ± 12.6", interval, "2", "3"]
    assert result["Zero-shot"][0] == "30.0"


def test_costs_and_note_on_times_from_several_systems():
    made = [
        record("i2cl", "sst2", 0, "10", fit_seconds=1.0, predict_seconds=0.5, cached_values=768),
        record("i2cl", "sst2", 1, "10", fit_seconds=3.0, predict_seconds=1.5, cached_values=768),
        record("i2cl", "trec", 0, "1010", fit_seconds=5.0, predict_seconds=1.0, cached_values=3072),
        record("i2cl", "trec", 1, "1010", fit_seconds=7.0, predict_seconds=1.0, cached_values=3072),
    ]
    made = [changed(one, cost=replace(one.outcome.cost, trained=16)) for one in made]
    result = cells(table("cost", grid(["I2CL"], seeds=2), made))["I2CL"]
    names = ("Stored values", "Trained parameters", "Fit, s", "Query, ms")
    assert [result[name].text for name in names] == ["768–3,072", "16", "4.00", "375"]
    made = [
        record("zero_shot", "sst2", 0, "10", provenance={"device": "cpu", "threads": "2"}),
        record("i2cl", "sst2", 0, "10", provenance={"device": "cuda:0", "threads": "2"}),
    ]
    note = noted(table("cost", grid(seeds=1), made), "not comparable")
    assert "device cpu, threads 2; device cuda:0, threads 2" in note


def test_comparison_is_row_minus_i2cl_with_holm_over_the_table():
    rows = ("Zero-shot", "Few-shot (ICL)", "ICV", "I2CL")
    shares = {"zero_shot": 0.2, "few_shot": 0.8, "icv": 0.5, "i2cl": 0.5}
    made = [
        record(method, task, seed, random(share, [place, seed, len(task)]))
        for place, (method, share) in enumerate(shares.items())
        for task in ("sst2", "agnews")
        for seed in range(1 if method == "zero_shot" else 5)
    ]
    asked = grid(rows, views=("comparison",))
    (results,) = results_of(asked, made)
    runs = {line.name: [results.outcomes(line, task) for task in results.tasks] for line in results.lines}
    held = {
        name: [np.array([np.equal(run.predictions, run.gold) for run in each]) for each in by_task]
        for name, by_task in runs.items()
    }
    expected = {name: difference(answers, held["I2CL"]) for name, answers in held.items() if name != "I2CL"}
    corrected = dict(zip(expected, holm([one.p for one in expected.values()]), strict=True))
    average, by_task = section(asked, made).tables
    values = numbers(average, "Difference")
    assert list(values) == list(expected)
    for name, one in expected.items():
        for number in ("mean", "low", "high"):
            assert values[name][number] == pytest.approx(100 * getattr(one, number))
        assert (values[name]["p"], values[name]["q"]) == (one.p, corrected[name])
    verdicts = {name: result[-1] for name, result in texts(average).items()}
    assert verdicts == {"Zero-shot": "lower", "Few-shot (ICL)": "higher", "ICV": "not significant"}
    marks = {name: "".join(text[-1] for text in result) for name, result in texts(by_task).items()}
    assert marks == {"Zero-shot": "▼▼", "Few-shot (ICL)": "▲▲", "ICV": "··"}
    assert "over all 6 tests of this table" in noted(by_task, "Holm")
    assert "over all 3 tests of this table" in noted(average, "Holm")
    assert all("q < 0.05" in noted(one, "Significant:") for one in (average, by_task))
    each = [entry.numbers for row in by_task.rows for entry in row[1:]]
    assert [one["q"] for one in each] == holm([one["p"] for one in each])


def test_printed_p_is_the_larger_of_the_two_tests():
    """With one lucky seed, only the test over queries is significant."""
    made = [record("icv", "sst2", seed, ("1" if seed == 0 else "0") * 40) for seed in range(4)]
    made += [record("i2cl", "sst2", seed, "0" * 40) for seed in range(4)]
    asked = grid(("ICV", "I2CL"), seeds=4, views=("comparison",))
    (results,) = results_of(asked, made)
    tested = results.difference(*results.lines)
    assert tested.p_queries < 0.001 < 0.3 < tested.p_seeds
    assert texts(table("comparison", asked, made))["ICV"][2] == f"{tested.p_seeds:.3f}"
    (row,) = csv_lines(asked, made)
    assert float(row["p"]) == tested.p_seeds
    assert not {"p_queries", "p_seeds"} & row.keys()
    (row,) = csv_lines(asked, [one for one in made if one.cell.seed < 3])
    assert (row["p"], float(row["q"])) == ("", 1)  # too few seeds decide nothing


def test_tables_of_one_task_and_of_many_tasks():
    made = [one for one in trial() if one.cell.task == "sst2"]
    result = section(grid(), made)
    titles = ["Accuracy by task", "Average accuracy over tasks", "Difference from I2CL", "Cost"]
    assert [one.title for one in result.tables] == titles
    assert result.tables[0].columns == ("Row", "sst2")
    tasks = [f"task{number:02}" for number in range(11)]
    made = [record("i2cl", task, 0, "1" * number + "0") for number, task in reversed([*enumerate(tasks)])]
    made += [record("zero_shot", task, 0, "0" * number + "0") for number, task in enumerate(tasks)]
    result = table("tasks", grid(seeds=1), made)
    assert result.columns == ("Task", "Zero-shot", "I2CL")
    assert [row[0].text for row in result.rows] == ["Average", *tasks]
    assert texts(result)["task01"] == ["0.0", "50.0"]
    by_task = table("comparison", grid(seeds=1), made, place=1)
    assert by_task.columns == ("Task", "Zero-shot")
    assert texts(by_task)["task01"] == ["−50.0 ·"]


def test_shots_table():
    made = [record("i2cl", "sst2", 0, answers, shots=shots) for shots, answers in ((1, "1000"), (5, "1110"))]
    made.append(record("zero_shot", "sst2", 0, "1100"))
    asked = grid(("Zero-shot", GridRow(name="I2CL", shots=(1, 5))), seeds=1, views=("shots", "tasks"))
    assert texts(table("shots", asked, made)) == {"Zero-shot": ["50.0", "50.0"], "I2CL": ["25.0", "75.0"]}
    assert list(texts(table("tasks", asked, made))) == ["Zero-shot", "I2CL, 1 per class", "I2CL, 5 per class"]
    made += [record("few_shot", "sst2", 0, "1111", shots=5)]
    rows = GridRow(name="I2CL", shots=(1, 5)), GridRow(name="Few-shot (ICL)", method="few_shot", shots=(5,))
    asked = grid(rows, seeds=1, views=("shots", "tasks"))
    assert texts(table("shots", asked, made)) == {"I2CL": ["25.0", "75.0"], "Few-shot (ICL)": ["–", "100.0"]}


def test_moved_rows_are_only_in_the_matrix():
    made = [*trial()]
    for number, source in enumerate(("sst2", "trec")):
        for place, task in enumerate(("sst2", "trec")):
            answers = "1" * (1 + 2 * number + place) + "0" * 6
            made.append(record("i2cl", task, 0, answers[:10].ljust(10, "0"), study="move", sources=(source,)))
    rows = ("Zero-shot", "I2CL", GridRow(name="Moved", study="move"))
    asked = grid(rows, views=("tasks", "comparison", "matrix"))
    assert list(texts(table("tasks", asked, made))) == ["Zero-shot", "I2CL"]
    result = table("matrix", asked, made)
    assert result.columns == ("From", "sst2", "trec")
    assert texts(result) == {"sst2": ["10.0", "20.0"], "trec": ["30.0", "40.0"]}
    assert "1 of 3 seeds: all rows." in noted(result, "†")


def with_scores(method, task, seed, sharper=3.0, queries=60):
    """Calibrated scores times ``sharper``, so their best temperature is about ``sharper``."""
    gold = np.arange(queries) % 2
    fair = np.random.default_rng([seed, len(task), len(method)]).standard_normal(queries) + gold - 0.5
    scores = log_softmax(np.stack([-fair / 2, fair / 2], 1))  # Bayes' rule for two normal distributions
    return record(method, task, seed, scores.argmax(1) == gold, scores=Scores.of(scores * sharper))


def trusted(seeds=3):
    made = [with_scores("i2cl", task, seed) for task in ("sst2", "agnews") for seed in range(seeds)]
    return made + [record("icv", task, 0, "10" * 30) for task in ("sst2", "agnews")]


def test_calibration_table_has_metrics_at_both_temperatures():
    made = trusted()
    result = table("confidence", grid(("ICV", "I2CL")), made)
    each, best, temperatures = [], [], []
    for task in ("sst2", "agnews"):
        runs = [one.outcome for one in made if (one.cell.task, one.cell.method) == (task, "i2cl")]
        sets = [(run.scores.array, np.array(run.gold), np.array(run.predictions)) for run in runs]
        scores, gold, _ = map(np.concatenate, zip(*sets, strict=True))
        temperatures.append(best_temperature(scores, gold))
        each.append([confidence(*one) for one in sets])
        best.append([confidence(log_softmax(a, temperatures[-1]), g, p) for a, g, p in sets])
    shown = [cell.text for cell in result.rows[1][1:]]
    expected = []
    for name, factor, digits in (("log_loss", 1, 3), ("brier", 1, 3), ("ece", 100, 1), ("aurc", 100, 1)):
        for held in (each, best):
            seeds = factor * np.mean([[getattr(one, name) for one in task] for task in held], axis=0)
            expected.append(f"{seeds.mean():.{digits}f} ± {seeds.std(ddof=1):.{digits}f}")
    assert shown == [*expected, f"{np.median(temperatures):.2f}"]
    assert cells(result)["I2CL"]["Best T"].text == shown[-1]
    assert 1.5 < np.median(temperatures) < 6
    losses = [float(text.split()[0]) for text in shown[:2]]
    assert losses[1] < losses[0]


def test_calibration_in_csv_and_for_rows_without_scores():
    result = table("confidence", grid(("ICV", "I2CL")), trusted())
    assert set(texts(result)["ICV"]) == {"–"}
    assert noted(result, "no stored scores").endswith(": ICV.")
    views = ("tasks", "confidence", "reliability", "risk-coverage")
    (only,) = build([grid(views=views)], trial(), {}).sections
    assert [one.title for one in only.tables] == ["Accuracy by task"]
    assert only.missing[-1].startswith("confidence, reliability, risk-coverage: no row has stored scores")
    (row,) = (
        one
        for one in csv_lines(grid(("I2CL",), views=("confidence",)), trusted())
        if one["column"] == "ECE, %"
    )
    assert (row["table"], row["row"], row["seeds"]) == ("Calibration", "I2CL", "3")


def bold(table):
    """Names of row and column of bold cells."""
    named = ((row, zip(table.columns, row, strict=True)) for row in table.rows)
    return [(row[0].text, name) for row, cells in named for name, one in cells if one.bold]


@pytest.mark.parametrize("view", ["tasks", "average"])
def test_nothing_is_bold_without_significance(view):
    asked = product(("few_shot", "i2cl"), ("sst2", "agnews"), range(3))
    made = [record(method, task, seed, random(0.7, [seed, len(task)])) for method, task, seed in asked]
    result = table(view, grid(("Few-shot (ICL)", "I2CL")), made)
    assert bold(result) == []
    assert "Nothing is bold" in noted(result, "bold")


def test_significantly_best_row_is_bold():
    asked = grid(("Few-shot (ICL)", "ICV", "I2CL"))
    result = table("tasks", asked, always_right())
    assert bold(result) == [("Few-shot (ICL)", column) for column in ("Average", "sst2", "trec")]
    assert "better than every other row (q < 0.05" in noted(result, "Bold")
    assert "over the other rows" in noted(result, "Bold")
    assert bold(table("average", asked, always_right())) == [("Few-shot (ICL)", "Average")]


def test_undecidable_rows_do_not_count_in_holms_correction():
    shares = {"icv": 0.45, "i2cl": 0.5}
    made = [
        record(method, "sst2", seed, random(share, [seed, len(method)]))
        for method, share in shares.items()
        for seed in range(5)
    ]
    alone = numbers(table("comparison", grid(("ICV", "I2CL")), made), "Difference")["ICV"]
    made.append(record("zero_shot", "sst2", 0, random(0.1, [9])))
    made.append(record("few_shot", "sst2", 0, random(0.9, [10])))
    result = table("comparison", grid(("Few-shot (ICL)", "ICV", "I2CL")), made)
    values = numbers(result, "Difference")
    assert values["ICV"]["p"] == values["ICV"]["q"] == alone["q"] < 1
    assert values["Few-shot (ICL)"]["q"] == 1
    assert texts(result)["Few-shot (ICL)"][-3:] == ["–", "–", "fewer than 4 seeds"]
    assert "over the one test" in noted(result, "Holm")
    undecidable = table("comparison", grid(("Few-shot (ICL)", "Zero-shot")), made)
    assert not any("Holm" in note for note in undecidable.notes)
