"""The paper's numbers beside measured ones, and what a table must say of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from i2cl.experiments.report.layout import AVERAGE, OUTSIDE, Entry, Values
from i2cl.experiments.report.printed import PrintedRow, PrintedTable
from i2cl.experiments.report.results import Line, Results, listing
from i2cl.tasks.loaders import PAPER_TASKS

HALF_DIGIT = 0.005  # printed numbers have two decimals: so far from an interval they may still be inside


@dataclass(frozen=True, eq=False)
class Paper:
    """What the paper prints for an experiment."""

    results: Results
    table: PrintedTable | None

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the paper averages over: where it prints no tasks, all nine."""
        return (self.table.tasks if self.table else ()) or PAPER_TASKS

    def row(self, line: Line) -> PrintedRow | None:
        """The paper's row of that name, beside which only a whole row of ours can stand."""
        whole = line.shots is None and line.source is None
        return self.table.rows.get(line.row.name) if self.table is not None and whole else None

    def numbers(self, line: Line) -> dict[str | None, tuple[float, float | None]]:
        """Means that the paper prints for a row, with deviations: on each task, and on average for None."""
        row = self.row(line)
        if self.table is None or row is None:
            return {}
        spreads = (*(row.sd or [None] * len(row.mean)), None)
        each = zip((*self.table.tasks, None), (*row.mean, row.average), spreads, strict=True)
        return {task: (mean, sd) for task, mean, sd in each if mean is not None}

    @property
    def averages(self) -> bool:
        """Whether the paper prints an average of any row of ours."""
        return any(None in self.numbers(line) for line in self.results.lines)

    def cell(self, line: Line, task: str | None) -> Entry:
        """What the paper prints for a row on a task, or without one on average; empty if nothing."""
        mean, sd = self.numbers(line).get(task, (None, None))
        if mean is None:
            return Entry("", printed=True)
        spread = "" if sd is None else f" ± {sd:.2f}"
        comparable = task is not None or set(self.results.tasks_of(line)) == set(self.tasks)
        ours = self.results.accuracy(line, task) if comparable else None
        inside = ours is None or 100 * ours.low - HALF_DIGIT <= mean <= 100 * ours.high + HALF_DIGIT
        return Entry(f"{mean:.2f}{spread}", printed=True, mark="" if inside else OUTSIDE)

    def values(self, line: Line, view: str) -> list[Values]:
        """The raw numbers that the paper prints for a row."""
        common = {"view": view, "row": line.name, "origin": "paper", "unit": "percent"}
        return [
            {**common, "task": AVERAGE if task is None else task, "mean": mean, "sd": sd}
            for task, (mean, sd) in self.numbers(line).items()
            if task is None or view == "tasks"
        ]

    def notes(self, rows: Iterable[Sequence[Entry]], *, averaged: bool) -> list[str]:
        """What a reader must know of the printed numbers."""
        if self.table is None:
            return []
        marks = {sign for row in rows for cell in row for sign in cell.mark}
        ours = {line.row.name for line in self.results.lines if self.row(line)}
        said = [f"(paper): as printed in {self.table.paper}, {self.table.model}."] if ours else []
        if others := [name for name in self.table.rows if name not in ours]:
            said.append(f"Rows of {self.table.paper.split(':')[0]} without results here: {listing(others)}.")
        if OUTSIDE in marks:
            said.append(
                f"{OUTSIDE} Printed, and outside our 95 % interval (the paper's own spread not counted)."
            )
        if averaged and self.averages and set(self.results.tasks) != set(self.tasks):
            said.append(
                f"Averages are over other tasks than the paper's: {len(self.results.tasks)} here, "
                f"{len(self.tasks)} there. They are not compared."
            )
        return said
