"""Texts in, row by row, so that input of any length takes the same memory."""

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Literal

from i2cl.errors import I2CLError

TextFormat = Literal["lines", "csv", "tsv", "jsonl"]
_BY_SUFFIX: dict[str, TextFormat] = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl"}
MAX_FIELD = 2**31 - 1


class TextError(I2CLError):
    """Texts that cannot be used as they are: the file has to be repaired first."""


def read_texts(source: str, kind: TextFormat | None = None, column: str = "text") -> Iterator[str]:
    """Texts of a file, or of stdin for ``-``, one at a time.

    Args:
        source: path or ``-``.
        kind: one text a line, or rows of CSV, TSV or JSONL; default: by the file's ending.
        column: which column or key holds the text.

    Raises:
        I2CLError: if there is no such file.
        TextError: on an empty file, bytes that are not UTF-8, a missing column, an empty text.
    """
    kind = kind or _BY_SUFFIX.get(Path(source).suffix.lower(), "lines")
    where = "stdin" if source == "-" else source
    read = _table if kind in {"csv", "tsv"} else _lines
    number = 0
    with _opened(source) as handle:
        for number, text in enumerate(read(_decoded(handle, where), kind, column, where), start=1):
            if not text.strip():
                raise TextError(f"{where}: text {number} is empty: remove it or give it content")
            yield text
    if number == 0:
        raise TextError(f"{where} is empty: give at least one text")


def chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of up to ``size`` texts."""
    iterator = iter(texts)
    while chunk := list(islice(iterator, size)):
        yield chunk


@contextmanager
def _opened(source: str) -> Iterator[IO[bytes]]:
    if source == "-":
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(Path(source).open("rb"))
        except OSError as error:
            raise I2CLError(f"cannot read {source!r} ({error.strerror}): check the path") from None
        yield handle


def _decoded(handle: IO[bytes], where: str) -> Iterator[str]:
    for number, line in enumerate(handle, start=1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            byte = line[error.start]
            raise TextError(
                f"{where} line {number} is not UTF-8 (byte 0x{byte:02x}): convert it first"
            ) from None


def _lines(lines: Iterator[str], kind: TextFormat, column: str, where: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        text = line.rstrip("\r\n")
        if kind == "jsonl" and text.strip():
            yield _from_json(text, column, f"{where} line {number}")
        elif kind == "lines":
            yield text


def _from_json(line: str, column: str, place: str) -> str:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TextError(f"{place} is no JSON ({error}): one object a line is needed") from None
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        raise TextError(f"{place} has no string {column!r}: name the key with --text-column")
    text = str(record[column])
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TextError(f"{place} holds half a surrogate pair: repair the escape")
    return text


def _table(lines: Iterator[str], kind: TextFormat, column: str, where: str) -> Iterator[str]:
    before = csv.field_size_limit(MAX_FIELD)
    try:
        rows = csv.reader(lines, delimiter="\t" if kind == "tsv" else ",", strict=True)
        header = next(rows, None)
        if header is None:
            return
        if column not in header:
            raise TextError(f"{where} has no column {column!r} but {', '.join(header)}: use --text-column")
        place = header.index(column)
        for row in rows:
            if row:
                if len(row) <= place:
                    raise TextError(
                        f"{where} line {rows.line_num} has {len(row)} of {len(header)} columns: complete it"
                    )
                yield row[place]
    except csv.Error as error:
        raise TextError(f"{where} line {rows.line_num}: {error}: check its quotation marks") from None
    finally:
        csv.field_size_limit(before)
