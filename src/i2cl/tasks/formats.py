"""How rows are written: lines, CSV, TSV, JSON Lines and JSON, read row by row as programs write them.

Files of any length take the same memory, JSON aside, which is one value.
"""

import csv
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

from i2cl.errors import did_you_mean
from i2cl.tasks.files import ENCODINGS, UTF_8, WINDOWS, ReadAsWarning, RowError, decoded, encoding_of, opened
from i2cl.tasks.text import is_blank

# One text a line; rows with named columns; objects, one a line or in one list.
RowFormat = Literal["lines", "csv", "tsv", "jsonl", "json"]
# Endings of files with columns; any other file holds one text a line.
ROW_SUFFIXES = tuple(f".{name}" for name in get_args(RowFormat)[1:])
# What may stand between cells: which one it is depends on the country that a spreadsheet is set to.
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
STDIN = "-"
MAX_FIELD = 2**31 - 1
_SHOWN = 60
_SEPARATOR = re.compile("sep=([,;\t|])")
_NO_LINES = ("yaml", "yml", "toml", "xml", "html", "htm")


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the file has it, and its place: the file and "row 3" (the header is 1) or "line 3"."""

    place: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Columns:
    """Which columns or keys are read: the text, perhaps a label, and ``kept`` ones, passed on as they are."""

    text: str = "text"
    label: str | None = None
    kept: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are read, the text first."""
        return (self.text, *(() if self.label is None else (self.label,)), *self.kept)

    def require(self, present: Sequence[str], place: str, *, header: bool = False) -> None:
        """Raise RowError if one is not among those that are present, which a header may have named."""
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


def rows_or_errors(
    source: str, columns: Columns, kind: RowFormat | None = None
) -> Generator[Row | RowError, None, None]:
    """Rows of a file, or of stdin for ``-``, one at a time, their values unchecked; or the errors of such.
    Without a kind, the file's ending says how rows are written. Raises I2CLError if the file cannot be
    opened, and RowError on one without rows, lines that look like another format, bytes that are no text,
    broken CSV or JSON, a column that is not there.
    """
    ending = Path(source).suffix.lower().removeprefix(".")
    known = kind or (ending if ending in _READERS else None)
    read = _READERS[known or "lines"]
    where = "stdin" if source == STDIN else source
    filled = any_row = False

    def lines(handle: Iterable[bytes], encoding: str) -> Iterator[str]:
        nonlocal filled
        for line in decoded(handle, where, encoding):
            if known is None and not filled and (ending in _NO_LINES or _is_json(line)):
                cure = "name its --input-format, lines to take each line as a text"
                raise RowError(f"{where} does not hold plain texts, as it seems: {cure}")
            filled = filled or not line.isspace()
            yield line

    with nullcontext(sys.stdin.buffer) if source == STDIN else opened(Path(source)) as handle:
        content: Iterable[bytes] = handle
        if source == STDIN or not handle.seekable():  # what cannot be read twice tells by its first line
            given = iter(handle)
            start = list(islice(given, 1))
            encoding, content = encoding_of(start), chain(start, given)
        else:
            encoding = encoding_of(handle)
            handle.seek(0)
        if encoding == WINDOWS and known in {"jsonl", "json"}:  # which are always UTF-8
            encoding = UTF_8
        for row in read(lines(content, encoding), columns, _Source(where, encoding)):
            any_row = True
            yield row
    if not any_row:
        raise RowError(f"{where} {'has no rows' if filled else 'is empty'}: give it at least one row")


@dataclass(frozen=True)
class _Source:
    """What is read: its name, and how its bytes were decoded."""

    name: str
    encoding: str

    def tell(self, delimiter: str = "") -> None:
        """Warn of what was not what everybody expects; ``delimiter`` if that is it."""
        parts = [f"as {ENCODINGS[self.encoding]}"] if self.encoding != UTF_8 else []
        parts += [f"with {DELIMITERS[delimiter]} between its cells"] if delimiter else []
        if parts:
            cure = ": save it as UTF-8 if that is wrong" if self.encoding == WINDOWS else ""
            warnings.warn(f"{self.name} is read {' '.join(parts)}{cure}", ReadAsWarning, stacklevel=2)


def _is_json(line: str) -> bool:
    """Whether a file's first line is one that JSON, an object a line or a list of them, begins with."""
    text = line.strip()
    if text == "[" or text.startswith('[{"'):
        return True
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _plain_rows(lines: Iterator[str], columns: Columns, source: _Source) -> Iterator[Row]:
    columns.require((columns.text,), source.name)
    source.tell()
    blank: list[Row] = []  # at the end of a file they are no rows
    for number, line in enumerate(lines, start=1):
        row = Row(f"{source.name} line {number}", (line.rstrip("\r\n"),) * len(columns.names))
        if is_blank(line):
            blank.append(row)
            continue
        yield from blank
        blank.clear()
        yield row


