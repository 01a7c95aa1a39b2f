"""What all tables are made of: the table itself, marks of lines, and what raw numbers say of themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from i2cl.experiments.grid import View
from i2cl.experiments.report.notes import INCOMPLETE, Entry
from i2cl.experiments.report.paper import AVERAGE, Values
from i2cl.experiments.report.results import Line, Results

NOTHING = "–"
"""Stands where there is no result."""

WIDE = 10
"""With more tasks than this, tasks are lines and rows are columns."""


@dataclass(frozen=True)
class Table:
    """One table.
    The first column names the lines; ``words`` are other columns that hold no numbers; ``values`` are the raw
    numbers, one line per row and task.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
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


def mark_of(found: Results, *lines: Line) -> str:
    """A sign that some of these lines are incomplete."""
    return INCOMPLETE if any(map(found.lacking, lines)) else ""


def measured(view: View, found: Results, task: str | None, line: Line, *others: Line) -> Values:
    """What all raw numbers say of themselves."""
    lacking = dict.fromkeys(part for one in (line, *others) for part in found.lacking(one))
    return {
        "view": view,
        "row": line.name,
        "task": AVERAGE if task is None else task,
        "origin": "measured",
        "lacking": "; ".join(lacking) or None,
    }
