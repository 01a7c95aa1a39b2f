"""Reports of incomplete results, and of results that are not comparable."""

from dataclasses import replace

import pytest

from experiments.report.synthetic import (
    LLAMA,
    cells,
    grid,
    llama,
    noted,
    numbers,
    record,
    section,
    table,
    texts,
    trial,
)
from i2cl.experiments.grid import GridRow, Scale
from i2cl.experiments.report.document import build, csv_text, render
from i2cl.experiments.report.results import results_of


def test_row_with_missing_tasks_is_marked():
    made = [one for one in trial() if (one.cell.method, one.cell.task) != ("i2cl", "trec")]
    made += [record("icv", task, seed, "1010101010") for task in ("sst2", "trec") for seed in range(3)]
    three = grid(("Zero-shot", "ICV", "I2CL"))
    result = table("tasks", three, made)
    assert texts(result)["I2CL"] == ["73.3 ± 25.2", "73.3 ± 25.2", "–"]
    assert cells(result)["I2CL"]["Average"].mark == "†"
    assert cells(result)["Zero-shot"]["Average"].mark == ""
    assert "1 of 2 tasks, not trec: I2CL." in noted(result, "†")
    compared = table("comparison", three, made)
    assert numbers(compared, "Difference")["Zero-shot"]["mean"] == pytest.approx(
        40 - 220 / 3
    )  # on sst2 alone
    assert compared.rows[0][0].mark == "†"
    assert texts(table("comparison", three, made, place=1))["Zero-shot"][1] == "–"


def test_tasks_of_few_rows_are_listed_as_missing():
    made = [one for one in trial() if (one.cell.method, one.cell.task) != ("i2cl", "trec")]
    result = section(grid(), made)
    assert texts(result.tables[0])["I2CL"][0] == "73.3 ± 25.2"
    assert "trec" not in result.tables[0].columns
    assert "tasks with results for at most half of the rows: trec" in result.missing


def test_missing_seeds_are_marked_and_averages_use_shared_seeds():
    made = [one for one in trial() if (one.cell.task, one.cell.seed) != ("sst2", 2)]
    result = table("tasks", grid(), made)
    assert texts(result)["I2CL"] == ["55.0 ± 7.1", "60.0 ± 14.1", "50.0 ± 0.0"]
    assert cells(result)["I2CL"]["Average"].mark == "†"
    assert "fewer than 3 seeds on sst2 (2);" in noted(result, "†")
    made = [one for one in trial() if one.cell.seed < 2]
    for view in ("tasks", "cost"):
        assert noted(table(view, grid(), made), "†") == "† 2 of 3 seeds: I2CL."
    made = [record("icv", task, seed, "1010101010") for task in ("sst2", "trec") for seed in range(2)]
    made += [one for one in trial() if one.cell.seed < 2]
    assert noted(table("average", grid(("ICV", "I2CL")), made), "†") == "† 2 of 3 seeds: all rows."
    most = grid(("Zero-shot", "ICV", "I2CL"))
    expected = "† 2 of 3 seeds: all rows except deterministic ones."
    assert noted(table("average", most, made), "†") == expected


def test_no_average_without_shared_seeds():
    made = [record("i2cl", "sst2", 0, "10"), record("i2cl", "trec", 1, "10")]
    made += [record("icv", "sst2", 1, "10"), record("icv", "trec", 1, "10")]
    asked = grid(("ICV", "I2CL"), seeds=2)
    assert texts(table("tasks", asked, made))["I2CL"] == ["–", "50.0", "50.0"]
    assert texts(table("average", asked, made))["I2CL"][:2] == ["–", "–"]
    assert texts(table("comparison", asked, made))["ICV"][-1] == "no results in common"
    made = [one for one in trial() if one.cell.seed == 0]
    quick = Scale(seeds=1, limit=40, tasks=None)
    asked = grid(quick=quick).model_copy(update={"full": Scale(seeds=5, limit=500)})
    assert not any("†" in note for note in table("tasks", asked, made).notes)
    made = [record(name, "sst2", seed, "1") for name, n in (("i2cl", 4), ("icv", 3)) for seed in range(n)]
    result = table("tasks", grid(("ICV", "I2CL"), seeds=2), made)  # beyond it, of every row
    assert noted(result, "3 of 4 seeds") == "† 3 of 4 seeds: ICV."


def test_rows_views_and_tasks_without_results_are_listed():
    result = table("tasks", grid(tasks=("sst2", "trec", "mr")), trial())
    assert "No results on mr." in result.notes
    result = section(grid(("Zero-shot", "ICV"), views=("comparison", "matrix", "bars")), trial())
    assert result.tables == ()
    assert result.missing[0] == "rows without results: ICV (run `i2cl experiment run trial`)"
    assert [line.split(":")[0] for line in result.missing[1:]] == ["comparison", "matrix, bars"]
    assert f"run trial --model {LLAMA}`)" in section(grid(("I2CL", "ICV")), llama()).missing[0]
    own = grid(("I2CL", "ICV")).model_copy(update={"file": "my grids/trial.toml"})
    line = section(own, llama(model="reference", limit=100)).missing[0]
    assert line.endswith("(run `i2cl experiment run 'my grids/trial.toml' --limit 100`)")


