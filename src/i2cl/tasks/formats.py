"""Read rows from text lines, CSV, TSV, JSON Lines, JSON, Parquet and Excel files, compressed or not.

Files are read row by row, so memory does not grow with their length, except for JSON, which is one value.
"""

import csv
import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

from i2cl.tasks.binary import excel_rows, parquet_rows
from i2cl.tasks.files import (
    COMPRESSIONS,
    ENCODINGS,
    MAX_PEEK,
    UTF_8,
    WINDOWS,
    ReadAsWarning,
    RowError,
    decoded,
    encoding_of,
    ending_of,
    open_decompressed,
    require_text,
)
from i2cl.tasks.row import Columns, Row, shown
from i2cl.tasks.text import is_blank

# One text per line; rows with named columns; objects, one per line or in one list.
RowFormat = Literal["lines", "csv", "tsv", "jsonl", "json"]
BINARY_FORMATS = {"parquet": "Parquet", "xlsx": "Excel"}  # by file ending; recognized by their first bytes
# Endings of files with columns, perhaps before that of a compression; other files hold one text per line.
ROW_SUFFIXES = tuple(f".{name}" for name in (*get_args(RowFormat)[1:], *BINARY_FORMATS))
# Separators of cells. Which one a spreadsheet writes depends on its country settings.
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
STDIN = "-"
MAX_FIELD = 2**31 - 1
_SEPARATOR = re.compile("sep=([,;\t|])")
_NO_LINES = ("yaml", "yml", "toml", "xml", "html", "htm")


def is_row_file(path: str | Path) -> bool:
    """Return whether a file's ending says that it has rows with columns, such as .csv or .csv.gz."""
    return f".{ending_of(path)}" in ROW_SUFFIXES


def name_of(path: Path) -> str:
    """Return the name of a file without its ending and that of a compression."""
    name = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    return name.stem


def rows_or_errors(
    source: str, columns: Columns, kind: RowFormat | None = None
) -> Generator[Row | RowError, None, None]:
    """Read the rows of a file one at a time, or the errors of those that cannot be read.

    Values are not checked. Parquet, Excel and compressed files are recognized whatever their name.

    Args:
        source: the file; ``-`` is stdin.
        columns: the columns to read.
        kind: format of a text file. Default: by its ending.

    Raises:
        I2CLError: if the file cannot be opened, or a package that reads it is missing.
        RowError: if it has no rows, is in another format than expected, is no text, holds broken CSV or
            JSON, or lacks a column.
    """
    where = "stdin" if source == STDIN else source
    any_row, lines = False, None
    stdin = nullcontext((sys.stdin.buffer, "text"))
    with stdin if source == STDIN else open_decompressed(Path(source)) as (handle, content):
        rows: Iterator[Row | RowError]
        if content == "Parquet":
            rows = parquet_rows(handle, columns, where)
        elif content == "Excel":
            rows = excel_rows(handle, columns, where)
        else:
            lines = _Lines(handle, where, ending_of(source), kind)
            rows = _READERS[lines.kind or "lines"](iter(lines), columns, _Source(where, lines.encoding))
        for row in rows:
            any_row = True
            yield row
    if not any_row:
        problem = "is empty" if lines is not None and not lines.filled else "has no rows"
        raise RowError(f"{where} {problem}: give it at least one row")


class _Lines:
    """Decoded lines of a text file; iterating raises RowError if they look like another format."""

    def __init__(self, handle: Any, where: str, ending: str, kind: RowFormat | None) -> None:
        if kind is None and ending in BINARY_FORMATS:
            what = f"{where} is no {BINARY_FORMATS[ending]} file, in spite of its name"
            raise RowError(f"{what}: save it again, or rename it")
        self.kind = kind or (ending if ending in _READERS else None)
        self.filled = False  # whether a line has content
        self._where, self._ending = where, ending
        rewind = getattr(handle, "seekable", None)
        if where == "stdin" or rewind is None or not rewind():  # the first line decides
            given = iter(handle)
            start = list(islice(given, 1))
            require_text(b"".join(start)[:MAX_PEEK], where)
            self.encoding = encoding_of(start)
            self._content: Iterable[bytes] = chain(start, given)
        else:
            self.encoding = encoding_of(handle)
            handle.seek(0)
            self._content = handle
        if self.encoding == WINDOWS and self.kind in {"jsonl", "json"}:  # which are always UTF-8
            self.encoding = UTF_8

    def __iter__(self) -> Iterator[str]:
        for line in decoded(self._content, self._where, self.encoding):
            if self.kind is None and not self.filled and (self._ending in _NO_LINES or _is_json(line)):
                cure = "name its --input-format, lines to take each line as a text"
                raise RowError(f"{self._where} does not hold plain texts, as it seems: {cure}")
            self.filled = self.filled or not line.isspace()
            yield line


@dataclass(frozen=True)
class _Source:
    """Name of the file, and how its bytes were decoded."""

    name: str
    encoding: str

    def tell(self, delimiter: str = "") -> None:
        """Warn of an unusual encoding or delimiter."""
        parts = [f"as {ENCODINGS[self.encoding]}"] if self.encoding != UTF_8 else []
        parts += [f"with {DELIMITERS[delimiter]} between its cells"] if delimiter else []
        if parts:
            cure = ": save it as UTF-8 if that is wrong" if self.encoding == WINDOWS else ""
            warnings.warn(f"{self.name} is read {' '.join(parts)}{cure}", ReadAsWarning, stacklevel=2)


def _is_json(line: str) -> bool:
    """Return whether a file that begins with this line seems to be JSON or JSON Lines."""
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
    columns.require_once(header, where)
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
    records = _records(_parsed(content, source.name, cure), columns, source.name)
    for number, record in enumerate(records, start=1):
        yield _object_row(f"{source.name} item {number}", columns, record)


def _records(value: Any, columns: Columns, where: str) -> list[Any]:
    """Return the rows of a JSON file as a list of objects.

    Takes such a list, what `pandas.DataFrame.to_json` writes in any ``orient`` but "values", and an object of
    one list per column. Raises RowError for anything else.
    """
    if isinstance(value, list):
        return value
    cure = "write a list of objects, as pandas does with orient='records'"
    if not isinstance(value, dict):
        raise RowError(f"{where}: holds a JSON {type(value).__name__}: {cure}")
    if (key := repeated_key(value)) is not None:
        raise RowError(f"{where}: the key {key!r} is given twice: remove one")
    parts = list(value.values())
    if isinstance(value.get("data"), list) and "columns" in value:  # orient="split"
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    if isinstance(value.get("data"), list) and "schema" in value:  # orient="table"
        return list(value["data"])
    if parts and all(isinstance(part, dict) for part in parts):
        if columns.text in parts[0] and columns.text not in value:  # orient="index"
            return parts
        rows = {key: None for part in parts for key in part}  # orient="columns", the default
        return [{name: column.get(key) for name, column in value.items()} for key in rows]
    if (
        columns.text in value
        and all(isinstance(part, list) for part in parts)
        and len(set(map(len, parts))) == 1
    ):
        return [dict(zip(value, row, strict=True)) for row in zip(*parts, strict=True)]
    raise RowError(f"{where}: holds a JSON dict: {cure}")


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
