"""What results lack is said, and what does not belong together is not mixed."""

from dataclasses import replace

import pytest

from experiments.report.made import LLAMA, cells, grid, llama, noted, record, section, table, texts, trial
from i2cl.experiments.grid import GridRow, Scale
from i2cl.experiments.report.document import build
from i2cl.experiments.report.render import csv_text, html, latex, markdown
from i2cl.experiments.report.results import results_of


def test_a_row_with_fewer_tasks_is_marked_and_noted():
    made = [one for one in trial() if (one.cell.method, one.cell.task) != ("i2cl", "trec")]
    made += [record("icv", task, seed, "1010101010") for task in ("sst2", "trec") for seed in range(3)]
    three = grid(("Zero-shot", "ICV", "I2CL"))
    result = table("tasks", three, made)
    assert texts(result)["I2CL"] == ["73.3 ± 25.2", "73.3 ± 25.2", "–"]
    assert cells(result)["I2CL"]["Average"].mark == "†"
    assert cells(result)["Zero-shot"]["Average"].mark == ""
    assert "1 of 2 tasks, not trec: I2CL." in noted(result, "†")
    compared = table("comparison", three, made)
    assert compared.values[0]["mean"] == pytest.approx(40 - 220 / 3)  # on sst2 alone
    assert compared.rows[0][0].mark == "†"
    assert texts(table("comparison", three, made, place=1))["Zero-shot"][1] == "–"


def test_tasks_that_other_experiments_ran_are_left_out_and_named():
    made = [one for one in trial() if (one.cell.method, one.cell.task) != ("i2cl", "trec")]
    result = section(grid(), made)
    assert texts(result.tables[0])["I2CL"][0] == "73.3 ± 25.2"
    assert "trec" not in result.tables[0].columns
    assert "tasks that at most half of the rows have: trec" in result.missing


def test_fewer_seeds_are_marked_averaged_over_what_tasks_share_and_said_once():
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
    expected = "† 2 of 3 seeds: all rows but those that no seed can change."
    assert noted(table("average", most, made), "†") == expected


def test_tasks_without_common_seeds_have_no_average_and_the_scale_says_how_many_are_wanted():
    made = [record("i2cl", "sst2", 0, "10"), record("i2cl", "trec", 1, "10")]
    made += [record("icv", "sst2", 1, "10"), record("icv", "trec", 1, "10")]
    asked = grid(("ICV", "I2CL"), seeds=2)
    assert texts(table("tasks", asked, made))["I2CL"] == ["–", "50.0", "50.0"]
    assert texts(table("average", asked, made))["I2CL"][:2] == ["–", "–"]
    assert texts(table("comparison", asked, made))["ICV"][-1] == "nothing shared to compare"
    made = [one for one in trial() if one.cell.seed == 0]
    quick = Scale(seeds=1, limit=40, tasks=None)
    asked = grid(quick=quick).model_copy(update={"full": Scale(seeds=5, limit=500)})
    assert not any("†" in note for note in table("tasks", asked, made).notes)
    made = [record(name, "sst2", seed, "1") for name, n in (("i2cl", 4), ("icv", 3)) for seed in range(n)]
    result = table("tasks", grid(("ICV", "I2CL"), seeds=2), made)  # beyond it, of every row
    assert noted(result, "3 of 4 seeds") == "† 3 of 4 seeds: ICV."


def test_rows_views_and_tasks_without_results():
    result = table("tasks", grid(tasks=("sst2", "trec", "mr")), trial())
    assert "No results on mr." in result.notes
    result = section(grid(("Zero-shot", "ICV"), views=("comparison", "matrix", "bars")), trial())
    assert result.tables == ()
    assert result.missing[0] == "rows without results: ICV (`i2cl experiment run trial` makes them)"
    assert [line.split(":")[0] for line in result.missing[1:]] == ["comparison", "matrix, bars"]
    assert f"run trial --model {LLAMA}` makes them" in section(grid(("I2CL", "ICV")), llama()).missing[0]
    own = grid(("I2CL", "ICV")).model_copy(update={"file": "my grids/trial.toml"})
    line = section(own, llama(model="reference", limit=100)).missing[0]
    assert line.endswith("(`i2cl experiment run 'my grids/trial.toml' --limit 100` makes them)")


