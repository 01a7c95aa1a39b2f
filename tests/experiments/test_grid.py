"""Experiments: expansion into cells, keys of cells, and the built-in files."""

import itertools
import tomllib
from importlib import resources

import pytest

from fitting import raises
from i2cl.experiments.grid import Cell, Experiment, GridRow, Scale, Wording, spread
from i2cl.experiments.library import BUILTIN, ORDER, check_methods, load_experiment
from i2cl.experiments.report.printed import printed_tables
from i2cl.methods import METHODS

TASKS = ("a", "b", "c")
BASE = Cell(model="m", task="")
ROWS = (
    GridRow(name="Zero-shot", method="zero_shot", seeds=1),
    GridRow(name="I2CL", shots=(1, 5)),
    GridRow(name="Moved", study="move"),
    GridRow(name="Transferred", study="transfer"),
)


def make_experiment(rows=ROWS, **changes):
    return Experiment(name="mine", title="t", measures="m", rows=rows, **changes)


def test_cells_are_rows_times_tasks_times_seeds():
    cells = list(make_experiment().cells(BASE, TASKS, Scale(seeds=2, limit=7)))
    by_row = {row.name: [cell for cell in cells if row.holds(cell)] for row in ROWS}
    numbers = {"Zero-shot": 3, "I2CL": 3 * 2 * 2, "Moved": 3 * 3 * 2, "Transferred": 3 * 2}
    assert {name: len(result) for name, result in by_row.items()} == numbers
    assert sum(map(len, by_row.values())) == len(cells) == len({cell.key for cell in cells})
    assert {cell.limit for cell in cells} == {7}
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert {cell.sources for cell in by_row["Transferred"]} == {("b", "c"), ("a", "c"), ("a", "b")}
    pairs = {((source,), target) for source in TASKS for target in TASKS}
    assert {(cell.sources, cell.task) for cell in by_row["Moved"]} == pairs
    cells = list(make_experiment().cells(BASE, TASKS, Scale(seeds=1, limit=7, tasks=2, shots=1)))
    assert len({cell.task for cell in cells}) == 2
    assert {cell.shots for cell in cells if ROWS[1].holds(cell)} == {1}


