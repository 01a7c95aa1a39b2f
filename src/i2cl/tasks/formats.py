"""Read rows from text lines, CSV, TSV, JSON Lines, JSON, Parquet and Excel files, compressed or not.

Files are streamed, so memory use does not grow with their length (except for JSON, which is parsed as a
whole).

pandas is deliberately not used: importing it takes longer than all other checks of a command together; it
reports only the first malformed row, without a line number for most formats; and it silently fills short
rows, reads the first cell of long rows as an index, renames repeated columns and keeps the last of repeated
JSON keys.
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
    decode_lines,
    detect_encoding,
    format_suffix,
    open_decompressed,
    require_text,
)
from i2cl.tasks.row import Columns, Row, preview
from i2cl.tasks.text import is_blank

RowFormat = Literal["lines", "csv", "tsv", "jsonl", "json"]
BINARY_FORMATS = {"parquet": "Parquet", "xlsx": "Excel"}  # by file suffix; detected by their first bytes
# Suffixes of files with columns, possibly followed by a compression suffix. Other files have one text per
# line.
ROW_SUFFIXES = tuple(f".{name}" for name in (*get_args(RowFormat)[1:], *BINARY_FORMATS))
# Cell delimiters: which one a spreadsheet program writes depends on its locale.
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
STDIN = "-"
MAX_CELL_CHARACTERS = 2**31 - 1
_SEPARATOR_LINE = re.compile("sep=([,;\t|])")
_MARKUP_SUFFIXES = ("yaml", "yml", "toml", "xml", "html", "htm")  # never read as plain lines by default


def is_row_file(path: str | Path) -> bool:
    """Return whether a file has the suffix of a format with columns, such as .csv or .csv.gz."""
    return f".{format_suffix(path)}" in ROW_SUFFIXES


def name_of(path: Path) -> str:
    """Return the name of a file without its suffix and the suffix of a compression."""
    name = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    return name.stem


def rows_or_errors(
    source: str, columns: Columns, kind: RowFormat | None = None
) -> Generator[Row | RowError, None, None]:
    """Yield the rows of a file one at a time, and an error for each row that cannot be read.

    Values are not checked. Parquet, Excel and compressed files are detected by their content.

    Args:
        source: path of the file; ``-`` for stdin.
        columns: the columns to read.
        kind: format of a text file. Default: by its suffix.

    Raises:
        I2CLError: if the file cannot be opened, or a package that reads it is missing.
        RowError: if the file has no rows, is in another format than expected, contains malformed CSV or JSON,
            or has no such column.
    """
    name = "stdin" if source == STDIN else source
    any_row, lines = False, None
    stdin = nullcontext((sys.stdin.buffer, "text"))
    with stdin if source == STDIN else open_decompressed(Path(source)) as (handle, content):
        rows: Iterator[Row | RowError]
        if content == "Parquet":
            rows = parquet_rows(handle, columns, name)
        elif content == "Excel":
            rows = excel_rows(handle, columns, name)
        else:
            lines = _Lines(handle, name, format_suffix(source), kind)
            rows = _READERS[lines.kind or "lines"](iter(lines), columns, _Source(name, lines.encoding))
        for row in rows:
            any_row = True
            yield row
    if not any_row:
        problem = "is empty" if lines is not None and not lines.has_content else "has no rows"
        raise RowError(f"{name} {problem}: give it at least one row")


class _Lines:
    """Decoded lines of a text file. Iterating raises RowError if they seem to be in an unexpected format.

    Attributes:
        kind: format of the file; None if neither an option nor the suffix determines it.
        encoding: one of `ENCODINGS`.
        has_content: whether a line with visible content has been read.
    """

    def __init__(self, handle: Any, name: str, suffix: str, kind: RowFormat | None) -> None:
        if kind is None and suffix in BINARY_FORMATS:
            raise RowError(
                f"{name} is not a valid {BINARY_FORMATS[suffix]} file: save it again, or correct its suffix"
            )
        self.kind = kind or (suffix if suffix in _READERS else None)
        self.has_content = False
        self._name, self._suffix = name, suffix
        seekable = getattr(handle, "seekable", None)
        if name == "stdin" or seekable is None or not seekable():
            # The input cannot be read twice, so the first line has to determine the encoding.
            stream = iter(handle)
            start = list(islice(stream, 1))
            require_text(b"".join(start)[:MAX_PEEK], name)
            self.encoding = detect_encoding(start)
            self._content: Iterable[bytes] = chain(start, stream)
        else:
            self.encoding = detect_encoding(handle)
            handle.seek(0)
            self._content = handle
        if self.encoding == WINDOWS and self.kind in {"jsonl", "json"}:  # JSON is always UTF-8
            self.encoding = UTF_8

    def __iter__(self) -> Iterator[str]:
        for line in decode_lines(self._content, self._name, self.encoding):
            is_first = self.kind is None and not self.has_content
            if is_first and (self._suffix in _MARKUP_SUFFIXES or _is_json(line)):
                raise RowError(
                    f"{self._name} does not look like plain texts: name its --input-format (lines: one "
                    "text per line)"
                )
            self.has_content = self.has_content or not line.isspace()
            yield line


@dataclass(frozen=True)
class _Source:
    """Name of a file, and the encoding that it is read in."""

    name: str
    encoding: str

    def warn_of_assumptions(self, delimiter: str = "") -> None:
        """Warn if the encoding is not UTF-8 or an unusual delimiter was detected (empty: as usual)."""
        parts = [f"as {ENCODINGS[self.encoding]}"] if self.encoding != UTF_8 else []
        parts += [f"with {DELIMITERS[delimiter]} between its cells"] if delimiter else []
        if parts:
            hint = ": save it as UTF-8 if that is wrong" if self.encoding == WINDOWS else ""
            warnings.warn(f"{self.name} is read {' '.join(parts)}{hint}", ReadAsWarning, stacklevel=2)


def _is_json(line: str) -> bool:
    """Return whether the first line of a file looks like JSON or JSON Lines."""
    text = line.strip()
    if text == "[" or text.startswith('[{"'):
        return True
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _plain_rows(lines: Iterator[str], columns: Columns, source: _Source) -> Iterator[Row]:
    columns.require((columns.text,), source.name)
    source.warn_of_assumptions()
    blank: list[Row] = []  # blank lines at the end of a file are ignored, others are passed on
    for number, line in enumerate(lines, start=1):
        row = Row(f"{source.name} line {number}", (line.rstrip("\r\n"),) * len(columns.names))
        if is_blank(line):
            blank.append(row)
            continue
        yield from blank
        blank.clear()
        yield row


def _csv_rows(
    lines: Iterator[str], columns: Columns, source: _Source, default_delimiter: str = ","
) -> Iterator[Row | RowError]:
    # StringIO also splits at a bare carriage return, which old Macs use as line end.
    pieces = (piece for line in lines for piece in io.StringIO(line, newline=""))
    start = list(_through_first_nonblank(pieces))
    separator_line = _SEPARATOR_LINE.fullmatch(start[-1].strip(" \r\n")) if start else None
    skipped = len(start) if separator_line else 0
    if separator_line:  # Excel writes and reads "sep=;" as the first line
        start = list(_through_first_nonblank(pieces))
        delimiter = separator_line[1]
    else:
        delimiter = _detect_delimiter(start[-1] if start else "", columns, default_delimiter)
    source.warn_of_assumptions("" if delimiter == default_delimiter else delimiter)
    # strict: otherwise an unclosed quotation mark silently swallows the rest of the file
    records = csv.reader(chain(start, pieces), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = skipped
    try:
        for number, cells in enumerate(_without_size_limit(records), start=skipped + 1):
            place = f"{source.name} row {number}"
            if not cells or (header is None and not "".join(cells).strip()):
                continue
            if header is None:
                header = [name.strip() for name in cells]
                positions = columns.positions(header, source.name)
            elif len(cells) != len(header):
                hint = (
                    "quote cells that contain the delimiter"
                    if len(cells) > len(header)
                    else "complete the row"
                )
                yield RowError(f"{len(cells)} cells but the header has {len(header)}: {hint}", place)
            else:
                yield Row(place, tuple(cells[position] for position in positions))
    except csv.Error as error:
        raise RowError(
            f"{source.name} row {number + 1}: {error}: put the cell in quotation marks and double those "
            "inside it"
        ) from error


def _through_first_nonblank(pieces: Iterator[str]) -> Iterator[str]:
    """Yield lines up to and including the first that is not blank."""
    for piece in pieces:
        yield piece
        if piece.strip():
            return


def _detect_delimiter(header: str, columns: Columns, default: str) -> str:
    """Return the delimiter that separates a header into the expected columns, or else into most columns.

    Only the header is considered: commas inside texts mislead `csv.Sniffer`.
    """

    def score(delimiter: str) -> tuple[bool, int]:
        cells = next(_without_size_limit(csv.reader([header], delimiter=delimiter)), [])
        return {name.strip() for name in cells} >= set(columns.names), len(cells)

    return max((default, *DELIMITERS), key=score)  # the first of equals, so the default wins


def _without_size_limit(records: Iterator[list[str]]) -> Iterator[list[str]]:
    # The limit is global to the csv module: restore it after every row, since other code may read in between.
    while True:
        previous = csv.field_size_limit(MAX_CELL_CHARACTERS)
        try:
            cells = next(records, None)
        finally:
            csv.field_size_limit(previous)
        if cells is None:
            return
        yield cells


def _jsonl_rows(lines: Iterator[str], columns: Columns, source: _Source) -> Iterator[Row | RowError]:
    source.warn_of_assumptions()
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            place = f"{source.name} line {number}"
            try:
                yield _row_from_object(_parse_json(line, place, "correct that line"), columns, place)
            except RowError as error:
                yield error


def _json_rows(lines: Iterator[str], columns: Columns, source: _Source) -> Iterator[Row | RowError]:
    source.warn_of_assumptions()
    content = "".join(lines)
    if not content.strip():
        return
    hint = "correct it, or name the file .jsonl if it has one object per line"
    records = _records(_parse_json(content, source.name, hint), columns, source.name)
    for number, record in enumerate(records, start=1):
        try:
            yield _row_from_object(record, columns, f"{source.name} item {number}")
        except RowError as error:
            yield error


def _records(value: Any, columns: Columns, name: str) -> list[Any]:
    """Return the rows of a JSON file as a list of objects.

    Accepts a list of objects, an object with one list per column, and the output of
    `pandas.DataFrame.to_json` in every ``orient`` but "values". Raises RowError for anything else.
    """
    if isinstance(value, list):
        return value
    hint = "write a list of objects, as pandas does with orient='records'"
    if not isinstance(value, dict):
        raise RowError(f"{name}: contains a JSON {type(value).__name__}: {hint}")
    if (key := repeated_key(value)) is not None:
        raise RowError(f"{name}: the key {key!r} is given twice: remove one")
    parts = list(value.values())
    if isinstance(value.get("data"), list) and "columns" in value:  # orient="split"
        return [dict(zip(value["columns"], row, strict=False)) for row in value["data"]]
    if isinstance(value.get("data"), list) and "schema" in value:  # orient="table"
        return list(value["data"])
    if parts and all(isinstance(part, dict) for part in parts):
        if columns.text in parts[0] and columns.text not in value:  # orient="index"
            return parts
        indices = {index: None for part in parts for index in part}  # orient="columns", the default
        return [{column: cells.get(index) for column, cells in value.items()} for index in indices]
    if (
        columns.text in value
        and all(isinstance(part, list) for part in parts)
        and len(set(map(len, parts))) == 1
    ):
        return [dict(zip(value, row, strict=True)) for row in zip(*parts, strict=True)]
    raise RowError(f"{name}: contains a JSON dict: {hint}")


def _row_from_object(record: Any, columns: Columns, place: str) -> Row:
    if not isinstance(record, dict):
        names = ", ".join(map(repr, columns.names))
        raise RowError(f"{preview(record)} is not an object: write one with {names}", place)
    if (key := repeated_key(record)) is not None:
        raise RowError(f"the key {key!r} is given twice: remove one", place)
    columns.require(list(record), place)
    return Row(place, tuple(record[column] for column in columns.names))


def _parse_json(content: str, place: str, hint: str) -> Any:
    try:
        return load_json(content)
    except (ValueError, RecursionError) as error:
        raise RowError(f"bad JSON ({error}): {hint}", place) from error


class _ObjectWithRepeatedKey(dict[str, Any]):
    """A JSON object with more than one ``key``; `json` alone silently keeps the last value."""

    key: str


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    keys = [key for key, _ in pairs]
    repeated = _ObjectWithRepeatedKey(record)
    repeated.key = next(key for index, key in enumerate(keys) if key in keys[:index])
    return repeated


def load_json(content: str | bytes) -> Any:
    """Parse JSON like `json.loads`, and mark objects with repeated keys for `repeated_key`."""
    return json.loads(content, object_pairs_hook=_json_object)


def repeated_key(value: Any) -> str | None:
    """Return a key that occurs twice in an object from `load_json` or in one nested in it, or None."""
    if isinstance(value, _ObjectWithRepeatedKey):
        return value.key
    if not isinstance(value, dict | list):
        return None
    parts = value.values() if isinstance(value, dict) else value
    return next((key for key in map(repeated_key, parts) if key is not None), None)


_READERS: dict[str, Callable[[Iterator[str], Columns, _Source], Iterator[Row | RowError]]] = {
    "lines": _plain_rows,
    "csv": _csv_rows,
    "tsv": partial(_csv_rows, default_delimiter="\t"),
    "jsonl": _jsonl_rows,
    "json": _json_rows,
}
