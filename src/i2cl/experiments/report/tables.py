"""Build the tables of a report, independent of their output format."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from i2cl.experiments.confidence import BINS, NAMES
from i2cl.experiments.grid import View
from i2cl.experiments.records import COUNTS
from i2cl.experiments.report.printed import Paper, PrintedRow
from i2cl.experiments.report.results import (
    Line,
    Results,
    compare,
    listing,
    mean_times,
    outcome,
    scores_by_task,
)
from i2cl.experiments.statistics import ALPHA, MIN_SEEDS, Accuracy, Comparison, Difference

HIGHER, LOWER, NOT_SIGNIFICANT = "▲", "▼", "·"
INCOMPLETE, OUTSIDE = "†", "‡"  # marks of cells, explained in notes
NO_RESULT = "–"
MAX_TASK_COLUMNS = 10  # with more tasks, tables are transposed
SYSTEM = ("machine", "accelerator", "device", "dtype", "threads")  # parts of provenance that times depend on

COST_COLUMNS = {
    "trainable_parameters": "Trained parameters",
    "cached_values": "Stored values",
    "cached_bytes": "Stored bytes",
    "held_out": "Held-out examples",
    "unlabelled": "Unlabelled texts",
}
"""Headings of integer costs, by CSV column."""

PAPER_COST_COLUMNS: dict[str, Callable[[PrintedRow], str | None]] = {
    "Trained, thousands (paper)": lambda row: (
        None if row.trainable_thousands is None else f"{row.trainable_thousands:,.2f}"
    ),
    "Stored values (paper)": lambda row: row.cached,
}
"""Costs that the paper prints, by heading."""

METRIC_COLUMNS = {"log_loss": "Log-loss", "brier": "Brier", "ece": "ECE, %", "aurc": "AURC, %"}

Numbers = Mapping[str, str | int | float | None]
"""Raw numbers of a cell by CSV column; accuracies and their differences in percent."""


class Entry(NamedTuple):
    """One cell of a table.

    Attributes:
        text: content.
        bold: whether the row is significantly better than every other.
        printed: whether the number is the paper's.
        mark: a sign that a note explains.
        numbers: raw numbers for CSV, or None.
    """

    text: str
    bold: bool = False
    printed: bool = False
    mark: str = ""
    numbers: Numbers | None = None


Rows = Sequence[Sequence[Entry]]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: heading.
        columns: names of the columns.
        rows: cells.
        notes: lines below the table.
        words: names of columns without numbers, besides the first.
        tasks: number of columns that are tasks.
    """

    title: str
    columns: Sequence[str]
    rows: Rows
    notes: Sequence[str] = ()
    words: Sequence[str] = ()
    tasks: int = 0

    @property
    def numeric(self) -> list[bool]:
        """Whether each column contains numbers, which are aligned to the right."""
        return [index > 0 and name not in self.words for index, name in enumerate(self.columns)]

    @property
    def narrow(self) -> "Table":
        """The table as it is shown: transposed if it has more than `MAX_TASK_COLUMNS` tasks."""
        if self.tasks <= MAX_TASK_COLUMNS:
            return self
        names, *columns = zip(*self.rows, strict=True)
        heads = [f"{name.text} {name.mark}".strip() for name in names]
        rows = [(Entry(name), *cells) for name, cells in zip(self.columns[1:], columns, strict=True)]
        return replace(self, columns=("Task", *heads), rows=rows)


