"""What tables say below their lines, and the paper's numbers beside measured ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from i2cl.experiments.printed import InconsistentAverage, PrintedRow, PrintedTable, inconsistent_averages
from i2cl.experiments.report.tables_lines import Comparisons, Line
from i2cl.experiments.report.tables_model import (
    AVERAGE,
    CONTRADICTED,
    INCOMPLETE,
    OUTSIDE,
    TableCell,
    Values,
    listing,
)
from i2cl.experiments.statistics import Accuracy
from i2cl.tasks.registry import PAPER_TASKS

HALF_DIGIT = 0.005
"""Printed numbers have two decimals: so far from an end of an interval they may still be inside."""


@dataclass
class Paper:
    """The paper's numbers for one table of ours; collects the marks that it gave.

    Attributes:
        found: of our results.
        marks: given so far.
        rows: names of ours that the paper prints.
    """

    found: Comparisons
    marks: set[str] = field(default_factory=set)

    @property
    def table(self) -> PrintedTable | None:
        """The paper's table."""
        return self.found.printed

    @property
    def tasks(self) -> tuple[str, ...]:
        """What the paper averages over: where it prints no tasks, all nine."""
        return (self.table.tasks if self.table else ()) or PAPER_TASKS

    def row(self, line: Line) -> PrintedRow | None:
        """The paper's row of that name."""
        return self.table.rows.get(line.row.name) if self.table is not None and line.whole else None

    def contradicted(self, line: Line) -> InconsistentAverage | None:
        """What is wrong with the printed average of a row, if anything is."""
        return next((one for one in self._contradictions() if one.row == line.row.name and line.whole), None)

    def _contradictions(self) -> list[InconsistentAverage]:
        return [one for one in inconsistent_averages() if self.table is not None and one.table == self.table]

    def task_cell(self, line: Line, task: str) -> TableCell:
        """What the paper prints for a row on a task."""
        row = self.row(line)
        if self.table is None or row is None or not row.mean or task not in self.table.tasks:
            return TableCell("", printed=True)
        place = self.table.tasks.index(task)
        spread = f" ± {row.sd[place]:.2f}" if row.sd else ""
        mark = self._outside(row.mean[place], self.found.accuracy(line, task))
        return TableCell(f"{row.mean[place]:.2f}{spread}", note=mark or None, printed=True)

    def average_cell(self, line: Line) -> TableCell:
        """The average that the paper prints for a row."""
        row = self.row(line)
        if row is None or row.average is None:
            return TableCell("", printed=True)
        alike = set(self.found.tasks_of(line)) == set(self.tasks)
        mark = self._outside(row.average, self.found.accuracy(line)) if alike else ""
        mark += CONTRADICTED if self.contradicted(line) else ""
        self.marks |= set(mark)
        return TableCell(f"{row.average:.2f}", note=mark or None, printed=True)

    def _outside(self, printed: float, ours: Accuracy | None) -> str:
        inside = ours is None or 100 * ours.low - HALF_DIGIT <= printed <= 100 * ours.high + HALF_DIGIT
        self.marks |= set("" if inside else OUTSIDE)
        return "" if inside else OUTSIDE

    def values(self, line: Line, view: str) -> list[Values]:
        """The raw numbers that the paper prints for a row."""
        row = self.row(line)
        if self.table is None or row is None:
            return []
        common = {"view": view, "row": line.name, "origin": "paper", "unit": "percent"}
        spreads = row.sd or (None,) * len(row.mean)
        tasks = self.table.tasks if view == "tasks" else ()
        found: list[Values] = [
            {**common, "task": task, "mean": mean, "sd": sd}
            for task, mean, sd in zip(tasks, row.mean, spreads, strict=False)
        ]
        if row.average is not None:
            found.append({**common, "task": AVERAGE, "mean": row.average})
        return found

    def notes(self, *, averaged: bool) -> list[str]:
        """What a reader must know of the printed numbers.

        Args:
            averaged: whether the table shows averages.
        """
        if self.table is None:
            return []
        ours = [line for line in self.found.lines if self.row(line)]
        names = {line.row.name for line in ours}
        others = [name for name in self.table.rows if name not in names]
        said = [f"(paper): as printed in {self.table.paper}, {self.table.model}."] if ours else []
        if others:
            said.append(f"Rows of {self.table.paper.split(':')[0]} without results here: {listing(others)}.")
        if OUTSIDE in self.marks:
            said.append(
                f"{OUTSIDE} Printed, and outside our 95 % interval (the paper's own spread not counted)."
            )
        if CONTRADICTED in self.marks:
            wrong = (one for one in map(self.contradicted, ours) if one)
            said += [
                f"{CONTRADICTED} {one.row}: the printed average {one.printed:.2f} is not the mean "
                f"of the row's printed accuracies, {one.recomputed:.2f}."
                for one in wrong
            ]
        averages = any(row is not None and row.average is not None for row in map(self.row, ours))
        if averaged and averages and set(self.found.tasks) != set(self.tasks):
            said.append(
                f"Averages are over other tasks than the paper's: {len(self.found.tasks)} here, "
                f"{len(self.tasks)} there. They are not compared."
            )
        return said


def incomplete_notes(found: Comparisons, lines: Sequence[Line]) -> list[str]:
    """One note for each way in which lines are incomplete; and the tasks that no line has."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        for part in found.lacking(line):
            groups.setdefault(part, []).append(line)
    said = [f"{INCOMPLETE} {part}: {_who(group, lines)}." for part, group in groups.items()]
    absent = [task for task in found.wanted_tasks() if task not in found.tasks]
    return [*said, *([f"No results on {listing(absent)}."] if absent else [])]


def _who(group: Sequence[Line], lines: Sequence[Line]) -> str:
    """Names of lines; of whole rows where all of their lines are meant."""
    if len(group) > 1 and all(line in group or line.row.seeds == 1 for line in lines):
        return "all rows" + (" but those that no seed can change" if len(group) < len(lines) else "")
    names: dict[str, None] = {}
    for line in group:
        whole = all(other in group for other in lines if other.place == line.place)
        names[line.row.name if whole else line.name] = None
    return "; ".join(names)


def scale_note(found: Comparisons, lines: Sequence[Line]) -> str:
    """What accuracies are made of."""
    sizes = [found.sizes(line, task) for line in lines for task in found.tasks_of(line)]
    most = max(seeds for seeds, _ in sizes)
    queries = sorted({queries for _, queries in sizes})
    span = "–".join(str(end) for end in dict.fromkeys((queries[0], queries[-1])))
    repeated = f"mean ± standard deviation over {most} seeds" if most > 1 else "one seed"
    fixed = "; a single seed has no ±" if most > 1 and any(seeds == 1 for seeds, _ in sizes) else ""
    return f"Accuracy in percent, {repeated}{fixed}. {span} queries per task."


def bold_note(found: Comparisons, rows: Iterable[Sequence[TableCell]]) -> list[str]:
    """What bold means, or why nothing is."""
    if len(found.lines) < 2:
        return []
    if not any(cell.bold for row in rows for cell in row):
        return ["Nothing is bold: nowhere can the best row be told from every other."]
    tests = "paired tests, Holm-corrected over the other rows, and 95 % intervals that exclude 0"
    return [f"Bold: the best, where it can be told from every other row ({tests})."]