def _csv_rows(
    lines: Iterator[str], columns: Columns, source: _Source, usual: str = ","
) -> Iterator[Row | RowError]:
    # Lines may end in a bare carriage return too, as StringIO has it.
    pieces = (piece for line in lines for piece in io.StringIO(line, newline=""))
    start = list(_to_filled(pieces))
    named = _SEPARATOR.fullmatch(start[-1].strip(" \r\n")) if start else None
    before = len(start) if named else 0
    if named:  # Excel reads it and drops it
        start = list(_to_filled(pieces))
    delimiter = named[1] if named else _delimiter(start[-1] if start else "", columns, usual)
    source.tell("" if delimiter == usual else delimiter)
    # strict: otherwise a quotation mark that is never closed silently swallows the rest of the file.
    records = csv.reader(chain(start, pieces), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = before
    try:
        for number, cells in enumerate(_long_fields(records), start=before + 1):
            place = f"{source.name} row {number}"
            if not cells or (header is None and not "".join(cells).strip()):
                continue
            if header is None:
                header = [name.strip() for name in cells]
                positions = _positions(header, columns, source.name)
            elif len(cells) != len(header):
                more = len(cells) > len(header)
                cure = "quote a cell that holds the delimiter" if more else "complete the row"
                yield RowError(f"{len(cells)} cells but the header has {len(header)}: {cure}", place)
            else:
                yield Row(place, tuple(cells[position] for position in positions))
    except csv.Error as error:
        cure = "put the cell in quotation marks and double those inside it"
        raise RowError(f"{source.name} row {number + 1}: {error}: {cure}") from error


def _to_filled(pieces: Iterator[str]) -> Iterator[str]:
    for piece in pieces:
        yield piece
        if piece.strip():
            return


def _delimiter(line: str, columns: Columns, usual: str) -> str:
    """What stands between the cells of a header: that under which the columns are there, or most cells are.
    Texts do not count, as they do for `csv.Sniffer`: they hold commas of their own.
    """

    def fits(delimiter: str) -> tuple[bool, int]:
        cells = next(_long_fields(csv.reader([line], delimiter=delimiter)), [])
        return {name.strip() for name in cells} >= set(columns.names), len(cells)

    return max((usual, *DELIMITERS), key=fits)  # of equals the first


def _long_fields(records: Iterator[list[str]]) -> Iterator[list[str]]:
    # The limit belongs to the csv module as a whole: put it back after every row, others read in between.
    while True:
        before = csv.field_size_limit(MAX_FIELD)
        try:
            cells = next(records, None)
        finally:
            csv.field_size_limit(before)
        if cells is None:
            return
        yield cells


def _positions(header: list[str], columns: Columns, where: str) -> list[int]:
    for column in columns.names:
        if header.count(column) > 1:
            raise RowError(f"{where}: the header names column {column!r} twice: rename one of them")
    columns.require(header, where, header=True)
    return [header.index(column) for column in columns.names]


def _jsonl_rows(lines: Iterator[str], columns: Columns, source: _Source) -> Iterator[Row | RowError]:
    source.tell()
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            yield _object_row(f"{source.name} line {number}", columns, line, parse=True)


def _json_rows(lines: Iterator[str], columns: Columns, source: _Source) -> Iterator[Row | RowError]:
    source.tell()
    content = "".join(lines)
    if not content.strip():
        return
    cure = "correct it, or name the file .jsonl if it has one object per line"
    records = _parsed(content, source.name, cure)
    if not isinstance(records, list):
        raise RowError(f"{source.name}: holds a JSON {type(records).__name__}: write a list of objects")
    for number, record in enumerate(records, start=1):
        yield _object_row(f"{source.name} item {number}", columns, record)


def _object_row(place: str, columns: Columns, record: Any, *, parse: bool = False) -> Row | RowError:
    try:
        record = _parsed(record, place, "correct that line") if parse else record
        if not isinstance(record, dict):
            names = ", ".join(map(repr, columns.names))
            return RowError(f"{shown(record)} is not an object: write one with {names}", place)
        if (key := repeated_key(record)) is not None:
            return RowError(f"the key {key!r} is given twice: remove one", place)
        columns.require(list(record), place)
    except RowError as error:
        return error
    return Row(place, tuple(record[column] for column in columns.names))


def _parsed(content: str, place: str, cure: str) -> Any:
    try:
        return load_json(content)
    except (ValueError, RecursionError) as error:
        raise RowError(f"bad JSON ({error}): {cure}", place) from error


class _RepeatedKey(dict[str, Any]):
    """A JSON object in which ``key`` is given more than once; `json` alone would keep the last silently."""

    key: str


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    keys = [key for key, _ in pairs]
    repeated = _RepeatedKey(record)
    repeated.key = next(key for place, key in enumerate(keys) if key in keys[:place])
    return repeated


def load_json(content: str | bytes) -> Any:
    """Parse JSON so that `repeated_key` can tell objects with repeated keys. Raises ValueError as `json`."""
    return json.loads(content, object_pairs_hook=_json_object)


def repeated_key(value: Any) -> str | None:
    """Return a key that is given twice in an object of `load_json`, or in one inside it; None without."""
    if isinstance(value, _RepeatedKey):
        return value.key
    if not isinstance(value, dict | list):
        return None
    parts = value.values() if isinstance(value, dict) else value
    return next((key for key in map(repeated_key, parts) if key is not None), None)


_READERS: dict[str, Callable[[Iterator[str], Columns, _Source], Iterator[Row | RowError]]] = {
    "lines": _plain_rows,
    "csv": _csv_rows,
    "tsv": partial(_csv_rows, usual="\t"),
    "jsonl": _jsonl_rows,
    "json": _json_rows,
}


def shown(value: object, *, bare: bool = False) -> str:
    """A value in an error, cut where it is long; ``bare`` without quotes."""
    text = str(value) if bare else repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
