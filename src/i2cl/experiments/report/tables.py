"""Build the tables of a report, independent of their output format."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from i2cl.experiments.grid import View
from i2cl.experiments.records import COUNTS
from i2cl.experiments.report import layout
from i2cl.experiments.report.layout import (
    NO_RESULT,
    Entry,
    Table,
    Values,
    format_accuracy,
    format_interval,
    format_points,
    mark_of,
    measured,
    number_range,
)
from i2cl.experiments.report.paper import Paper
from i2cl.experiments.report.printed import PrintedRow
from i2cl.experiments.report.results import Line, Results, compare, mean_times
from i2cl.experiments.report.trust import confidence_table
from i2cl.experiments.statistics import ALPHA, MIN_SEEDS, Accuracy, Comparison, Difference

HIGHER, LOWER, NOT_SIGNIFICANT = "▲", "▼", "·"

_VALUES = """view row task origin against measure temperature unit mean sd low high p q seeds queries
trainable_parameters cached_values cached_bytes fit_seconds ms_per_query held_out unlabelled lacking"""
# CSV columns in order; no table has all of them
VALUES = tuple(_VALUES.split())
COLUMNS = {
    "trainable_parameters": "Trained parameters",
    "cached_values": "Stored values",
    "cached_bytes": "Stored bytes",
    "held_out": "Held-out examples",
    "unlabelled": "Unlabelled texts",
}
"""Headings of integer costs, by CSV column."""

PAPER_COLUMNS: dict[str, Callable[[PrintedRow], str | None]] = {
    "Trained, thousands (paper)": lambda row: (
        None if row.trainable_thousands is None else f"{row.trainable_thousands:,.2f}"
    ),
    "Stored values (paper)": lambda row: row.cached,
}
"""Costs that the paper prints, by heading."""


def tasks_table(results: Results, paper: Paper) -> list[Table]:
    """Tabulate the accuracy of every row on every task, with the paper's numbers below each row."""
    averaged = len(results.tasks) > 1
    tasks = (*([None] if averaged else []), *results.tasks)
    leaders = {task: results.leader(task) for task in tasks}
    rows: list[list[Entry]] = []
    for line in results.lines:
        cells = (_accuracy(results, line, task, bold=leaders[task] == line) for task in tasks)
        rows.append([Entry(line.name), *cells])
        if paper.row(line) is not None:
            printed = (paper.cell(line, task) for task in tasks)
            rows.append([Entry(f"{line.name} (paper)", printed=True), *printed])
    notes = layout.accuracy_notes(results, rows, paper.notes(rows, averaged=averaged))
    columns = ("Row", *(task or "Average" for task in tasks))
    values = _values("tasks", results, results.lines, tasks, paper)
    return [Table("Accuracy by task", columns, rows, notes, values).narrow(len(results.tasks))]


def average_table(results: Results, paper: Paper) -> list[Table]:
    """Tabulate the accuracy of every row, averaged over tasks."""
    leader, has_printed = results.leader(), paper.averages
    rows: list[list[Entry]] = []
    for line in results.lines:
        accuracy = results.accuracy(line)
        interval = NO_RESULT if accuracy is None else format_interval(accuracy)
        numbers = (interval, len(results.tasks_of(line)), accuracy.seeds if accuracy else 0)
        cells = [_accuracy(results, line, bold=leader == line), *map(Entry, map(str, numbers))]
        rows.append([Entry(line.name), *cells, *([paper.cell(line, None)] if has_printed else [])])
    meaning = "The interval accounts for other demonstrations and other queries (bootstrap over both)."
    printed_notes = paper.notes(rows, averaged=True) if has_printed else []
    notes = layout.accuracy_notes(results, rows, printed_notes, meaning)
    columns = ("Row", "Average", "95 % interval", "Tasks", "Seeds", *(["(paper)"] if has_printed else []))
    values = _values("average", results, results.lines, [None], paper)
    return [Table("Average accuracy over tasks", columns, rows, notes, values)]


