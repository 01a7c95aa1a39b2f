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
import math
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from i2cl.errors import I2CLError, did_you_mean, first_line, require_packages
from i2cl.tasks.files import (
    COMPRESSION_SUFFIXES,
    UTF_8,
    WINDOWS,
    ReadAsWarning,
    RowError,
    decode_lines,
    detect_encoding,
    open_decompressed,
)
from i2cl.tasks.labels import is_blank

RowFormat = Literal["lines", "csv", "tsv", "jsonl", "json"]
# Suffixes of files with columns; a suffix of compression may follow. Other files have one text per line.
ROW_SUFFIXES = (*(f".{name}" for name in get_args(RowFormat)[1:]), ".parquet", ".xlsx")
STDIN = "-"
# Cell delimiters: which one a spreadsheet program writes depends on its locale.
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_SEPARATOR_LINE = re.compile("sep=([,;\t|])")  # Excel writes and reads it as the first line
_MAX_CELL_CHARACTERS = 2**31 - 1
_PARQUET_BATCH_ROWS = 4096  # rows in memory at a time
_REPEATED_HEADER = "the header is repeated: delete the row"
_MAX_PREVIEW_CHARACTERS = 60
_MAX_LISTED_CHARACTERS = 200


class Row(NamedTuple):
    """One row of a file."""

    place: str  #: file and row, such as "a.csv row 3" (the header is row 1) or "a.txt line 3"
    values: tuple[object, ...]  #: cells in the order of `Columns.names`


