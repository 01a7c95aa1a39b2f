"""Reading a user's CSV, TSV, JSONL and JSON files into examples, with errors that name the row."""

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from i2cl.errors import I2CLError
from i2cl.tasks.types import Example

ROW_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Row:
    """One row as the file has it; `place` ("row 3", "line 3", "item 3") is for error messages."""

    place: str
    text: object
    label: object


def read_examples(
    path: Path, labels: Sequence[str] | None = None, text_column: str = "text", label_column: str = "label"
) -> tuple[tuple[Example, ...], tuple[str, ...]]:
    """The examples of one file and the label words they index.

    A label is a label word (exact, else ignoring case) or a class id counted from 0; a cell that is both
    counts as the word. Without `labels` the words are the file's distinct labels, sorted. Errors count CSV
    rows from 1, the header included. Raises I2CLError naming the file and row for anything that cannot be
    read.
    """
    rows = read_rows(path, text_column, label_column)
    words = tuple(labels) if labels is not None else _derive_labels(path, rows)
    lookup = LabelLookup(words)
    return tuple(_example(path, row, lookup) for row in rows), words


def read_rows(path: Path, text_column: str, label_column: str) -> list[Row]:
    """The rows of a file in file order, unchecked; the reader is chosen by the file's extension."""
    suffix = path.suffix.lower()
    if suffix not in ROW_SUFFIXES:
        known = ", ".join(ROW_SUFFIXES)
        raise I2CLError(f"{path}: cannot read files ending in {suffix!r}: use one of {known}")
    content = decode_utf8(read_bytes(path), str(path))
    if not content.strip():
        raise I2CLError(f"{path} is empty: give a file with one example per row")
    columns = (text_column, label_column)
    if suffix == ".jsonl":
        rows = list(_jsonl_rows(path, content, columns))
    elif suffix == ".json":
        rows = list(_json_rows(path, content, columns))
    else:
        rows = list(_table_rows(path, content, "\t" if suffix == ".tsv" else ",", columns))
    if not rows:
        raise I2CLError(f"{path} has no rows: give a file with one example per row")
    return rows


def read_bytes(path: Path) -> bytes:
    """The content of a file; I2CLError when it is missing, a folder or unreadable."""
    if path.is_dir():
        raise I2CLError(f"{path} is a folder: name a file in it")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise I2CLError(f"{path} does not exist: check the path") from error
    except OSError as error:
        raise I2CLError(f"{path} cannot be read ({error.strerror}): check its permissions") from error


def decode_utf8(data: bytes, source: str) -> str:
    """UTF-8 with or without a byte order mark; I2CLError naming the first byte that is not UTF-8."""
    start = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = start + error.start
        line = data.count(b"\n", 0, offset) + 1
        place = f"byte {offset} (line {line})"
        raise I2CLError(f"{source}: {place} is not UTF-8: save the file as UTF-8") from error


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


def _example(path: Path, row: Row, lookup: LabelLookup) -> Example:
    place = f"{path} {row.place}"
    if not isinstance(row.text, str):
        raise I2CLError(f"{place}: the text is {_show(row.text)}, not a string: put it in quotes")
    if not row.text.strip():
        raise I2CLError(f"{place}: the text is empty: fill it in or delete the row")
    if any("\ud800" <= character <= "\udfff" for character in row.text):
        raise I2CLError(f"{place}: the text holds half a surrogate pair: repair the escape or delete the row")
    index = lookup.find(row.label)
    if index is None:
        raise I2CLError(f"{place}: label {_show(row.label)} is not one of {lookup.allowed()}: correct it")
    return Example(row.text, index)


def _derive_labels(path: Path, rows: list[Row]) -> tuple[str, ...]:
    for row in rows:
        if not isinstance(row.label, str) or not row.label.strip():
            cure = "write a label word there, or pass the label words for class ids"
            raise I2CLError(f"{path} {row.place}: label {_show(row.label)} is not a word: {cure}")
    words = sorted({str(row.label).strip() for row in rows})
    if all(_as_id(word) is not None for word in words):
        shown = ", ".join(words[:8])
        raise I2CLError(f"{path}: the labels are class ids ({shown}): pass the label words, one per id")
    if len(words) < 2:
        cure = "add rows of another class or pass the label words"
        raise I2CLError(f"{path}: every label is {words[0]!r}: {cure}")
    return tuple(words)


def _table_rows(path: Path, content: str, delimiter: str, columns: tuple[str, str]) -> Iterator[Row]:
    records = _records(path, content, delimiter)
    header = [name.strip() for name in records[0][1]]
    text_at, label_at = _positions(path, header, columns)
    for place, cells in records[1:]:
        if len(cells) != len(header):
            cure = "quote a cell that holds the delimiter"
            raise I2CLError(f"{path} {place}: {len(cells)} cells but the header has {len(header)}: {cure}")
        yield Row(place, cells[text_at], cells[label_at])


def _records(path: Path, content: str, delimiter: str) -> list[tuple[str, list[str]]]:
    records = []
    number = 0
    with _field_limit(len(content)):
        # strict: otherwise a quotation mark that is never closed silently swallows the rest of the file.
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
        try:
            for cells in reader:
                number += 1
                if cells:
                    records.append((f"row {number}", cells))
        except csv.Error as error:
            cure = "put the cell in quotation marks and double those inside it"
            raise I2CLError(f"{path} row {number + 1}: {error}: {cure}") from error
    return records


@contextmanager
def _field_limit(characters: int) -> Iterator[None]:
    # The limit belongs to the csv module as a whole: raise it for this file only and put it back.
    before = csv.field_size_limit()
    csv.field_size_limit(max(before, characters))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _positions(path: Path, header: list[str], columns: tuple[str, str]) -> tuple[int, int]:
    for column in columns:
        if header.count(column) > 1:
            raise I2CLError(f"{path}: the header names column {column!r} twice: rename one of them")
    _check_columns(str(path), header, columns)
    return header.index(columns[0]), header.index(columns[1])


def _check_columns(place: str, present: Sequence[str], columns: tuple[str, str]) -> None:
    for kind, column in zip(("text", "label"), columns, strict=True):
        if column not in present:
            there = f"the columns are {', '.join(present) or 'none'}"
            raise I2CLError(
                f"{place}: no {kind} column {column!r}, {there}: name it with {kind}_column (--{kind}-column)"
            )


def _jsonl_rows(path: Path, content: str, columns: tuple[str, str]) -> Iterator[Row]:
    # Not splitlines(): it would also cut at the line separators that JSON strings may hold.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise I2CLError(f"{path} line {number}: bad JSON ({error}): correct that line") from error
            yield _json_row(path, f"line {number}", record, columns)


def _json_rows(path: Path, content: str, columns: tuple[str, str]) -> Iterator[Row]:
    try:
        records = json.loads(content)
    except ValueError as error:
        cure = "correct it, or name the file .jsonl if it has one object per line"
        raise I2CLError(f"{path}: bad JSON ({error}): {cure}") from error
    if not isinstance(records, list):
        raise I2CLError(f"{path}: holds a JSON {type(records).__name__}: write a list of objects")
    for number, record in enumerate(records, start=1):
        yield _json_row(path, f"item {number}", record, columns)


def _json_row(path: Path, place: str, record: object, columns: tuple[str, str]) -> Row:
    if not isinstance(record, dict):
        raise I2CLError(f"{path} {place}: {_show(record)} is not an object: write {{{columns[0]!r}: ...}}")
    _check_columns(f"{path} {place}", list(record), columns)
    return Row(place, record[columns[0]], record[columns[1]])


def _show(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
