"""The one reader of rows: lines, CSV, TSV, JSON Lines and JSON, row by row, with errors that name the row.

Files of any length take the same memory, JSON aside, which is one value. `fit` and `eval` read labelled rows,
`predict` reads texts.
"""

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args

from i2cl.errors import HALF_PAIR, I2CLError
from i2cl.tasks.types import Example

RowFormat = Literal["lines", "csv", "tsv", "jsonl", "json"]
"""One text a line; rows with named columns; objects, one a line or in one list."""

ROW_SUFFIXES = tuple(f".{name}" for name in get_args(RowFormat)[1:])
"""Endings of files with columns; any other file holds one text a line."""

STDIN = "-"
MAX_FIELD = 2**31 - 1
_SHOWN = 60
_NO_LINES = ("yaml", "yml", "toml", "xml", "html", "htm")


class RowError(I2CLError):
    """Rows that cannot be used as they are: the file has to be repaired first."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the file has it.

    Attributes:
        place: file and "row 3", "line 3" or "item 3", for error messages. Rows are counted from 1, the
            header included.
        values: of the columns that were asked for.
    """

    place: str
    values: tuple[object, ...]


class Query(NamedTuple):
    """A text to be classified.

    Attributes:
        text: what is asked about.
        kept: values of the columns that are to come back with its answer, as the file has them.
    """

    text: str
    kept: tuple[object, ...] = ()


@dataclass(frozen=True)
class Columns:
    """Which columns or keys are read.

    Attributes:
        text: holds the text.
        label: holds the label; None to read texts alone.
        kept: read and passed on as they are.
    """

    text: str = "text"
    label: str | None = None
    kept: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are read, the text first."""
        return (self.text, *(() if self.label is None else (self.label,)), *self.kept)

    def require(self, present: Sequence[str], place: str) -> None:
        """Raise RowError if one is not among those that are present."""
        kinds = ("text",) if self.label is None else ("text", "label")
        for number, column in enumerate(self.names):
            if column not in present:
                there = f"the columns are {', '.join(present) or 'none'}"
                if number >= len(kinds):
                    raise RowError(f"{place}: no column {column!r} to keep, {there}: correct --keep")
                cure = f"name it with {kinds[number]}_column (--{kinds[number]}-column)"
                raise RowError(f"{place}: no {kinds[number]} column {column!r}, {there}: {cure}")


def read_examples(
    path: Path, labels: Sequence[str] | None = None, text_column: str = "text", label_column: str = "label"
) -> tuple[tuple[Example, ...], tuple[str, ...]]:
    """The examples of one file and the label words they index.

    A label is a label word (exact, else ignoring case) or a class id counted from 0; a cell that is both
    counts as the word. Without ``labels`` the words are the file's distinct labels, sorted.

    Raises:
        I2CLError: naming the file and row, for anything that cannot be read.
    """
    if path.suffix.lower() not in ROW_SUFFIXES:
        known = ", ".join(ROW_SUFFIXES)
        raise I2CLError(f"{path}: cannot read files ending in {path.suffix!r}: use one of {known}")
    rows = list(read_rows(str(path), Columns(text_column, label_column)))
    words = tuple(labels) if labels is not None else _derive_labels(path, rows)
    lookup = LabelLookup(words)
    return tuple(Example(_text(row), _label(row, lookup)) for row in rows), words


def refused_rows(path: Path, labels: Sequence[str] | None = None) -> list[str]:
    """What is wrong with the rows of a file of examples (``text``, ``label``), each that is, one by one.

    What keeps `read_examples` from reading the rest is the last.
    """
    found: list[str] = []
    lookup = LabelLookup(labels) if labels is not None else None
    try:
        for row in read_rows(str(path), Columns("text", "label")):
            try:
                _text(row)
                _word(row) if lookup is None else _label(row, lookup)
            except RowError as error:
                found.append(str(error))
    except RowError as error:
        found.append(str(error))
    return found


def read_queries(
    source: str, kind: RowFormat | None = None, column: str = "text", kept: tuple[str, ...] = ()
) -> Iterator[Query]:
    """Texts of a file, or of stdin for ``-``, one at a time, with what is kept of each: see `read_rows`."""
    columns = Columns(column, kept=kept)
    with closing(read_rows(source, columns, kind)) as rows:  # or an error keeps it half read
        for row in rows:
            yield Query(_text(row), _kept(row, kept))


def read_rows(source: str, columns: Columns, kind: RowFormat | None = None) -> Generator[Row, None, None]:
    """Rows of a file, or of stdin for ``-``, one at a time; their values are unchecked.

    Args:
        source: path or ``-``.
        columns: what is read of each row.
        kind: how the rows are written; default: by the file's ending.

    Raises:
        I2CLError: if the file cannot be opened.
        RowError: on a file without rows, lines that look like another format, bytes that are not UTF-8,
            broken CSV or JSON, a column that is not there.
    """
    ending = Path(source).suffix.lower().removeprefix(".")
    known = kind or (ending if ending in _READERS else None)
    read = _READERS[known or "lines"]
    where = "stdin" if source == STDIN else source
    filled = found = False

    def lines(handle: Iterable[bytes]) -> Iterator[str]:
        nonlocal filled
        for line in decoded(handle, where):
            if known is None and not filled and (ending in _NO_LINES or _is_json(line)):
                cure = "name its --format, lines to take each line as a text"
                raise RowError(f"{where} does not hold plain texts, as it seems: {cure}")
            filled = filled or not line.isspace()
            yield line

    with nullcontext(sys.stdin.buffer) if source == STDIN else opened(Path(source)) as handle:
        for row in read(lines(handle), columns, where):
            found = True
            yield row
    if not found:
        raise RowError(f"{where} {'has no rows' if filled else 'is empty'}: give it at least one row")


def opened(path: Path) -> IO[bytes]:
    """A file to be read; I2CLError when it is missing, a folder or unreadable."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise I2CLError(f"{path} does not exist: check the path") from error
    except IsADirectoryError as error:
        raise I2CLError(f"{path} is a folder: name a file in it") from error
    except (OSError, ValueError) as error:  # ValueError: its name holds a null byte
        cause = error.strerror if isinstance(error, OSError) else error
        raise I2CLError(f"{path} cannot be read ({cause}): check its name and permissions") from error


