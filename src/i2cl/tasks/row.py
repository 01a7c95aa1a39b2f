"""One row of a file, and which of its columns are read."""

from collections.abc import Sequence
from dataclasses import dataclass

from i2cl.errors import did_you_mean
from i2cl.tasks.files import RowError

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Row:
    """Values of one row, and its place: the file and "row 3" (the header is row 1) or "line 3"."""

    place: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Columns:
    """Names of the columns or keys to read: the text, perhaps a label, and ``kept`` ones, passed on as is."""

    text: str = "text"
    label: str | None = None
    kept: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the text first."""
        return (self.text, *(() if self.label is None else (self.label,)), *self.kept)

    def require_once(self, header: Sequence[str], place: str) -> None:
        """Raise RowError if a header names a column twice."""
        for column in self.names:
            if list(header).count(column) > 1:
                raise RowError(f"{place}: the header names column {column!r} twice: rename one of them")

    def require(self, present: Sequence[str], place: str, *, header: bool = False) -> None:
        """Raise RowError if a column is missing. ``header``: the names are those of a header line."""
        kinds = ("text",) if self.label is None else ("text", "label")
        for number, column in enumerate(self.names):
            if column in present:
                continue
            there = f"the columns are {shown(', '.join(present), bare=True) or 'none'}"
            if number >= len(kinds):
                raise RowError(f"no column {column!r} to keep, {there}: correct --keep", place)
            kind = kinds[number]
            hint = did_you_mean(column, present, most=1) or f"say which one holds the {kind}: "
            cure = f"{hint}{kind}_column (--{kind}-column)"
            if header:
                cure += f"; if that is a row and no header, add one: {','.join(self.names)}"
            raise RowError(f"no {kind} column {column!r}, {there}: {cure}", place)


def shown(value: object, *, bare: bool = False) -> str:
    """Return a value for an error message, cut where it is long; ``bare``: without quotes."""
    text = str(value) if bare else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
