"""Parts that all tables of a report share: cells, marks, notes, and raw numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from i2cl.experiments.grid import View
from i2cl.experiments.report.results import Line, Results, listing, outcome
from i2cl.experiments.statistics import ALPHA, MIN_SEEDS, Accuracy, Difference

INCOMPLETE, OUTSIDE = "†", "‡"  # marks of cells, explained in notes
SYSTEM = ("machine", "accelerator", "device", "dtype", "threads")  # parts of provenance that times depend on
NO_RESULT = "–"
MAX_TASK_COLUMNS = 10  # with more tasks, tables are transposed
AVERAGE = "(average)"  # task of raw numbers that are averages over tasks
Values = Mapping[str, str | int | float | None]
"""Raw numbers of one row on one task, by CSV column; accuracies in percent."""


class Entry(NamedTuple):
    """One cell of a table.

    Attributes:
        text: content.
        bold: whether the row is significantly better than every other.
        printed: whether the number is the paper's.
        mark: a sign that a note explains.
    """

    text: str
    bold: bool = False
    printed: bool = False
    mark: str = ""


Rows = Sequence[Sequence[Entry]]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        title: heading.
        columns: names of the columns.
        rows: cells.
        notes: lines below the table.
        values: raw numbers by row and task, for CSV.
        words: names of columns without numbers, besides the first.
    """

    title: str
    columns: Sequence[str]
    rows: Rows
    notes: Sequence[str] = ()
    values: Sequence[Values] = ()
    words: Sequence[str] = ()

    @property
    def numeric(self) -> list[bool]:
        """Whether each column contains numbers, which are aligned to the right."""
        return [index > 0 and name not in self.words for index, name in enumerate(self.columns)]

    def narrow(self, tasks: int) -> "Table":
        """Transpose a table with a column for each of more than `MAX_TASK_COLUMNS` tasks."""
        if tasks <= MAX_TASK_COLUMNS:
            return self
        names, *columns = zip(*self.rows, strict=True)
        heads = [f"{one.text} {one.mark}".strip() for one in names]
        rows = [(Entry(name), *cells) for name, cells in zip(self.columns[1:], columns, strict=True)]
        return replace(self, columns=("Task", *heads), rows=rows)


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


def mark_of(results: Results, *lines: Line) -> str:
    """Return `INCOMPLETE` if any of these lines has gaps, else an empty string."""
    return INCOMPLETE if any(map(results.gaps, lines)) else ""


def measured(view: View, results: Results, task: str | None, line: Line, *others: Line) -> Values:
    """Return the CSV columns that describe a measured number."""
    gaps = dict.fromkeys(gap for one in (line, *others) for gap in results.gaps(one))
    return {
        "view": view,
        "row": line.name,
        "task": AVERAGE if task is None else task,
        "origin": "measured",
        "lacking": "; ".join(gaps) or None,
    }


def accuracy_notes(results: Results, rows: Rows, printed: Iterable[str], *meaning: str) -> list[str]:
    """Return the notes below a table of accuracies; those on printed numbers come last."""
    notes = [scale_note(results, results.lines), *meaning]
    if len(results.lines) > 1 and any(cell.bold for row in rows for cell in row):
        notes.append(
            f"Bold: significantly better than every other row (q < {ALPHA}, a 95 % interval above 0, and at "
            f"least {MIN_SEEDS} seeds). q: the larger p-value of the tests over queries and over seeds, with "
            "Holm's correction over the other rows on the same task or average."
        )
    elif len(results.lines) > 1:
        notes.append("Nothing is bold: no row is significantly better than all others.")
    return [*notes, *transductive_notes(results), *incomplete_notes(results, results.lines), *printed]


def scale_note(results: Results, lines: Iterable[Line]) -> str:
    """Return a note on the unit, the seeds and the queries of accuracies."""
    runs = [results.outcomes(line, task) for line in lines for task in results.tasks_of(line)]
    seeds = max(map(len, runs))
    queries = number_range(len(outcomes[0].predictions) for outcomes in runs).replace(",", "")
    repeated = f"mean ± standard deviation over {seeds} seeds" if seeds > 1 else "one seed"
    fixed = "; no ± for a single seed" if seeds > 1 and any(len(one) == 1 for one in runs) else ""
    return f"Accuracy in percent, {repeated}{fixed}. {queries} queries per task."


def transductive_notes(results: Results) -> list[str]:
    """Return a note that names the rows whose predictions depend on the other queries."""
    rows = dict.fromkeys(line.row.name for line in results.lines if line.transductive)
    if not rows:
        return []
    balance = "not balanced" if results.setting.skew > 1 else "balanced as far as the test split allows"
    return [f"Predict all queries as one batch, whose classes are {balance}: {'; '.join(rows)}."]


def incomplete_notes(results: Results, lines: Sequence[Line]) -> list[str]:
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


def time_notes(results: Results) -> list[str]:
    """Return notes on the systems that times were measured on, and on rows with joint fits."""
    by_line = {
        line: [one for task in results.tasks for one in results.records(line, task).values()]
        for line in results.lines
    }
    origins = (one.provenance for records in by_line.values() for one in records)
    parts = (
        [f"{part} {value}" for part in SYSTEM if (value := one.get(part)) is not None] for one in origins
    )
    systems = list(dict.fromkeys(map(", ".join, parts)))
    notes = [f"Measured on: {systems[0]}."] if systems[0] else []
    if len(systems) > 1:
        notes = [f"Times are not comparable; they are from {len(systems)} systems: {'; '.join(systems)}."]
    rows = [line.name for line, held in by_line.items() if any(outcome(one).together > 1 for one in held)]
    if rows:
        notes.append(f"Fit times are equal shares of a joint fit of several seeds: {'; '.join(rows)}.")
    return notes


def number_range(values: Iterable[int]) -> str:
    """Format integers as their common value, or as a range from the smallest to the largest."""
    distinct = sorted(set(values))
    return "–".join(f"{value:,}" for value in dict.fromkeys((distinct[0], distinct[-1])))