def markdown_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], *, padded: bool = True
) -> str:
    """Format a Markdown table, with numeric columns aligned to the right.

    Args:
        head: headings, escaped for Markdown.
        rows: cells, escaped for Markdown.
        numeric: whether each column contains numbers.
        padded: whether all cells of a column have the same width in the source.
    """
    lines = [head, *rows]
    if not padded:
        alignment = "".join("---:|" if right else "---|" for right in numeric)
        texts = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([texts[0], f"|{alignment}", *texts[1:]])
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * (width - 1) + "-:"[right] for width, right in zip(widths, numeric, strict=True)]
    aligned = [
        [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        for line in (lines[0], rule, *lines[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in aligned)


def format_accuracy(mean: float, sd: float, seeds: int) -> str:
    """Format an accuracy from 0 to 1 in percent, with ± its standard deviation if there are several seeds."""
    return f"{100 * mean:.1f}" + (f" ± {100 * sd:.1f}" if seeds > 1 else "")


def format_points(difference: float) -> str:
    """Format a difference from -1 to 1 in percentage points, with its sign."""
    text = f"{100 * difference:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def format_interval(result: Accuracy | Difference) -> str:
    """Format the 95 % interval of an accuracy in percent, or of a difference in percentage points."""
    ends = (result.low, result.high)
    if isinstance(result, Difference):
        return " to ".join(map(format_points, ends))
    return " to ".join(f"{100 * end:.1f}" for end in ends)


def format_p(value: float) -> str:
    """Format a p-value with three digits."""
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def format_range(values: Iterable[int]) -> str:
    """Format integers as their common value, or as a range from the smallest to the largest."""
    distinct = sorted(set(values))
    return "–".join(f"{value:,}" for value in dict.fromkeys((distinct[0], distinct[-1])))


# Tables of accuracies


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
            printed = (_printed(paper, line, task) for task in tasks)
            rows.append([Entry(f"{line.name} (paper)", printed=True), *printed])
    notes = _accuracy_notes(results, rows, _paper_notes(paper, rows, averaged=averaged))
    columns = ("Row", *(task or "Average" for task in tasks))
    return [Table("Accuracy by task", columns, rows, notes, tasks=len(results.tasks))]


def average_table(results: Results, paper: Paper) -> list[Table]:
    """Tabulate the accuracy of every row, averaged over tasks."""
    leader, has_printed = results.leader(), paper.has_averages
    rows: list[list[Entry]] = []
    for line in results.lines:
        accuracy = results.accuracy(line)
        interval = NO_RESULT if accuracy is None else format_interval(accuracy)
        numbers = (interval, len(results.tasks_of(line)), accuracy.seeds if accuracy else 0)
        cells = [_accuracy(results, line, bold=leader == line), *map(Entry, map(str, numbers))]
        rows.append([Entry(line.name), *cells, *([_printed(paper, line, None)] if has_printed else [])])
    paper_notes = _paper_notes(paper, rows, averaged=True) if has_printed else []
    meaning = "The interval accounts for other demonstrations and other queries (bootstrap over both)."
    notes = _accuracy_notes(results, rows, paper_notes, meaning)
    columns = ("Row", "Average", "95 % interval", "Tasks", "Seeds", *(["(paper)"] if has_printed else []))
    return [Table("Average accuracy over tasks", columns, rows, notes)]


def shots_table(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate the average over tasks by demonstrations per class."""
    counts = sorted({line.shots for line in results.lines if line.shots is not None})
    rows = []
    for row in results.rows:
        by_shots = {line.shots: _accuracy(results, line) for line in results.lines if line.row is row}
        # a row without demonstrations has the same accuracy in every column
        cells = (by_shots.get(count) or by_shots.get(None) or Entry(NO_RESULT) for count in counts)
        rows += [[Entry(row.name), *cells]] if by_shots else []
    notes = (_scale_note(results, results.lines), *_incomplete_notes(results, results.lines))
    columns = ("Demonstrations per class", *map(str, counts))
    return [Table("Average accuracy by demonstrations", columns, rows, notes)] if counts else []


def matrix_table(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate the accuracy on every task (columns) of fits on every task (lines)."""
    tables = []
    for index in dict.fromkeys(line.index for line in results.moves):
        lines = [line for line in results.moves if line.index == index]
        rows = [
            [Entry(line.source or ""), *(_accuracy(results, line, task) for task in results.tasks)]
            for line in lines
        ]
        notes = (_scale_note(results, lines), *_incomplete_notes(results, lines))
        title = f"{lines[0].row.name}: from the task of the line to the task of the column"
        tables.append(Table(title, ("From", *results.tasks), rows, notes))
    return tables


def _accuracy(results: Results, line: Line, task: str | None = None, *, bold: bool = False) -> Entry:
    """Format the accuracy of a line on a task (None: on average); averages of incomplete lines are marked."""
    accuracy = results.accuracy(line, task)
    if accuracy is None:
        return Entry(NO_RESULT, mark=_mark(results, line) if task is None else "")
    numbers = _in_percent(accuracy, "mean", "sd", "low", "high")
    numbers |= {"seeds": accuracy.seeds, "queries": accuracy.queries, "gaps": _gaps(results, line)}
    text = format_accuracy(accuracy.mean, accuracy.sd, accuracy.seeds)
    return Entry(text, bold, mark=_mark(results, line) if task is None else "", numbers=numbers)


def _printed(paper: Paper, line: Line, task: str | None) -> Entry:
    """Format the paper's number for a row on a task (None: on average); empty if it prints none."""
    if task not in paper.numbers(line):
        return Entry("", printed=True)
    mean, sd = paper.numbers(line)[task]
    text = f"{mean:.2f}" + ("" if sd is None else f" ± {sd:.2f}")
    mark = OUTSIDE if paper.disagrees(line, task) else ""
    return Entry(text, printed=True, mark=mark, numbers={"mean": mean, "sd": sd})


# Tables of differences


Pairs = list[tuple[Line, Line]]  # lines, each with its reference
Comparisons = dict[tuple[Line, str | None], Comparison | None]
"""Comparisons by line and task; None if the lines have no results in common."""


def comparison_tables(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate differences from the reference row: on average and, if there are several tasks, on each."""
    pairs = [(line, other) for line in results.lines if (other := results.reference(line)) is not None]
    if not pairs:
        return []
    against = results.experiment.against
    minus = f"Row minus {against} in percentage points"
    caveats = _incomplete_notes(results, results.lines)
    caveats += ["Incomplete rows are compared on the tasks and seeds that both have."] if caveats else []
    caveats = [*_transductive_notes(results), *caveats]
    comparisons = _compare(results, pairs, [None])
    rows = [
        [
            Entry(line.name, mark=_mark(results, line, other)),
            Entry(_points(comparisons[line, None]), numbers=_difference(results, comparisons, line, other)),
            *map(Entry, _verdict(comparisons[line, None])),
        ]
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
    tables = [Table(title, columns, rows, notes, words=["Verdict"])]

    if len(results.tasks) > 1:
        comparisons = _compare(results, pairs, results.tasks)
        rows = [
            [
                Entry(line.name),
                *(
                    Entry(
                        _signed(comparisons[line, task]),
                        numbers=_difference(results, comparisons, line, other, task),
                    )
                    for task in results.tasks
                ),
            ]
            for line, other in pairs
        ]
        legend = (
            f"{minus}. {HIGHER} significantly higher, {LOWER} significantly lower, {NOT_SIGNIFICANT} not "
            "significant."
        )
        notes = [legend, *_significance_notes(comparisons), *caveats]
        title = f"Difference from {against} by task"
        tables.append(Table(title, ("Row", *results.tasks), rows, notes, tasks=len(results.tasks)))
    return tables


def _compare(results: Results, pairs: Pairs, tasks: Sequence[str | None]) -> Comparisons:
    """Compare all pairs on all tasks (None: on average)."""
    tests = {(line, task): results.difference(line, other, task) for line, other in pairs for task in tasks}
    return compare(tests)


def _points(comparison: Comparison | None) -> str:
    return NO_RESULT if comparison is None else format_points(comparison.difference.mean)


def _verdict(comparison: Comparison | None) -> Sequence[str]:
    """Return the interval, p, q and the verdict."""
    if comparison is None:
        return (*[NO_RESULT] * 3, "no results in common")
    difference, verdict = comparison.difference, "not significant"
    p, q = format_p(difference.p), format_p(comparison.q)
    if not difference.decidable:
        p, q, verdict = NO_RESULT, NO_RESULT, f"fewer than {MIN_SEEDS} seeds"
    elif comparison.significant:
        verdict = "higher" if difference.mean > 0 else "lower"
    return format_interval(difference), p, q, verdict


def _signed(comparison: Comparison | None) -> str:
    if comparison is None:
        return NO_RESULT
    mark = NOT_SIGNIFICANT
    if comparison.significant:
        mark = HIGHER if comparison.difference.mean > 0 else LOWER
    return f"{_points(comparison)} {mark}"


def _difference(
    results: Results, comparisons: Comparisons, line: Line, other: Line, task: str | None = None
) -> Numbers | None:
    comparison = comparisons[line, task]
    if comparison is None:
        return None
    difference = comparison.difference
    tests = {"p": difference.p if difference.decidable else None, "q": comparison.q}
    return {**_in_percent(difference, "mean", "low", "high"), **tests, "gaps": _gaps(results, line, other)}


def _significance_notes(comparisons: Comparisons) -> list[str]:
    count = sum(
        comparison is not None and comparison.difference.decidable for comparison in comparisons.values()
    )
    family = f"all {count} tests of this table" if count > 1 else "the one test of this table"
    rule = f"Significant: q < {ALPHA}, a 95 % interval that excludes 0, and at least {MIN_SEEDS} seeds."
    return [f"q: p with Holm's correction over {family}.", rule] if count else [rule]


# Table of costs


def cost_table(results: Results, paper: Paper) -> list[Table]:
    """Tabulate the trained and stored numbers, the held-out examples and the times of every row."""
    printed = {line: row for line in results.lines if (row := paper.row(line)) is not None}
    paper_columns = {
        name: get for name, get in PAPER_COST_COLUMNS.items() if any(get(row) for row in printed.values())
    }
    rows = []
    for line in results.lines:
        tasks = results.tasks_of(line)
        costs = [outcome.cost for task in tasks for outcome in results.outcomes(line, task)]
        counts = [[getattr(cost, COUNTS[name]) for cost in costs] for name in COST_COLUMNS]
        gaps = {"gaps": _gaps(results, line)}
        cells = [Entry(format_range(each), numbers={"mean": float(np.mean(each)), **gaps}) for each in counts]
        times = mean_times(results, line, tasks)
        cells += [Entry(_duration(mean), numbers={"mean": round(mean, 6), **gaps}) for mean in times]
        for get in paper_columns.values():
            cells.append(Entry((get(printed[line]) if line in printed else None) or "", printed=True))
        rows.append([Entry(line.name, mark=_mark(results, line)), *cells])
    notes = [
        "Times are means over tasks and seeds. Integers that differ between tasks or seeds are ranges.",
        *_time_notes(results),
        *_incomplete_notes(results, results.lines),
    ]
    if paper_columns and paper.table is not None:
        symbols = "M demonstration tokens, D width, L layers, 1/K compression rate."
        notes.append(f"(paper): as printed in {paper.table.paper}, {paper.table.model}. {symbols}")
    columns = ("Row", *COST_COLUMNS.values(), "Fit, s", "Query, ms", *paper_columns)
    return [Table("Cost", columns, rows, notes)]


def _duration(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# Table of calibration metrics


def confidence_table(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate the metrics of each row, each as predicted and at the best temperature."""
    rows: list[list[Entry]] = []
    for line in results.lines:
        tasks = scores_by_task(results, line)
        name = Entry(line.name, mark=_mark(results, line))
        if not tasks:
            rows.append([name, *[Entry(NO_RESULT)] * (2 * len(NAMES) + 1)])
            continue
        predicted = np.array([calibration.metrics(1.0) for calibration in tasks.values()])
        best = np.array([calibration.metrics(calibration.temperature) for calibration in tasks.values()])
        cells = [
            _metric(metrics.mean(0)[:, index], measure)
            for index, measure in enumerate(NAMES)
            for metrics in (predicted, best)
        ]
        temperature = float(np.median([calibration.temperature for calibration in tasks.values()]))
        rows.append([name, *cells, Entry(f"{temperature:.2f}")])
    without = [row[0].text for row in rows if row[1].text == NO_RESULT]
    if len(without) == len(rows):
        return []
    notes = [
        "Means over tasks, ± standard deviation over seeds. Lower is better in every column.",
        "Log-loss: mean negative log-probability of the gold label, in nats.",
        "Brier: mean squared error of the probabilities, summed over labels.",
        f"ECE: expected calibration error over {BINS} equal-mass bins.",
        "AURC: area under the risk-coverage curve.",
        "At best T: at the temperature with the lowest log-loss on each task, fitted on the gold labels.",
        "Best T: median of this temperature over tasks.",
        *(
            [f"{NO_RESULT} no stored scores (runs of an older version): {'; '.join(without)}."]
            if without
            else []
        ),
        *_incomplete_notes(results, results.lines),
    ]
    heads = (part for name in METRIC_COLUMNS.values() for part in (name, "at best T"))
    return [Table("Calibration", ("Row", *heads, "Best T"), rows, notes)]


def _metric(seeds: Float[np.ndarray, " seeds"], name: str) -> Entry:
    factor, digits = (100, 1) if METRIC_COLUMNS[name].endswith("%") else (1, 3)
    mean, sd = factor * seeds.mean(), factor * seeds.std(ddof=1) if len(seeds) > 1 else 0.0
    text = f"{mean:.{digits}f}" + (f" ± {sd:.{digits}f}" if len(seeds) > 1 else "")
    numbers = {"mean": round(float(mean), 8), "sd": round(float(sd), 8), "seeds": len(seeds)}
    return Entry(text, numbers=numbers)


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


# Parts that tables share: raw numbers, marks and notes


def _in_percent(result: Accuracy | Difference, *names: str) -> dict[str, Any]:
    return {name: round(100 * getattr(result, name), 8) for name in names}


def _gaps(results: Results, *lines: Line) -> str | None:
    """Describe the missing tasks and seeds of lines; None if there are none."""
    return "; ".join(dict.fromkeys(gap for line in lines for gap in results.gaps(line))) or None


def _mark(results: Results, *lines: Line) -> str:
    """Return `INCOMPLETE` if any of these lines has gaps, else an empty string."""
    return INCOMPLETE if any(map(results.gaps, lines)) else ""


def _accuracy_notes(results: Results, rows: Rows, paper_notes: Iterable[str], *meaning: str) -> list[str]:
    """Return the notes below a table of accuracies."""
    notes = [_scale_note(results, results.lines), *meaning]
    if len(results.lines) > 1 and any(cell.bold for row in rows for cell in row):
        notes.append(
            f"Bold: significantly better than every other row (q < {ALPHA}, a 95 % interval above 0, and at "
            f"least {MIN_SEEDS} seeds). q: the larger p-value of the tests over queries and over seeds, with "
            "Holm's correction over the other rows on the same task or average."
        )
    elif len(results.lines) > 1:
        notes.append("Nothing is bold: no row is significantly better than all others.")
    return [*notes, *_transductive_notes(results), *_incomplete_notes(results, results.lines), *paper_notes]


def _paper_notes(paper: Paper, rows: Rows, *, averaged: bool) -> list[str]:
    """Return the notes that explain the paper's numbers in a table."""
    if paper.table is None:
        return []
    results = paper.results
    ours = {line.row.name for line in results.lines if paper.row(line)}
    notes = [f"(paper): as printed in {paper.table.paper}, {paper.table.model}."] if ours else []
    if others := [name for name in paper.table.rows if name not in ours]:
        notes.append(f"Rows of {paper.table.paper.split(':')[0]} without results here: {listing(others)}.")
    if any(cell.mark == OUTSIDE for row in rows for cell in row):
        notes.append(
            f"{OUTSIDE} The paper's number is outside our 95 % interval (its own uncertainty is ignored)."
        )
    if averaged and paper.has_averages and set(results.tasks) != set(paper.tasks):
        notes.append(
            f"Averages are over {len(results.tasks)} tasks here and {len(paper.tasks)} in the paper, so they "
            "are not compared."
        )
    return notes


def _scale_note(results: Results, lines: Iterable[Line]) -> str:
    """Return a note on the unit, the seeds and the queries of accuracies."""
    runs = [results.outcomes(line, task) for line in lines for task in results.tasks_of(line)]
    seeds = max(map(len, runs))
    queries = format_range(len(outcomes[0].predictions) for outcomes in runs).replace(",", "")
    repeated = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    fixed = "; no ± for a single seed" if seeds > 1 and any(len(run) == 1 for run in runs) else ""
    return f"Accuracy in percent, {repeated}{fixed}. {queries} queries per task."


def _transductive_notes(results: Results) -> list[str]:
    """Return a note that names the rows whose predictions depend on the other queries."""
    rows = dict.fromkeys(line.row.name for line in results.lines if line.transductive)
    if not rows:
        return []
    balance = "not balanced" if results.setting.skew > 1 else "balanced as far as the test split allows"
    return [f"Predict all queries as one batch, whose classes are {balance}: {'; '.join(rows)}."]


def _incomplete_notes(results: Results, lines: Sequence[Line]) -> list[str]:
    """Return a note for each kind of gap, with the lines that have it, and one on tasks without results."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        for gap in results.gaps(line):
            groups.setdefault(gap, []).append(line)
    notes = [f"{INCOMPLETE} {gap}: {_names(group, lines)}." for gap, group in groups.items()]
    return [*notes, *([f"No results on {listing(results.missing_tasks)}."] if results.missing_tasks else [])]


def _names(group: Sequence[Line], lines: Sequence[Line]) -> str:
    """Name the lines of a group, or a row instead of its lines if all of them are in the group."""
    if len(group) > 1 and all(line in group or line.row.seeds == 1 for line in lines):
        return "all rows" + (" except deterministic ones" if len(group) < len(lines) else "")
    partial = {line.index for line in lines if line not in group}
    return "; ".join(dict.fromkeys(line.name if line.index in partial else line.row.name for line in group))


def _time_notes(results: Results) -> list[str]:
    """Return notes on the systems that times were measured on, and on rows with joint fits."""
    by_line = {
        line: [record for task in results.tasks for record in results.records(line, task).values()]
        for line in results.lines
    }
    origins = (record.provenance for records in by_line.values() for record in records)
    parts = (
        [f"{part} {value}" for part in SYSTEM if (value := origin.get(part)) is not None]
        for origin in origins
    )
    systems = list(dict.fromkeys(map(", ".join, parts)))
    notes = [f"Measured on: {systems[0]}."] if systems[0] else []
    if len(systems) > 1:
        notes = [f"Times are not comparable; they are from {len(systems)} systems: {'; '.join(systems)}."]
    joint = [
        line.name
        for line, records in by_line.items()
        if any(outcome(record).together > 1 for record in records)
    ]
    if joint:
        notes.append(f"Fit times are equal shares of a joint fit of several seeds: {'; '.join(joint)}.")
    return notes
