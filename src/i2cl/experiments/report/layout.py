"""What all tables are made of: cells, marks, the table itself, what it says below its lines, raw numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from i2cl.experiments.grid import View
from i2cl.experiments.report.results import Line, Results, listing, outcome
from i2cl.experiments.statistics import ALPHA, FEWEST_SEEDS

INCOMPLETE, OUTSIDE = "†", "‡"  # marks of cells that a note explains
WHERE = ("machine", "accelerator", "device", "dtype", "threads")  # parts of provenance that times depend on
NOTHING = "–"  # stands where there is no result
WIDE = 10  # with more tasks than this, tasks are lines and rows are columns
AVERAGE = "(average)"  # stands for the task where a raw number is an average over tasks
Values = Mapping[str, str | int | float | None]
"""Raw numbers of one row on one task, by the names of a CSV file's columns; accuracies in percent."""


class Entry(NamedTuple):
    """One cell of a table: bold if it can be told from all others; notes explain a mark."""

    text: str
    bold: bool = False
    printed: bool = False
    mark: str = ""


Rows = Sequence[Sequence[Entry]]


@dataclass(frozen=True)
class Table:
    """One table; ``words`` are columns without numbers, ``values`` the raw numbers by row and task."""

    title: str
    columns: Sequence[str]
    rows: Rows
    notes: Sequence[str] = ()
    values: Sequence[Values] = ()
    words: Sequence[str] = ()

    @property
    def numeric(self) -> list[bool]:
        """Whether each column holds numbers, which stand to the right."""
        return [place > 0 and name not in self.words for place, name in enumerate(self.columns)]

    def narrow(self, tasks: int) -> "Table":
        """Lines and columns changed over, where so many tasks would be too wide."""
        if tasks <= WIDE:
            return self
        names, *columns = zip(*self.rows, strict=True)
        heads = [f"{one.text} {one.mark}".strip() for one in names]
        rows = [(Entry(name), *cells) for name, cells in zip(self.columns[1:], columns, strict=True)]
        return replace(self, columns=("Task", *heads), rows=rows)


def mark_of(results: Results, *lines: Line) -> str:
    """A sign that some of these lines are incomplete."""
    return INCOMPLETE if any(map(results.lacking, lines)) else ""


def measured(view: View, results: Results, task: str | None, line: Line, *others: Line) -> Values:
    """What all raw numbers say of themselves."""
    lacking = dict.fromkeys(part for one in (line, *others) for part in results.lacking(one))
    return {
        "view": view,
        "row": line.name,
        "task": AVERAGE if task is None else task,
        "origin": "measured",
        "lacking": "; ".join(lacking) or None,
    }


def accuracy_notes(results: Results, rows: Rows, printed: Iterable[str], *meaning: str) -> list[str]:
    """All that stands below a table of accuracies, what is said of printed ones last."""
    notes = [scale_note(results, results.lines), *meaning]
    if len(results.lines) > 1 and any(cell.bold for row in rows for cell in row):
        notes.append(
            f"Bold: the best, where it is shown to be better than every other row: q < {ALPHA}, a 95 % "
            f"interval above 0, and at least {FEWEST_SEEDS} seeds. q: the larger p of tests over queries and "
            "seeds, corrected by Holm; the family is the other rows on the same task or average."
        )
    elif len(results.lines) > 1:
        notes.append("Nothing is bold: nowhere can the best row be told from every other.")
    return [*notes, *transductive_notes(results), *incomplete_notes(results, results.lines), *printed]


def scale_note(results: Results, lines: Iterable[Line]) -> str:
    """What accuracies are made of."""
    held = [results.outcomes(line, task) for line in lines for task in results.tasks_of(line)]
    most = max(map(len, held))
    span = number_range(len(outcomes[0].predictions) for outcomes in held).replace(",", "")
    repeated = f"mean ± standard deviation over {most} seeds" if most > 1 else "one seed"
    fixed = "; a single seed has no ±" if most > 1 and any(len(one) == 1 for one in held) else ""
    return f"Accuracy in percent, {repeated}{fixed}. {span} queries per task."


def transductive_notes(results: Results) -> list[str]:
    """Which lines no single query could be asked of."""
    rows = dict.fromkeys(line.row.name for line in results.lines if line.transductive)
    which = "are not" if results.setting.skew > 1 else "are, where a test split allows it,"
    return [f"Of all queries together, which {which} of balanced classes: {'; '.join(rows)}."] if rows else []


def incomplete_notes(results: Results, lines: Sequence[Line]) -> list[str]:
    """One note for each way in which lines are incomplete; and the tasks that no line has."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        for part in results.lacking(line):
            groups.setdefault(part, []).append(line)
    notes = [f"{INCOMPLETE} {part}: {_who(group, lines)}." for part, group in groups.items()]
    return [*notes, *([f"No results on {listing(results.absent)}."] if results.absent else [])]


def _who(group: Sequence[Line], lines: Sequence[Line]) -> str:
    """Names of lines; of whole rows where all of their lines are meant."""
    if len(group) > 1 and all(line in group or line.row.seeds == 1 for line in lines):
        return "all rows" + (" but those that no seed can change" if len(group) < len(lines) else "")
    parts = {line.place for line in lines if line not in group}
    return "; ".join(dict.fromkeys(line.name if line.place in parts else line.row.name for line in group))


def time_notes(results: Results) -> list[str]:
    """Where times were measured, with a warning if in several places; and which are not of single fits."""
    by_line = {
        line: [one for task in results.tasks for one in results.records(line, task).values()]
        for line in results.lines
    }
    origins = (one.provenance for records in by_line.values() for one in records)
    parts = ([f"{part} {got}" for part in WHERE if (got := one.get(part)) is not None] for one in origins)
    places = list(dict.fromkeys(map(", ".join, parts)))
    notes = [f"Measured on: {places[0]}."] if places[0] else []
    if len(places) > 1:
        several = f"{len(places)}: {'; '.join(places)}"
        notes = [f"Times from different places cannot be compared; these are from {several}."]
    rows = [line.name for line, held in by_line.items() if any(outcome(one).together > 1 for one in held)]
    if rows:
        notes.append(f"Seconds of equal shares of seeds that were fitted together: {'; '.join(rows)}.")
    return notes


def number_range(values: Iterable[int]) -> str:
    """A whole number, or the least and the most where there are several."""
    distinct = sorted(set(values))
    return "–".join(f"{value:,}" for value in dict.fromkeys((distinct[0], distinct[-1])))
