"""Compare measured numbers with the paper's."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from i2cl.experiments.report.layout import AVERAGE, OUTSIDE, Entry, Values
from i2cl.experiments.report.printed import PrintedRow, PrintedTable
from i2cl.experiments.report.results import Line, Results, listing
from i2cl.tasks.loaders import PAPER_TASKS

ROUNDING_ERROR = 0.005  # of the paper's numbers, which have two decimals


@dataclass(frozen=True, eq=False)
class Paper:
    """The paper's numbers for an experiment; ``table`` is None if it has none for this model."""

    results: Results
    table: PrintedTable | None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that the paper averages over: those of the table, or all nine if it prints none."""
        return (self.table.tasks if self.table else ()) or PAPER_TASKS

    def row(self, line: Line) -> PrintedRow | None:
        """Return the paper's row with the name of a line, or None for one number of shots or one source."""
        whole = line.shots is None and line.source is None
        return self.table.rows.get(line.row.name) if self.table is not None and whole else None

    def numbers(self, line: Line) -> dict[str | None, tuple[float, float | None]]:
        """Return the paper's mean and standard deviation of a row by task; the key None is the average."""
        row = self.row(line)
        if self.table is None or row is None:
            return {}
        sds = (*(row.sd or [None] * len(row.mean)), None)
        columns = zip((*self.table.tasks, None), (*row.mean, row.average), sds, strict=True)
        return {task: (mean, sd) for task, mean, sd in columns if mean is not None}

    @property
    def averages(self) -> bool:
        """Whether the paper prints an average for any row with results."""
        return any(None in self.numbers(line) for line in self.results.lines)

    def cell(self, line: Line, task: str | None) -> Entry:
        """Format the paper's number for a row on a task (None: on average); empty if it prints none."""
        mean, sd = self.numbers(line).get(task, (None, None))
        if mean is None:
            return Entry("", printed=True)
        plus_minus = "" if sd is None else f" ± {sd:.2f}"
        comparable = task is not None or set(self.results.tasks_of(line)) == set(self.tasks)
        ours = self.results.accuracy(line, task) if comparable else None
        inside = ours is None or 100 * ours.low - ROUNDING_ERROR <= mean <= 100 * ours.high + ROUNDING_ERROR
        return Entry(f"{mean:.2f}{plus_minus}", printed=True, mark="" if inside else OUTSIDE)

    def values(self, line: Line, view: str) -> list[Values]:
        """Return the paper's numbers for a row as CSV columns."""
        common = {"view": view, "row": line.name, "origin": "paper", "unit": "percent"}
        return [
            {**common, "task": AVERAGE if task is None else task, "mean": mean, "sd": sd}
            for task, (mean, sd) in self.numbers(line).items()
            if task is None or view == "tasks"
        ]

    def notes(self, rows: Iterable[Sequence[Entry]], *, averaged: bool) -> list[str]:
        """Return the notes that explain the paper's numbers in a table."""
        if self.table is None:
            return []
        marks = {sign for row in rows for cell in row for sign in cell.mark}
        ours = {line.row.name for line in self.results.lines if self.row(line)}
        notes = [f"(paper): as printed in {self.table.paper}, {self.table.model}."] if ours else []
        if others := [name for name in self.table.rows if name not in ours]:
            notes.append(f"Rows of {self.table.paper.split(':')[0]} without results here: {listing(others)}.")
        if OUTSIDE in marks:
            notes.append(
                f"{OUTSIDE} The paper's number is outside our 95 % interval (its own uncertainty is ignored)."
            )
        if averaged and self.averages and set(self.results.tasks) != set(self.tasks):
            notes.append(
                f"Averages are over {len(self.results.tasks)} tasks here and {len(self.tasks)} in the paper, "
                "so they are not compared."
            )
        return notes
