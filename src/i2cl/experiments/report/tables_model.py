"""What a table is, whatever it is rendered to, and how its numbers are written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from i2cl.experiments.statistics import Accuracy, Difference

INCOMPLETE, OUTSIDE, CONTRADICTED = "†", "‡", "§"
"""Marks of cells that a note explains."""

NOTHING = "–"
"""Stands where there is no result."""

WIDE = 10
"""With more tasks than this, tasks are lines and rows are columns."""

LISTED = 6
"""Names in one note, before "and n more"."""

VALUES = (
    "view",
    "row",
    "task",
    "origin",
    "against",
    "unit",
    "mean",
    "sd",
    "low",
    "high",
    "p",
    "q",
    "seeds",
    "queries",
    "trainable_parameters",
    "cached_values",
    "cached_bytes",
    "fit_seconds",
    "ms_per_query",
    "held_out",
    "lacking",
)
"""Names of the raw numbers of a table, in the order of a file's columns; no table has all of them."""

AVERAGE = "(average)"
"""Stands for the task where a raw number is an average over tasks."""

Values = Mapping[str, str | int | float | None]
"""Raw numbers of one row on one task, by the names in `VALUES`; accuracies in percent."""


@dataclass(frozen=True)
class TableCell:
    """One cell.

    Attributes:
        text: as shown.
        kind: numbers stand to the right.
        bold: only for what can be told from all others.
        note: marks that the table's notes explain, or None.
        printed: whether the paper printed it, as opposed to measured.
    """

    text: str
    kind: Literal["text", "number"] = "number"
    bold: bool = False
    note: str | None = None
    printed: bool = False


@dataclass(frozen=True)
class TableData:
    """One table.

    Attributes:
        title: what it shows.
        columns: their names.
        rows: as many cells each as there are columns.
        notes: lines below.
        values: the raw numbers behind the cells, one line per row and task.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    notes: tuple[str, ...] = ()
    values: tuple[Values, ...] = ()

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column holds numbers alone."""
        return tuple(
            all(row[place].kind == "number" for row in self.rows) for place in range(len(self.columns))
        )

    def transposed(self, corner: str) -> "TableData":
        """Lines and columns changed over.

        Args:
            corner: name of the new first column.
        """
        heads = (row[0].text + (f" {row[0].note}" if row[0].note else "") for row in self.rows)
        lines = (
            (TableCell(name, "text"), *(row[place] for row in self.rows))
            for place, name in enumerate(self.columns)
            if place > 0
        )
        return TableData(self.title, (corner, *heads), tuple(lines), self.notes, self.values)


def percent(found: Accuracy | None) -> str:
    """Mean ± standard deviation; the mean alone where one seed has no spread."""
    if found is None:
        return NOTHING
    spread = f" ± {100 * found.sd:.1f}" if found.seeds > 1 else ""
    return f"{100 * found.mean:.1f}{spread}"


def points(share: float) -> str:
    """A difference in percentage points, with its sign."""
    text = f"{100 * share:+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def interval(found: Accuracy | Difference | None, *, signed: bool = False) -> str:
    """The ends of an interval."""
    if found is None:
        return NOTHING
    return " to ".join(points(end) if signed else f"{100 * end:.1f}" for end in (found.low, found.high))


def probability(value: float) -> str:
    """A p-value to three decimals."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def count_range(values: Iterable[int]) -> str:
    """A whole number, or the least and the most where there are several."""
    found = sorted(set(values))
    return "–".join(f"{value:,}" for value in dict.fromkeys((found[0], found[-1])))


def duration(value: float) -> str:
    """A time to three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def raw(share: float) -> float:
    """A share as the percentage that files hold."""
    return round(100 * share, 8)


def listing(names: Sequence[str]) -> str:
    """Names with commas, cut short where there are many."""
    more = len(names) - LISTED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:LISTED])} and {more} more"