def test_experiment_without_results_shows_its_command():
    result = build([grid(("ICV",))], trial(), {})
    (only,) = result.sections
    assert only.missing == ("no results in this store: run `i2cl experiment run trial`",)
    assert "no results in this store: run `i2cl experiment run trial`" in render(result, "md")
    assert "no results in this store: run <code>i2cl experiment run trial</code>" in render(result, "html")


def test_results_of_different_queries_rows_or_weights_are_not_mixed():
    made = [record("i2cl", "sst2", 0, "1010"), record("i2cl", "sst2", 1, "101010")]
    assert "different queries of task 'sst2'" in section(grid(), made).missing[-1]

    def of(message):
        return [record("i2cl", "sst2", seed, "10", provenance=one) for seed, one in enumerate(message)]

    made = of([{}, {"rows": "a"}, {"rows": "b"}])
    assert "come from different rows of task 'sst2'" in section(grid(), made).missing[-1]
    assert section(grid(seeds=2), made[:2]).missing == section(grid(seeds=1), made[:1]).missing
    made = of([{"rows": "a", "dtype": dtype, "weights": weights} for dtype, weights in ("1a", "2b", "2a")])
    assert "come from different weights" in section(grid(), made).missing[-1]
    assert not any("different" in one for one in section(grid(seeds=2), made[:2]).missing)


@pytest.mark.parametrize(
    ("seeds", "few", "many", "message"), [(1, "10", "11", "100.0"), (3, "00", "11", "0.0 ± 0.0")]
)
def test_transfers_from_different_sources_are_not_averaged(seeds, few, many, message):
    """With three seeds, the transfer from two sources misses the last seed."""
    study = {"study": "transfer"}
    one = [record("i2cl", "sst2", seed, few, sources=("a",), **study) for seed in range(seeds)]
    two = [record("i2cl", "sst2", seed, many, sources=("a", "b"), **study) for seed in range(min(seeds, 2))]
    row = GridRow(name="I2CL", **study)
    for made in ([*one, *two], [*two, *one]):
        assert texts(table("tasks", grid([row], seeds=seeds), made))["I2CL"] == [message]


def test_only_a_deterministic_seed_is_paired_with_every_seed():
    """Zero-shot is deterministic, so its seed is paired with all seeds; few-shot is not."""
    rows = [GridRow(name="Few-shot (ICL)", method="few_shot", seeds=1), "ICV", "Zero-shot"]
    made = [record("few_shot", "sst2", 0, "1" * 40), record("zero_shot", "sst2", 0, "0" * 40)]
    made += [record("icv", "sst2", seed, "10" * 20) for seed in range(4)]
    for other in ("Zero-shot", "ICV"):
        result = texts(table("comparison", grid(rows, seeds=4, against=other), made))
        assert result["Few-shot (ICL)"][-1] == "fewer than 4 seeds"
    assert result["Zero-shot"][-1] != "fewer than 4 seeds"


def test_transductive_note_depends_on_skew():
    row = GridRow(name="Batch", method="zero_shot+batch_calibration", seeds=1)
    for skew, message in ((1, "are balanced"), (3, "are not balanced")):
        made = [record(row.method, "sst2", 0, "10", skew=skew)]
        asked = grid([row], seeds=1, skews=(1, 3), against="Batch")
        assert noted(table("tasks", asked, made), message)
        assert f",{skew}," in csv_text(build([asked], made, {}, figures=False))


def test_times_of_joint_fits_are_noted():
    made = [record("i2cl", "sst2", seed, "10", together=2) for seed in range(2)]
    result = table("cost", grid(("I2CL",), seeds=2), made)
    assert noted(result, "Fit times are equal shares of a joint fit of several seeds: I2CL.")


def test_every_setting_with_enough_rows_has_a_section():
    result = build([grid()], [*trial(), *llama(), *llama("zero_shot")], {}, figures=False)
    assert {one.setting.model for one in result.sections} == {"reference", LLAMA}
    assert len({one.anchor for one in result.sections}) == 2
    assert result.sections[1].heading == f"Trial ({result.sections[1].setting.model})"
    (only,) = build([grid()], [*trial(), *llama()], {}, figures=False).sections
    assert only.setting.model == "reference"
    assert only.missing == (f"section for {LLAMA}, at most 40 queries per task: it has only I2CL",)
    (only,) = build([grid()], llama(), {}, figures=False).sections
    assert only.setting.model == LLAMA
    assert only.tables


def test_difference_is_antisymmetric():
    (results,) = results_of(grid(("ICV", "I2CL")), [*llama(model="r"), *llama("icv", "r", (0.9, 0.9))])
    icv, ours = results.lines
    there, back = results.difference(icv, ours), results.difference(ours, icv)
    assert back == replace(there, mean=-there.mean, low=-there.high, high=-there.low)
