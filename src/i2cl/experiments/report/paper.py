"""The paper's numbers beside measured ones, and what a table must say of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from i2cl.experiments.report.layout import AVERAGE, OUTSIDE, Entry, Values
from i2cl.experiments.report.printed import PrintedRow, PrintedTable
from i2cl.experiments.report.results import Line, Results, listing
from i2cl.experiments.statistics import Accuracy
from i2cl.tasks.loaders import PAPER_TASKS

HALF_DIGIT = 0.005  # printed numbers have two decimals: so far from an interval they may still be inside
PrintedFor = Callable[[str, str], PrintedTable | None]
"""Finds the paper's table by name and model, like `i2cl.experiments.report.printed.printed_for`."""


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

    @property
    def averages(self) -> bool:
        """Whether the paper prints an average of any row of ours."""
        return any(row is not None and row.average is not None for row in map(self.row, self.results.lines))

    def cell(self, line: Line, task: str | None) -> Entry:
        """What the paper prints for a row on a task, or without one on average; empty if nothing."""
        row = self.row(line)
        if task is None and row is not None and row.average is not None:
            same_tasks = set(self.results.tasks_of(line)) == set(self.tasks)
            mark = _outside(row.average, self.results.accuracy(line)) if same_tasks else ""
            return Entry(f"{row.average:.2f}", printed=True, mark=mark)
        if self.table is not None and row is not None and row.mean and task in self.table.tasks:
            place = self.table.tasks.index(task)
            spread = f" ± {row.sd[place]:.2f}" if row.sd else ""
            mark = _outside(row.mean[place], self.results.accuracy(line, task))
            return Entry(f"{row.mean[place]:.2f}{spread}", printed=True, mark=mark)
        return Entry("", printed=True)

    def values(self, line: Line, view: str) -> list[Values]:
        """The raw numbers that the paper prints for a row."""
        row = self.row(line)
        if self.table is None or row is None:
            return []
        common = {"view": view, "row": line.name, "origin": "paper", "unit": "percent"}
        spreads = row.sd or (None,) * len(row.mean)
        tasks = self.table.tasks if view == "tasks" else ()
        each = zip(tasks, row.mean, spreads, strict=False)
        printed: list[Values] = [{**common, "task": task, "mean": mean, "sd": sd} for task, mean, sd in each]
        average = {**common, "task": AVERAGE, "mean": row.average}
        return printed if row.average is None else [*printed, average]

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


def _outside(printed: float, ours: Accuracy | None) -> str:
    inside = ours is None or 100 * ours.low - HALF_DIGIT <= printed <= 100 * ours.high + HALF_DIGIT
    return "" if inside else OUTSIDE