def shots_table(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate the average over tasks by demonstrations per class."""
    counts = sorted({line.shots for line in results.lines if line.shots is not None})
    rows = []
    for row in results.rows:
        by_shots = {line.shots: _accuracy(results, line) for line in results.lines if line.row is row}
        # a row without demonstrations has the same accuracy in every column
        cells = (by_shots.get(count) or by_shots.get(None) or Entry(NO_RESULT) for count in counts)
        rows += [[Entry(row.name), *cells]] if by_shots else []
    notes = (layout.scale_note(results, results.lines), *layout.incomplete_notes(results, results.lines))
    columns = ("Demonstrations per class", *map(str, counts))
    values = _values("shots", results, results.lines, [None])
    return [Table("Average accuracy by demonstrations", columns, rows, notes, values)] if counts else []


def matrix_table(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate the accuracy on every task (columns) of fits on every task (lines)."""
    tables = []
    for index in dict.fromkeys(line.index for line in results.moves):
        lines = [line for line in results.moves if line.index == index]
        rows = [
            [Entry(line.source or ""), *(_accuracy(results, line, task) for task in results.tasks)]
            for line in lines
        ]
        notes = (layout.scale_note(results, lines), *layout.incomplete_notes(results, lines))
        title = f"{lines[0].row.name}: from the task of the line to the task of the column"
        values = _values("matrix", results, lines, results.tasks)
        tables.append(Table(title, ("From", *results.tasks), rows, notes, values))
    return tables


def comparison_tables(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate differences from the reference row: on average and, if there are several tasks, on each."""
    pairs = [(line, other) for line in results.lines if (other := results.reference(line)) is not None]
    if not pairs:
        return []
    against = results.experiment.against
    minus = f"Row minus {against} in percentage points"
    caveats = layout.incomplete_notes(results, results.lines)
    caveats += ["Incomplete rows are compared on the tasks and seeds that both have."] if caveats else []
    caveats = [*layout.transductive_notes(results), *caveats]
    comparisons = _compare(results, pairs, [None])
    rows = [
        [Entry(line.name, mark=mark_of(results, line, other)), *map(Entry, _verdict(comparisons[line, None]))]
        for line, other in pairs
    ]
    notes = [
        f"{minus}, on the same queries and seeds.",
        "The interval accounts for other demonstrations and other queries (bootstrap over both).",
        "p: the larger p-value of a sign-flip test over queries and a paired t-test over seeds.",
        *_significance_notes(comparisons),
        *caveats,
    ]
    title = f"Difference from {against}" + (", average over tasks" if len(results.tasks) > 1 else "")
    columns = ("Row", "Difference", "95 % interval", "p", "q", "Verdict")
    values = _differences(results, pairs, comparisons)
    tables = [Table(title, columns, rows, notes, values, words=["Verdict"])]

    if len(results.tasks) > 1:
        comparisons = _compare(results, pairs, results.tasks)
        rows = [
            [Entry(line.name), *(Entry(_signed(comparisons[line, task])) for task in results.tasks)]
            for line, _ in pairs
        ]
        legend = (
            f"{minus}. {HIGHER} significantly higher, {LOWER} significantly lower, {NOT_SIGNIFICANT} not "
            "significant."
        )
        notes = [legend, *_significance_notes(comparisons), *caveats]
        title, values = f"Difference from {against} by task", _differences(results, pairs, comparisons)
        tables.append(Table(title, ("Row", *results.tasks), rows, notes, values).narrow(len(results.tasks)))
    return tables


def cost_table(results: Results, paper: Paper) -> list[Table]:
    """Tabulate the trained and stored numbers, the held-out examples and the times of every row."""
    printed = {line: row for line in results.lines if (row := paper.row(line)) is not None}
    paper_columns = {
        name: get for name, get in PAPER_COLUMNS.items() if any(get(row) for row in printed.values())
    }
    rows, values = [], []
    for line in results.lines:
        tasks = results.tasks_of(line)
        outcomes = [one for task in tasks for one in results.outcomes(line, task)]
        counts = (number_range(getattr(one.cost, COUNTS[name]) for one in outcomes) for name in COLUMNS)
        times = map(_duration, mean_times(results, line, tasks))
        name = Entry(line.name, mark=mark_of(results, line))
        rows.append([name, *map(Entry, counts), *map(Entry, times)])
        for get in paper_columns.values():
            rows[-1].append(Entry((get(printed[line]) if line in printed else None) or "", printed=True))
        values += [_costs(results, line, task) for task in tasks]
    notes = [
        "Times are means over tasks and seeds. Integers that differ between tasks or seeds are ranges.",
        *layout.time_notes(results),
        *layout.incomplete_notes(results, results.lines),
    ]
    if paper_columns and paper.table is not None:
        symbols = "M demonstration tokens, D width, L layers, 1/K compression rate."
        notes.append(f"(paper): as printed in {paper.table.paper}, {paper.table.model}. {symbols}")
    columns = ("Row", *COLUMNS.values(), "Fit, s", "Query, ms", *paper_columns)
    return [Table("Cost", columns, rows, notes, values)]


TABLES: Mapping[View, Callable[[Results, Paper], list[Table]]] = {
    "tasks": tasks_table,
    "average": average_table,
    "cost": cost_table,
    "comparison": comparison_tables,
    "confidence": confidence_table,
    "shots": shots_table,
    "matrix": matrix_table,
}
"""Views with tables. Each function returns an empty list if there is no data."""


def tables_of(view: View, results: Results, paper: Paper) -> list[Table]:
    """Build the tables of a view; none if the view is only a figure, or there is no data."""
    lines = results.moves if view == "matrix" else results.lines
    return TABLES[view](results, paper) if view in TABLES and lines else []


def _accuracy(results: Results, line: Line, task: str | None = None, *, bold: bool = False) -> Entry:
    """Format the accuracy of a line; averages of incomplete lines are marked."""
    accuracy = results.accuracy(line, task)
    text = NO_RESULT if accuracy is None else format_accuracy(accuracy.mean, accuracy.sd, accuracy.seeds)
    return Entry(text, bold=bold, mark=mark_of(results, line) if task is None else "")


def _in_percent(result: Accuracy | Difference, *names: str) -> Values:
    return {name: round(100 * getattr(result, name), 8) for name in names}


def _values(
    view: View,
    results: Results,
    lines: Iterable[Line],
    tasks: Sequence[str | None],
    paper: Paper | None = None,
) -> list[Values]:
    """Return raw accuracies on tasks (None: on average), with the paper's numbers after each line."""
    values: list[Values] = []
    for line in lines:
        values += [
            {
                **measured(view, results, task, line),
                **_in_percent(accuracy, "mean", "sd", "low", "high"),
                "unit": "percent",
                "seeds": accuracy.seeds,
                "queries": accuracy.queries,
            }
            for task in tasks
            if (accuracy := results.accuracy(line, task)) is not None
        ]
        values += paper.values(line, view) if paper is not None else []
    return values


def _costs(results: Results, line: Line, task: str) -> Values:
    outcomes = results.outcomes(line, task)
    fit, query = mean_times(results, line, [task])
    counts = {name: [getattr(one.cost, COUNTS[name]) for one in outcomes] for name in COLUMNS}
    return {
        **measured("cost", results, task, line),
        **{name: each[0] if len(set(each)) == 1 else float(np.mean(each)) for name, each in counts.items()},
        "fit_seconds": round(fit, 6),
        "ms_per_query": round(query, 6),
        "seeds": len(outcomes),
        "queries": len(outcomes[0].predictions),
    }


Pairs = list[tuple[Line, Line]]  # lines, each with its reference
Comparisons = dict[tuple[Line, str | None], Comparison | None]
"""Comparisons by line and task; None if the lines have no results in common."""


def _compare(results: Results, pairs: Pairs, tasks: Sequence[str | None]) -> Comparisons:
    """Compare all pairs on all tasks (None: on average)."""
    tests = {(line, task): results.difference(line, other, task) for line, other in pairs for task in tasks}
    return compare(tests)


def _significance_notes(comparisons: Comparisons) -> tuple[str, str]:
    count = sum(one is not None and one.difference.decidable for one in comparisons.values())
    family = f"all {count} tests of this table" if count > 1 else "the one test of this table"
    return (
        f"q: p with Holm's correction over {family}.",
        f"Significant: q < {ALPHA}, a 95 % interval that excludes 0, and at least {MIN_SEEDS} seeds.",
    )


def _verdict(comparison: Comparison | None) -> Sequence[str]:
    if comparison is None:
        return (*[NO_RESULT] * 4, "no results in common")
    difference, verdict = comparison.difference, "not significant"
    p, q = (f"{value:.3f}" if value >= 0.001 else "< 0.001" for value in (difference.p, comparison.q))
    if not difference.decidable:
        p, q, verdict = NO_RESULT, NO_RESULT, f"fewer than {MIN_SEEDS} seeds"
    elif comparison.significant:
        verdict = "higher" if difference.mean > 0 else "lower"
    return format_points(difference.mean), format_interval(difference), p, q, verdict


def _signed(comparison: Comparison | None) -> str:
    if comparison is None:
        return NO_RESULT
    mean = comparison.difference.mean
    mark = (HIGHER if mean > 0 else LOWER) if comparison.significant else NOT_SIGNIFICANT
    return f"{format_points(mean)} {mark}"


def _differences(results: Results, pairs: Pairs, comparisons: Comparisons) -> list[Values]:
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
        for (line, task), one in comparisons.items()
        if one is not None
    ]


def _duration(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