@dataclass(frozen=True)
class Columns:
    """Names of the columns or JSON keys to read."""

    text: str = "text"
    label: str | None = None  #: None for unlabelled texts
    kept: tuple[str, ...] = ()  #: further columns, passed through unchanged
    kept_option: str = "--keep"  #: option that names them, for error messages

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of `Row.values`."""
        return (self.text, *(() if self.label is None else (self.label,)), *self.kept)

    def positions(self, header: Sequence[str], place: str) -> list[int]:
        """Return the index of each column in a header. Raises RowError if one is missing or repeated."""
        self.require(header, place, "; the first line must name the columns")
        if repeated := [column for column in self.names if list(header).count(column) > 1]:
            raise RowError(f"the header names column {repeated[0]!r} twice: rename one of them", place)
        return [header.index(column) for column in self.names]

    def require(self, present: Sequence[str], place: str, hint: str = "") -> None:
        """Raise RowError if a column is missing. ``hint`` is added to the message."""
        missing = [column for column in self.names if column not in present]
        available = f"the columns are {_listed(present)}"
        kinds = {self.text: "text", self.label: "label"}
        if missing[:2] == [self.text, self.label]:
            problem = f"no text column {self.text!r} and no label column {self.label!r}"
            advice = "say which ones hold the text and the label: text_column (--text-column) and "
            raise RowError(f"{problem}, {available}: {advice}label_column (--label-column){hint}", place)
        for column in missing:
            if column not in kinds:
                purpose = " to keep" if self.kept_option == "--keep" else ""
                raise RowError(
                    f"no column {column!r}{purpose}, {available}: correct its name ({self.kept_option})",
                    place,
                )
            kind = kinds[column]
            guess = did_you_mean(column, present, limit=1)
            advice = f"{guess}name it in " if guess else f"say which one holds the {kind}: "
            advice += f"{kind}_column (--{kind}-column){hint}"
            raise RowError(f"no {kind} column {column!r}, {available}: {advice}", place)


def preview(value: object) -> str:
    """Return the representation of a value for an error message, truncated if it is long."""
    return _truncate(repr(value))


def _listed(columns: Sequence[str]) -> str:
    """Join column names for an error message: as many as fit, and the number of the others."""
    shown = [_truncate(column) or "''" for column in columns]
    while len(", ".join(shown)) > _MAX_LISTED_CHARACTERS:
        shown.pop()
    others = len(columns) - len(shown)
    return (", ".join(shown) or "none") + (f" and {others} more" if others else "")


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_PREVIEW_CHARACTERS else text[:_MAX_PREVIEW_CHARACTERS] + "..."


def is_row_file(path: str | Path) -> bool:
    """Return whether a file has the suffix of a format with columns, such as .csv or .csv.gz."""
    return _without_compression(path).suffix.lower() in ROW_SUFFIXES


def name_of(path: Path) -> str:
    """Return the name of a file without its suffix and the suffix of a compression."""
    return _without_compression(path).stem


def _without_compression(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix.lower() in COMPRESSION_SUFFIXES else path


def rows_or_errors(
    source: str, columns: Columns, kind: RowFormat | None = None
) -> Generator[Row | RowError, None, None]:
    """Yield the rows of a file one at a time, and an error for each row that cannot be read.

    Values are not checked.

    Args:
        source: path of the file; ``-`` for stdin.
        columns: the columns to read.
        kind: format of the file. Default: by its suffix, else one text per line.

    Raises:
        I2CLError: if the file cannot be opened, or a package that reads it is missing.
        RowError: if the file has no rows, is in another format than expected, contains malformed CSV or JSON,
            or has no such column.
    """
    name = "stdin" if source == STDIN else source
    suffix = "" if source == STDIN else _without_compression(source).suffix.lower()[1:]
    format_name: str = kind or suffix
    any_row = False
    with nullcontext(sys.stdin.buffer) if source == STDIN else open_decompressed(Path(source)) as file:
        if format_name in _BINARY_READERS:
            rows: Iterator[Row | RowError] = _BINARY_READERS[format_name](file, columns, name)
        else:
            rewind = source != STDIN and file.seekable()
            encoding = detect_encoding(file) if rewind else UTF_8
            if rewind:
                file.seek(0)
            if encoding == WINDOWS and format_name in {"jsonl", "json"}:  # JSON is always UTF-8
                encoding = UTF_8
            lines = decode_lines(file, name, encoding)
            rows = _TEXT_READERS.get(format_name, _plain_rows_not_json)(lines, columns, name)
        for row in rows:
            any_row = True
            yield row
    if not any_row:
        raise RowError(f"{name} has no rows: give it at least one")


def _plain_rows_not_json(lines: Iterator[str], columns: Columns, name: str) -> Iterator[Row]:
    """Yield one text per line, or raise RowError if the first line looks like JSON."""
    for index, row in enumerate(_plain_rows(lines, columns, name)):
        text = str(row.values[0]).strip()
        if index == 0 and (text == "[" or text.startswith(('{"', '[{"'))):
            raise RowError(
                f"{name} does not look like plain texts: name its --input-format (lines: one text per line)"
            )
        yield row


def _plain_rows(lines: Iterator[str], columns: Columns, name: str) -> Iterator[Row]:
    columns.require((columns.text,), name)
    blank: list[Row] = []  # blank lines at the end of a file are ignored, others are passed on
    for number, line in enumerate(lines, start=1):
        row = Row(f"{name} line {number}", (line.rstrip("\r\n"),) * len(columns.names))
        if is_blank(line):
            blank.append(row)
            continue
        yield from blank
        blank.clear()
        yield row


def _csv_rows(
    lines: Iterator[str], columns: Columns, name: str, default_delimiter: str = ","
) -> Iterator[Row | RowError]:
    csv.field_size_limit(_MAX_CELL_CHARACTERS)  # of the whole process; the default is 128 kB
    # StringIO also splits at a bare carriage return, which old Macs use as line end.
    pieces = (piece for line in lines for piece in io.StringIO(line, newline=""))
    start: list[str] = []
    declared_delimiter = None
    while not "".join(start).strip() and (piece := next(pieces, "")):
        if separator := _SEPARATOR_LINE.fullmatch(piece.strip(" \r\n")):
            declared_delimiter, piece = separator[1], "\n"  # a blank line, so that row numbers stay
        start.append(piece)
    delimiter = declared_delimiter or _detect_delimiter("".join(start[-1:]), columns, default_delimiter)
    if delimiter != default_delimiter:
        message = f"{name} is read with {_DELIMITERS[delimiter]} between its cells"
        warnings.warn(message, ReadAsWarning, stacklevel=2)
    header: list[str] = []
    number = 0
    try:
        # strict: otherwise an unclosed quotation mark silently swallows the rest of the file
        records = csv.reader(chain(start, pieces), delimiter=delimiter, strict=True)
        for number, cells in enumerate(records, start=1):
            place = f"{name} row {number}"
            if not cells or not (header or "".join(cells).strip()):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                positions = columns.positions(header, name)
            elif problem := _row_problem(cells, header):
                yield RowError(problem, place)
            else:
                yield Row(place, tuple(cells[position] for position in positions))
    except csv.Error as error:
        problem, hint = str(error), "put the cell in quotation marks and double those inside it"
        if problem == "unexpected end of data":
            problem = "the file ends inside a cell that begins with a quotation mark"
            hint = "close it, or double it if it belongs to the text"
        raise RowError(f"{name} row {number + 1}: {problem}: {hint}") from error


def _row_problem(cells: Sequence[str], header: Sequence[str]) -> str:
    """Return why a row does not fit the header, or ""."""
    if _repeats_header(cells, header):
        return _REPEATED_HEADER
    if len(cells) == len(header):
        return ""
    hint = "quote cells that contain the delimiter" if len(cells) > len(header) else "complete the row"
    return f"{len(cells)} cells but the header has {len(header)}: {hint}"


def _repeats_header(cells: Sequence[str], header: Sequence[str]) -> bool:
    """Return whether a row is the header of a second file that was appended to the first.

    A single column may contain its own name.
    """
    if len(header) == 1 or len(cells) != len(header):
        return False
    names = (cell.strip().removeprefix("\ufeff") for cell in cells)
    return all(name == column for name, column in zip(names, header, strict=True))


def _detect_delimiter(header: str, columns: Columns, default: str) -> str:
    """Return the delimiter that separates a header into the expected columns, or else into most columns.

    Only the header is considered: commas inside texts mislead `csv.Sniffer`.
    """

    def score(delimiter: str) -> tuple[bool, int]:
        cells = next(csv.reader([header], delimiter=delimiter), [])
        return {cell.strip() for cell in cells} >= set(columns.names), len(cells)

    return max((default, *_DELIMITERS), key=score)  # the first of equals, so the default wins


def _jsonl_rows(lines: Iterator[str], columns: Columns, name: str) -> Iterator[Row | RowError]:
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            place = f"{name} line {number}"
            try:
                yield _row_from_object(_parse_json(line, place, "correct that line"), columns, place)
            except RowError as error:
                yield error


def _json_rows(lines: Iterator[str], columns: Columns, name: str) -> Iterator[Row | RowError]:
    content = "".join(lines)
    if not content.strip():
        return
    value = _parse_json(content, name, "correct it, or name the file .jsonl if it has one object per line")
    if not isinstance(value, list):
        hint = "write a list of objects (pandas: to_json(orient='records'))"
        kind = "an object" if isinstance(value, dict) else preview(value)
        raise RowError(f"{name} contains {kind}, not a list: {hint}")
    for number, record in enumerate(value, start=1):
        try:
            yield _row_from_object(record, columns, f"{name} item {number}")
        except RowError as error:
            yield error


def _row_from_object(record: Any, columns: Columns, place: str) -> Row:
    if not isinstance(record, dict):
        names = ", ".join(map(repr, columns.names))
        raise RowError(f"{preview(record)} is not an object: write one with {names}", place)
    hint = ""
    if any(isinstance(value, dict) for value in record.values()):
        command = ".[] | {text: .data.text, label: .annotations[0].result[0].value.choices[0]}"
        hint = f"; keys of nested objects are not read: flatten them first, such as jq -c '{command}' FILE"
    columns.require(list(record), place, hint)
    return Row(place, tuple(record[column] for column in columns.names))


def _parse_json(content: str, place: str, hint: str) -> Any:
    try:
        return load_json(content)
    except I2CLError as error:
        raise RowError(str(error), place) from None
    except (ValueError, RecursionError) as error:
        raise RowError(f"bad JSON ({error}): {hint}", place) from error


def load_json(content: str | bytes) -> Any:
    """Parse JSON like `json.loads`, but raise I2CLError if a key is given twice in an object."""
    return json.loads(content, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in pairs:
        if key in record:
            raise I2CLError(f"the key {key!r} is given twice: remove one")
        record[key] = value
    return record


def _parquet_rows(file: IO[bytes], columns: Columns, name: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file, numbered from 1."""
    require_packages(f"{name}, a Parquet file,", "tables", "pyarrow", instead="save it as CSV")
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    number = 0
    try:
        table = parquet.ParquetFile(file)
        columns.require(table.schema_arrow.names, name)
        unique_names = list(dict.fromkeys(columns.names))
        for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=unique_names):
            cells = [map(_to_json_value, batch.column(column).to_pylist()) for column in columns.names]
            for values in zip(*cells, strict=True):
                number += 1
                yield Row(f"{name} row {number}", values)
    except (arrow.ArrowException, OSError) as error:
        raise RowError(
            f"{name} is not a valid Parquet file ({first_line(error)}): write it again, or correct its suffix"
        ) from error