def test_an_experiment_without_cells_says_so_in_one_line():
    result = build([grid(("ICV",))], trial(), {})
    (only,) = result.sections
    assert only.missing == ("no cells in this store: `i2cl experiment run trial` makes them",)
    assert "no cells in this store: `i2cl experiment run trial` makes them" in markdown(result)
    assert r"no cells in this store: \texttt{i2cl experiment run trial} makes them" in latex(result)
    assert "no cells in this store: <code>i2cl experiment run trial</code> makes them" in html(result, {})


def test_different_queries_rows_and_weights_are_not_mixed():
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
def test_a_transfer_from_more_tasks_counts_and_is_not_averaged_with_others(seeds, few, many, message):
    """With three seeds the last one of more sources is lacking."""
    study = {"study": "transfer"}
    one = [record("i2cl", "sst2", seed, few, sources=("a",), **study) for seed in range(seeds)]
    two = [record("i2cl", "sst2", seed, many, sources=("a", "b"), **study) for seed in range(min(seeds, 2))]
    row = GridRow(name="I2CL", **study)
    for made in ([*one, *two], [*two, *one]):
        assert texts(table("tasks", grid([row], seeds=seeds), made))["I2CL"] == [message]


def test_one_seed_of_a_method_that_draws_stands_for_no_other():
    """Zero-shot draws nothing, so that its one seed is paired with all; few-shot's is one seed."""
    rows = [GridRow(name="Few-shot (ICL)", method="few_shot", seeds=1), "ICV", "Zero-shot"]
    made = [record("few_shot", "sst2", 0, "1" * 40), record("zero_shot", "sst2", 0, "0" * 40)]
    made += [record("icv", "sst2", seed, "10" * 20) for seed in range(4)]
    for other in ("Zero-shot", "ICV"):
        result = texts(table("comparison", grid(rows, seeds=4, against=other), made))
        assert result["Few-shot (ICL)"][-1] == "fewer than 4 seeds cannot tell"
    assert result["Zero-shot"][-1] != "fewer than 4 seeds cannot tell"


def test_queries_that_are_not_balanced_are_not_said_to_be():
    row = GridRow(name="Batch", method="zero_shot+batch_calibration", seeds=1)
    for skew, message in ((1, "of balanced classes"), (3, "which are not of balanced classes")):
        made = [record(row.method, "sst2", 0, "10", skew=skew)]
        asked = grid([row], seeds=1, skews=(1, 3), against="Batch")
        assert noted(table("tasks", asked, made), message)
        assert f",{skew}," in csv_text(build([asked], made, {}, figures=False))


def test_shares_of_common_fits_are_no_seconds_of_single_ones():
    made = [record("i2cl", "sst2", seed, "10", together=2) for seed in range(2)]
    result = table("cost", grid(("I2CL",), seeds=2), made)
    assert noted(result, "Seconds of equal shares of seeds that were fitted together: I2CL.")


def test_every_setting_has_a_section_but_not_for_a_single_row_that_another_experiment_brought():
    result = build([grid()], [*trial(), *llama(), *llama("zero_shot")], {}, figures=False)
    assert {one.setting.model for one in result.sections} == {"reference", LLAMA}
    assert len({one.anchor for one in result.sections}) == 2
    assert result.sections[1].heading == f"Trial ({result.sections[1].setting.model})"
    (only,) = build([grid()], [*trial(), *llama()], {}, figures=False).sections
    assert only.setting.model == "reference"
    assert only.missing == (f"a section for {LLAMA}, at most 40 queries per task: only I2CL there",)
    (only,) = build([grid()], llama(), {}, figures=False).sections
    assert only.setting.model == LLAMA
    assert only.tables


def test_a_pair_is_computed_once_and_turned_round():
    (results,) = results_of(grid(("ICV", "I2CL")), [*llama(model="r"), *llama("icv", "r", (0.9, 0.9))])
    icv, ours = results.lines
    there, back = results.difference(icv, ours), results.difference(ours, icv)
    assert back == replace(there, mean=-there.mean, low=-there.high, high=-there.low)