def decoded(lines: Iterable[bytes], where: str) -> Iterator[str]:
    """Lines of UTF-8 with or without a byte order mark; RowError naming the first byte that is none."""
    before = 0
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            byte = f"byte {before + error.start} is 0x{line[error.start]:02x}"
            raise RowError(f"{where} line {number} is not UTF-8 ({byte}): save the file as UTF-8") from error
        before += len(line)
        yield text.removeprefix("\ufeff") if number == 1 else text


def _is_json(line: str) -> bool:
    """Whether a file's first line is one that JSON, an object a line or a list of them, begins with."""
    text = line.strip()
    if text == "[" or text.startswith('[{"'):
        return True
    try:
        return text.startswith("{") and isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _plain_rows(lines: Iterator[str], columns: Columns, where: str) -> Iterator[Row]:
    columns.require((columns.text,), where)
    for number, line in enumerate(lines, start=1):
        yield Row(f"{where} line {number}", (line.rstrip("\r\n"),) * len(columns.names))


def _csv_rows(lines: Iterator[str], columns: Columns, where: str, delimiter: str = ",") -> Iterator[Row]:
    # Lines may end in a bare carriage return too, as StringIO has it.
    pieces = (piece for line in lines for piece in io.StringIO(line, newline=""))
    # strict: otherwise a quotation mark that is never closed silently swallows the rest of the file.
    records = csv.reader(pieces, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 0
    try:
        for number, cells in enumerate(_long_fields(records), start=1):
            place = f"{where} row {number}"
            if not cells or (header is None and not "".join(cells).strip()):
                continue
            if header is None:
                header = [name.strip() for name in cells]
                positions = _positions(header, columns, where)
            elif len(cells) != len(header):
                more = len(cells) > len(header)
                cure = "quote a cell that holds the delimiter" if more else "complete the row"
                count = f"{len(cells)} cells but the header has {len(header)}"
                raise RowError(f"{place}: {count}: {cure}")
            else:
                yield Row(place, tuple(cells[position] for position in positions))
    except csv.Error as error:
        cure = "put the cell in quotation marks and double those inside it"
        raise RowError(f"{where} row {number + 1}: {error}: {cure}") from error


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
    columns.require(header, where)
    return [header.index(column) for column in columns.names]


def _jsonl_rows(lines: Iterator[str], columns: Columns, where: str) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            place = f"{where} line {number}"
            yield _object_row(_parsed(line, f"{place}: bad JSON", "correct that line"), columns, place)


def _json_rows(lines: Iterator[str], columns: Columns, where: str) -> Iterator[Row]:
    content = "".join(lines)
    if not content.strip():
        return
    cure = "correct it, or name the file .jsonl if it has one object per line"
    records = _parsed(content, f"{where}: bad JSON", cure)
    if not isinstance(records, list):
        raise RowError(f"{where}: holds a JSON {type(records).__name__}: write a list of objects")
    for number, record in enumerate(records, start=1):
        yield _object_row(record, columns, f"{where} item {number}")


def _parsed(content: str, what: str, cure: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} ({error}): {cure}") from error


def _object_row(record: object, columns: Columns, place: str) -> Row:
    if not isinstance(record, dict):
        raise RowError(f"{place}: {_show(record)} is not an object: write {{{columns.text!r}: ...}}")
    columns.require(list(record), place)
    return Row(place, tuple(record[column] for column in columns.names))


_READERS: dict[str, Callable[[Iterator[str], Columns, str], Iterator[Row]]] = {
    "lines": _plain_rows,
    "csv": _csv_rows,
    "tsv": partial(_csv_rows, delimiter="\t"),
    "jsonl": _jsonl_rows,
    "json": _json_rows,
}


def _text(row: Row) -> str:
    text = row.values[0]
    if not isinstance(text, str):
        raise RowError(f"{row.place}: the text is {_show(text)}, not a string: put it in quotes")
    if not text.strip():
        raise RowError(f"{row.place}: the text is empty: fill it in or delete the row")
    if HALF_PAIR.search(text):
        cure = "repair the escape or delete the row"
        raise RowError(f"{row.place}: the text holds half a surrogate pair: {cure}")
    return text


def _kept(row: Row, names: tuple[str, ...]) -> tuple[object, ...]:
    values = row.values[1:]
    for name, value in zip(names, values, strict=True):
        if HALF_PAIR.search(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
            raise RowError(
                f"{row.place}: column {name!r} holds half a surrogate pair: repair it, or do not keep it"
            )
    return values


def _label(row: Row, lookup: "LabelLookup") -> int:
    index = lookup.find(row.values[1])
    if index is None:
        found = f"label {_show(row.values[1])} is not one of {lookup.allowed()}"
        raise RowError(f"{row.place}: {found}: correct it")
    return index


class LabelLookup:
    """Class ids by label word or by number: exact words first, then words in another case, then numbers."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self._exact = {word: index for index, word in enumerate(self.labels)}
        folded = [word.casefold() for word in self.labels]
        counts = Counter(folded)
        # Two words that differ only in case cannot be told apart without it.
        self._folded = {word: index for index, word in enumerate(folded) if counts[word] == 1}

    def find(self, label: object) -> int | None:
        """The class id that `label` names, or None."""
        if isinstance(label, bool) or not isinstance(label, int | str):
            return None
        word = str(label).strip()
        for table, key in ((self._exact, word), (self._folded, word.casefold())):
            if key in table:
                return table[key]
        number = _as_id(word)
        return number if number is not None and number < len(self.labels) else None

    def allowed(self) -> str:
        """What may stand in a label column, for error messages."""
        return f"{', '.join(self.labels)} (or the ids 0 to {len(self.labels) - 1})"


def _as_id(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 10 else None


def _derive_labels(path: Path, rows: Sequence[Row]) -> tuple[str, ...]:
    words = set(map(_word, rows))
    if all(_as_id(word) is not None for word in words):
        shown = ", ".join(sorted(words)[:8])
        raise RowError(f"{path}: the labels are class ids ({shown}): pass the label words, one per id")
    if len(words) < 2:
        cure = "add rows of another class or pass the label words"
        raise RowError(f"{path}: every label is {words.pop()!r}: {cure}")
    return tuple(sorted(words))


def _word(row: Row) -> str:
    label = row.values[1]
    if not isinstance(label, str) or not label.strip():
        cure = "write a label word there, or pass the label words for class ids"
        raise RowError(f"{row.place}: label {_show(label)} is not a word: {cure}")
    return label.strip()


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