def _excel_rows(file: IO[bytes], columns: Columns, name: str) -> Iterator[Row | RowError]:
    """Yield the rows of the first sheet of a workbook, numbered as in Excel: the header is row 1.

    Numbers in the text column are converted to strings, as in CSV.
    """
    require_packages(f"{name}, an Excel file,", "tables", "openpyxl", instead="save it as CSV")
    try:
        book = import_module("openpyxl").load_workbook(file, read_only=True, data_only=True)
    except Exception as error:  # openpyxl raises errors of many unrelated types on damaged files
        raise RowError(
            f"{name} is not a valid Excel file ({first_line(error)}): save it again, or correct its suffix"
        ) from error
    sheet = book.worksheets[0]
    if len(book.worksheets) > 1:
        message = f"{name} has {len(book.worksheets)} sheets: only the first, {sheet.title!r}, is read"
        warnings.warn(message, ReadAsWarning, stacklevel=2)
    sheet.reset_dimensions()  # some programs write wrong dimensions
    header: list[str] = []
    for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
        last = max((index for index, cell in enumerate(cells) if cell is not None), default=-1)
        if last < 0:
            continue
        names = ["" if cell is None else str(cell).strip() for cell in cells[: last + 1]]
        if not header:
            header = names
            positions = columns.positions(header, name)
            continue
        if _repeats_header(names, header):
            yield RowError(_REPEATED_HEADER, f"{name} row {number}")
            continue
        text, *others = [_to_json_value(cells[index]) if index < len(cells) else None for index in positions]
        is_number = isinstance(text, int | float) and not isinstance(text, bool)
        yield Row(f"{name} row {number}", (str(text) if is_number else text, *others))


def _to_json_value(value: object) -> object:
    """Convert a cell to a type that JSON supports: dates and other types to strings, NaN to None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | dict):
        return json.loads(json.dumps(value, default=str))
    return str(value)


_TEXT_READERS: dict[str, Callable[[Iterator[str], Columns, str], Iterator[Row | RowError]]] = {
    "lines": _plain_rows,
    "csv": _csv_rows,
    "tsv": partial(_csv_rows, default_delimiter="\t"),
    "jsonl": _jsonl_rows,
    "json": _json_rows,
}
_BINARY_READERS: dict[str, Callable[[IO[bytes], Columns, str], Iterator[Row | RowError]]] = {
    "parquet": _parquet_rows,
    "xlsx": _excel_rows,
}
