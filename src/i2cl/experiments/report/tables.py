"""The tables of a report: data and notes, whatever they are rendered to."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.grid import View
from i2cl.experiments.records import COUNTS
from i2cl.experiments.report import layout
from i2cl.experiments.report.layout import NOTHING, Entry, Table, Values, mark_of, measured, number_range
from i2cl.experiments.report.paper import Paper
from i2cl.experiments.report.printed import PrintedRow
from i2cl.experiments.report.results import Line, Results, mean_times
from i2cl.experiments.report.trust import confidence_table
from i2cl.experiments.statistics import ALPHA, FEWEST_SEEDS, Accuracy, Comparison, Difference

HIGHER, LOWER, ALIKE = "▲", "▼", "·"

_VALUES = """view row task origin against measure temperature unit mean sd low high p q seeds queries
trainable_parameters cached_values cached_bytes fit_seconds ms_per_query held_out unlabelled lacking"""
# Names of the raw numbers of a table, in the order of a file's columns; no table has all of them.
VALUES = tuple(_VALUES.split())
COLUMNS = {
    "trainable_parameters": "Trained parameters",
    "cached_values": "Values kept",
    "cached_bytes": "Bytes kept",
    "held_out": "Held-out examples",
    "unlabelled": "Unlabelled texts",
}
"""Whole numbers of a run's cost, by the names they have in files, with the column's name."""

PRINTED: dict[str, Callable[[PrintedRow], str | None]] = {
    "Trained, thousands (paper)": lambda row: (
        None if row.trainable_thousands is None else f"{row.trainable_thousands:,.2f}"
    ),
    "Values kept (paper)": lambda row: row.cached,
}
"""Columns of costs that the paper prints, if it does."""


def tasks_table(results: Results, paper: Paper) -> list[Table]:
    """Accuracy of every row on every task; printed numbers stand below the row that they belong to."""
    averaged = len(results.tasks) > 1
    places = (*([None] if averaged else []), *results.tasks)
    leaders = {task: results.leader(task) for task in places}
    rows: list[list[Entry]] = []
    for line in results.lines:
        cells = (_accuracy(results, line, task, bold=leaders[task] == line) for task in places)
        rows.append([Entry(line.name), *cells])
        if paper.row(line) is not None:
            printed = (paper.cell(line, task) for task in places)
            rows.append([Entry(f"{line.name} (paper)", printed=True), *printed])
    notes = layout.accuracy_notes(results, rows, paper.notes(rows, averaged=averaged))
    columns = ("Row", *(task or "Average" for task in places))
    values = _values("tasks", results, results.lines, places, paper)
    return [Table("Accuracy by task", columns, rows, notes, values).narrow(len(results.tasks))]


def average_table(results: Results, paper: Paper) -> list[Table]:
    """Accuracy of every row, averaged over tasks."""
    overall, beside = results.leader(), paper.averages
    rows: list[list[Entry]] = []
    for line in results.lines:
        got = results.accuracy(line)
        numbers = map(str, (_interval(got), len(results.tasks_of(line)), got.seeds if got else 0))
        rows.append([Entry(line.name), _accuracy(results, line, bold=overall == line), *map(Entry, numbers)])
        rows[-1] += [paper.cell(line, None)] if beside else []
    meaning = "The interval is for other demonstrations and other queries (bootstrap over both)."
    notes = layout.accuracy_notes(results, rows, paper.notes(rows, averaged=True) if beside else [], meaning)
    columns = ("Row", "Average", "95 % interval", "Tasks", "Seeds", *(["(paper)"] if beside else []))
    values = _values("average", results, results.lines, [None], paper)
    return [Table("Average accuracy over tasks", columns, rows, notes, values)]


def shots_table(results: Results, _paper: Paper) -> list[Table]:
    """Average over tasks by demonstrations per class, of the rows that have several numbers of them."""
    counts = sorted({line.shots for line in results.lines if line.shots is not None})
    rows = []
    for row in results.rows:
        by_shots = {line.shots: _accuracy(results, line) for line in results.lines if line.row is row}
        # A row without demonstrations is the same for every number of them.
        cells = (by_shots.get(count) or by_shots.get(None) or Entry(NOTHING) for count in counts)
        rows += [[Entry(row.name), *cells]] if by_shots else []
    notes = (layout.scale_note(results, results.lines), *layout.incomplete_notes(results, results.lines))
    columns = ("Demonstrations per class", *map(str, counts))
    values = _values("shots", results, results.lines, [None])
    return [Table("Average accuracy by demonstrations", columns, rows, notes, values)] if counts else []


def matrix_table(results: Results, _paper: Paper) -> list[Table]:
    """Accuracy on every task (columns) with what was fitted on every other (lines)."""
    tables = []
    for place in dict.fromkeys(line.place for line in results.moves):
        lines = [line for line in results.moves if line.place == place]
        each = ((line, [_accuracy(results, line, task) for task in results.tasks]) for line in lines)
        rows = [[Entry(line.source or ""), *cells] for line, cells in each]
        notes = (layout.scale_note(results, lines), *layout.incomplete_notes(results, lines))
        title = f"{lines[0].row.name}: from the task of the line to that of the column"
        values = _values("matrix", results, lines, results.tasks)
        tables.append(Table(title, ("From", *results.tasks), rows, notes, values))
    return tables


def comparison_tables(results: Results, _paper: Paper) -> list[Table]:
    """Differences from the row that others are tested against: of averages; with several tasks, on each."""
    pairs = [(line, other) for line in results.lines if (other := results.reference(line)) is not None]
    if not pairs:
        return []
    against = results.experiment.against
    minus = f"Row minus {against} in percentage points"
    lacking = layout.incomplete_notes(results, results.lines)
    lacking += ["Incomplete rows are compared on the tasks and seeds that both have."] if lacking else []
    lacking = [*layout.transductive_notes(results), *lacking]
    tested = _tested(results, pairs, [None])
    rows = [
        [Entry(line.name, mark=mark_of(results, line, other)), *map(Entry, _verdict(tested[line, None]))]
        for line, other in pairs
    ]
    meaning = (
        f"{minus}, on the same queries and seeds; the interval is for other demonstrations and other queries."
    )
    notes = [
        meaning,
        "p: the larger of a sign-flip test over queries and a paired t-test over seeds; neither holds alone.",
        *_decision(tested),
        *lacking,
    ]
    title = f"Difference from {against}" + (", average over tasks" if len(results.tasks) > 1 else "")
    columns = ("Row", "Difference", "95 % interval", "p", "q", "Verdict")
    values = _differences(results, pairs, tested)
    tables = [Table(title, columns, rows, notes, values, words=["Verdict"])]

    if len(results.tasks) > 1:
        tested = _tested(results, pairs, results.tasks)
        signed = {line: [_signed(tested[line, task]) for task in results.tasks] for line, _ in pairs}
        rows = [[*map(Entry, (line.name, *texts))] for line, texts in signed.items()]
        legend = f"{minus}. {HIGHER} shown higher, {LOWER} shown lower, {ALIKE} no difference shown."
        notes = [legend, *_decision(tested), *lacking]
        title, values = f"Difference from {against} by task", _differences(results, pairs, tested)
        tables.append(Table(title, ("Row", *results.tasks), rows, notes, values).narrow(len(results.tasks)))
    return tables


def cost_table(results: Results, paper: Paper) -> list[Table]:
    """Numbers trained and kept, held-out examples and times of every row."""
    printed = {line: row for line in results.lines if (row := paper.row(line)) is not None}
    extra = {name: write for name, write in PRINTED.items() if any(map(write, printed.values()))}
    rows, values = [], []
    for line in results.lines:
        tasks = results.tasks_of(line)
        outcomes = [one for task in tasks for one in results.outcomes(line, task)]
        counts = (number_range(getattr(one.cost, COUNTS[name]) for one in outcomes) for name in COLUMNS)
        times = map(_duration, mean_times(results, line, tasks))
        beside = (write(printed[line]) if line in printed else None for write in extra.values())
        name = Entry(line.name, mark=mark_of(results, line))
        rows.append([name, *map(Entry, counts), *map(Entry, times)])
        rows[-1] += [Entry(one or "", printed=True) for one in beside]
        values += [_costs(results, line, task) for task in tasks]
    notes = [
        "Times are means over tasks and seeds; whole numbers that differ between tasks or seeds are ranges.",
        *layout.time_notes(results),
        *layout.incomplete_notes(results, results.lines),
    ]
    if extra and paper.table is not None:
        symbols = "M demonstration tokens, D width, L layers, 1/K compression rate."
        notes.append(f"(paper): as printed in {paper.table.paper}, {paper.table.model}. {symbols}")
    return [Table("Cost", ("Row", *COLUMNS.values(), "Fit, s", "Query, ms", *extra), rows, notes, values)]


TABLES: Mapping[View, Callable[[Results, Paper], list[Table]]] = {
    "tasks": tasks_table,
    "average": average_table,
    "cost": cost_table,
    "comparison": comparison_tables,
    "confidence": confidence_table,
    "shots": shots_table,
    "matrix": matrix_table,
}
"""Views that have tables: each gives a list, empty where there is no data."""


def tables_of(view: View, results: Results, paper: Paper) -> list[Table]:
    """The tables of a view; empty where it has none, or there is no data."""
    there = results.moves if view == "matrix" else results.lines
    return TABLES[view](results, paper) if view in TABLES and there else []


def _accuracy(results: Results, line: Line, task: str | None = None, *, bold: bool = False) -> Entry:
    """Mean ± standard deviation, the mean alone where one seed has no spread; averages are marked."""
    got = results.accuracy(line, task)
    spread = f" ± {100 * got.sd:.1f}" if got is not None and got.seeds > 1 else ""
    text = NOTHING if got is None else f"{100 * got.mean:.1f}{spread}"
    return Entry(text, bold=bold, mark=mark_of(results, line) if task is None else "")


def _in_percent(got: Accuracy | Difference, *names: str) -> Values:
    return {name: round(100 * getattr(got, name), 8) for name in names}


def _values(
    view: View,
    results: Results,
    lines: Iterable[Line],
    tasks: Sequence[str | None],
    paper: Paper | None = None,
) -> list[Values]:
    """Raw accuracies on tasks, and on average for None; after each line what the paper prints."""
    values: list[Values] = []
    for line in lines:
        values += [
            {
                **measured(view, results, task, line),
                **_in_percent(got, "mean", "sd", "low", "high"),
                "unit": "percent",
                "seeds": got.seeds,
                "queries": got.queries,
            }
            for task in tasks
            if (got := results.accuracy(line, task)) is not None
        ]
        values += paper.values(line, view) if paper is not None else []
    return values


def _costs(results: Results, line: Line, task: str) -> Values:
    outcomes = results.outcomes(line, task)
    fit, query = mean_times(results, line, [task])
    counts = {name: [getattr(one.cost, COUNTS[name]) for one in outcomes] for name in COLUMNS}
    return {
        **measured("cost", results, task, line),
        **{name: got[0] if len(set(got)) == 1 else float(np.mean(got)) for name, got in counts.items()},
        "fit_seconds": round(fit, 6),
        "ms_per_query": round(query, 6),
        "seeds": len(outcomes),
        "queries": len(outcomes[0].predictions),
    }


Pairs = list[tuple[Line, Line]]  # lines, each with the one that it is tested against
Tested = dict[tuple[Line, str | None], Comparison | None]
"""Comparisons by line and task; None where the two share no results."""


def _tested(results: Results, pairs: Pairs, tasks: Sequence[str | None]) -> Tested:
    """All lines on all tasks, on average for None, corrected over all that have seeds enough to be tested."""
    tests = {(line, task): results.difference(line, other, task) for line, other in pairs for task in tasks}
    got = {key: difference for key, difference in tests.items() if difference is not None}
    ps = {key: difference.p for key, difference in got.items() if difference.decidable}
    q = dict(zip(ps, holm(list(ps.values())), strict=True))
    return {key: Comparison(got[key], q.get(key, 1.0)) if key in got else None for key in tests}


def _decision(tested: Tested) -> tuple[str, str]:
    """Over what q is corrected, and what "shown" means."""
    count = sum(one is not None and one.difference.decidable for one in tested.values())
    family = f"all {count} tests of this table" if count > 1 else "the one test of this table"
    return (
        f"q: that p corrected by Holm; the family is {family}.",
        f"Shown: q < {ALPHA}, a 95 % interval that excludes 0, and at least {FEWEST_SEEDS} seeds, all three.",
    )


def _verdict(comparison: Comparison | None) -> Sequence[str]:
    if comparison is None:
        return (*[NOTHING] * 4, "nothing shared to compare")
    got, verdict = comparison.difference, "no difference shown"
    p, q = (f"{value:.3f}" if value >= 0.001 else "< 0.001" for value in (got.p, comparison.q))
    if not got.decidable:
        p, q, verdict = NOTHING, NOTHING, f"fewer than {FEWEST_SEEDS} seeds cannot tell"
    elif comparison.distinguishable:
        verdict = "higher" if got.mean > 0 else "lower"
    return _points(got.mean), _interval(got), p, q, verdict


def _signed(comparison: Comparison | None) -> str:
    if comparison is None:
        return NOTHING
    mean = comparison.difference.mean
    mark = (HIGHER if mean > 0 else LOWER) if comparison.distinguishable else ALIKE
    return f"{_points(mean)} {mark}"


def _differences(results: Results, pairs: Pairs, tested: Tested) -> list[Values]:
    against = dict(pairs)
    return [
        {
            **measured("comparison", results, task, line, against[line]),
            **_in_percent(one.difference, "mean", "low", "high"),
            "unit": "percentage points",
            "against": against[line].name,
            "p": one.difference.p if one.difference.decidable else None,
            "q": one.q,
        }
        for (line, task), one in tested.items()
        if one is not None
    ]


def _points(share: float) -> str:
    text = f"{100 * share:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def _interval(got: Accuracy | Difference | None) -> str:
    if got is None:
        return NOTHING
    signed = isinstance(got, Difference)
    return " to ".join(_points(end) if signed else f"{100 * end:.1f}" for end in (got.low, got.high))


def _duration(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