@pytest.mark.parametrize("total", [1, 16])
def test_smaller_choices_of_tasks_are_subsets_of_larger_ones(total):
    names = [str(number) for number in range(total)]
    chosen = [spread(names, count) for count in range(1, total + 1)]
    assert [len(one) for one in chosen] == list(range(1, total + 1))
    assert all(set(small) < set(large) for small, large in itertools.pairwise(chosen))
    assert all(sorted(one, key=int) == list(one) for one in chosen)
    assert spread(names, None) == spread(names, total + 5) == tuple(names)
    places = [int(name) for name in spread([str(number) for number in range(16)], 4)]
    assert {place // 4 for place in places} >= {0, 2, 3}


CHANGES = [{"task": "u"}, {"seed": 1}, {"limit": 9}, {"options": {"noise": 0.1}}, {"shots": 2}]


@pytest.mark.parametrize("change", [*CHANGES, {"dtype": "bfloat16"}])
def test_cell_keys_are_distinct_and_stable(change):
    cell = Cell(model="m", task="t", options={"a": 1, "b": 2})
    assert cell.key == Cell(model="m", task="t", options={"b": 2, "a": 1}).key
    assert cell.model_copy(update=change).key != cell.key
    # with changed keys, existing stores would be run again
    assert Cell(model="reference", task="sst2", seed=3, limit=500).key == "dfbae7e794335a42"


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_experiments_are_valid(name):
    grid = load_experiment(name)
    assert (grid.paper != "-") is (name in ORDER)
    check_methods([grid])
    keys = {(row.study, row.method, str(row.options), row.demonstrations, row.chat) for row in grid.rows}
    assert len(keys) == len(grid.rows)


def test_builtin_experiments_cover_all_printed_rows_and_methods():
    builtin = resources.files("i2cl.experiments") / "builtin"
    assert {path.name.removesuffix(".toml") for path in builtin.iterdir()} == set(BUILTIN)
    main = tomllib.loads((builtin / "main.toml").read_text())
    assert {row["name"] for row in main["rows"]} >= {"Zero-shot", "I2CL"}
    for name in BUILTIN:
        experiment = load_experiment(name)
        shown = {row.name for row in experiment.rows}
        for table in printed_tables(experiment.printed) if experiment.printed else ():
            assert set(table.rows) <= shown, (name, table.paper)
    rows = [row for name in BUILTIN for row in load_experiment(name).rows]
    used = {part for row in rows for part in row.method.split("+")}
    # `i2cl fit` reports majority_class, and grids balance their queries; benchmarks/ensemble.py runs ensemble
    assert used == set(METHODS) - {"majority_class", "ensemble"}


def test_load_experiment_from_file_and_unknown_names(tmp_path):
    file = tmp_path / "my grid.toml"
    file.write_text('title = "T"\nmeasures = "M"\ntasks = ["x.csv"]\nrows = [{ name = "I2CL" }]\n')
    result = load_experiment(file)
    assert (result.name, result.tasks, result.rows[0].method) == ("my grid", ("x.csv",), "i2cl")
    assert result.command == f"i2cl experiment run '{file}'"
    assert load_experiment("real").command == "i2cl experiment run real"
    raises("did you mean 'main'", load_experiment, "mian")
    raises("no file", load_experiment, tmp_path / "none.toml")


TITLED = 'title = "T"\nmeasures = "M"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rows = [", "is not valid TOML"),
        (f"{TITLED}rows = []\n", "rows: .*at least 1"),
        (TITLED + 'rows = [{ name = "a", metod = "i2cl" }]\n', "rows.0.metod"),
        (TITLED + 'views = ["pie"]\nrows = [{ name = "a" }]\n', "views.0"),
        (TITLED + 'tasks = []\nrows = [{ name = "a" }]\n', "tasks is empty: name one"),
        (TITLED + 'rows = [{ name = "a", shots = [0] }]\n', "rows.0.shots.0"),
        (TITLED + 'rows = [{ name = "a" }, { name = "a" }]\n', "two rows are named 'a'"),
        (TITLED + 'against = "b"\nrows = [{ name = "a" }]\n', "against is 'b', which is not a row"),
        (
            TITLED + 'rows = [{ name = "a", study = "move", method = "noise" }]\n',
            "study=move, which uses I2CL with its defaults: remove method",
        ),
    ],
)
def test_invalid_files_raise_one_line(tmp_path, content, message):
    file = tmp_path / "mine.toml"
    file.write_text(content)
    raises(message, load_experiment, file)


def test_default_reference_is_i2cl_or_the_first_row():
    assert make_experiment().against == "I2CL"
    assert make_experiment(rows=ROWS[:1]).against == "Zero-shot"
    assert make_experiment(rows=[{"name": "B"}, {"name": "A"}]).against == "B"
    assert make_experiment(against="Moved").against == "Moved"


def test_grid_sets_templates_of_its_tasks():
    wordings = {"b": Wording(template="{text}? {label}", test="test.csv")}
    grid = make_experiment(tasks=("a", "b"), own=wordings)
    plain = {cell.key for cell in make_experiment(tasks=("a", "b")).cells(BASE, (), Scale(seeds=1))}
    for cell in grid.cells(BASE, (), Scale(seeds=1)):
        assert cell.wording == (wordings["b"] if cell.task == "b" else Wording())
        uses = "b" in (cell.task, *cell.sources)
        assert cell.own == (wordings if uses else {})
        assert (cell.key in plain) is not uses, "only what is worded otherwise is another cell"
    with pytest.raises(ValueError, match="own names 'c', which is not one of the tasks"):
        make_experiment(tasks=("a", "b"), own={"c": {"template": "{text} {label}"}})
