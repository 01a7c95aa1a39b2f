"""One row of a file, and the columns to read from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from i2cl.errors import did_you_mean
from i2cl.tasks.files import RowError

_MAX_PREVIEW_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file.

    Attributes:
        place: file and row for error messages, such as "a.csv row 3" (the header is row 1) or "a.txt line 3".
        values: cells in the order of `Columns.names`.
    """

    place: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Columns:
    """Names of the columns or JSON keys to read.

    Attributes:
        text: column of the texts.
        label: column of the labels; None for unlabelled texts.
        kept: further columns, passed through unchanged.
    """

    text: str = "text"
    label: str | None = None
    kept: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of `Row.values`: text, label, kept columns."""
        return (self.text, *(() if self.label is None else (self.label,)), *self.kept)

    def positions(self, header: Sequence[str], place: str) -> list[int]:
        """Return the index of each column in a header. Raises RowError if one is missing or repeated."""
        for column in self.names:
            if list(header).count(column) > 1:
                raise RowError(f"{place}: the header names column {column!r} twice: rename one of them")
        self.require(header, place, header=True)
        return [header.index(column) for column in self.names]

    def require(self, present: Sequence[str], place: str, *, header: bool = False) -> None:
        """Raise RowError if a column is missing. ``header``: the names come from a header line."""
        kinds = ("text",) if self.label is None else ("text", "label")
        for index, column in enumerate(self.names):
            if column in present:
                continue
            available = f"the columns are {preview(', '.join(present), quote=False) or 'none'}"
            if index >= len(kinds):
                raise RowError(f"no column {column!r} to keep, {available}: correct --keep", place)
            kind = kinds[index]
            # The server recognizes "say which one holds" and replaces the advice by its own parameter names.
            hint = did_you_mean(column, present, limit=1) or f"say which one holds the {kind}: "
            advice = f"{hint}{kind}_column (--{kind}-column)"
            if header:
                advice += f"; if the file has no header, add one: {','.join(self.names)}"
            raise RowError(f"no {kind} column {column!r}, {available}: {advice}", place)


def preview(value: object, *, quote: bool = True) -> str:
    """Return a value for an error message, truncated if it is long."""
    text = repr(value) if quote else str(value)
    return text if len(text) <= _MAX_PREVIEW_CHARACTERS else text[:_MAX_PREVIEW_CHARACTERS] + "..."
