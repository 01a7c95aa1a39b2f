"""Texts in and predictions out, row by row, so that input of any length takes the same memory."""

import csv
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Literal

from i2cl.errors import I2CLError

TextFormat = Literal["lines", "csv", "tsv", "jsonl"]
_BY_SUFFIX: dict[str, TextFormat] = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl"}
MAX_FIELD = 2**31 - 1


def read_texts(source: str, kind: TextFormat | None = None, column: str = "text") -> Iterator[str]:
    """Texts of a file, or of stdin for ``-``, one at a time.

    Args:
        source: path or ``-``.
        kind: one text a line, or rows of CSV, TSV or JSONL; default: by the file's ending.
        column: which column or key holds the text.

    Raises:
        I2CLError: on a missing or empty file, bytes that are not UTF-8, a missing column, an empty text.
    """
    kind = kind or _BY_SUFFIX.get(Path(source).suffix.lower(), "lines")
    where = "stdin" if source == "-" else source
    read = _table if kind in {"csv", "tsv"} else _lines
    number = 0
    with _opened(source) as handle:
        for number, text in enumerate(read(_decoded(handle, where), kind, column, where), start=1):
            if not text.strip():
                raise I2CLError(f"{where}: text {number} is empty: remove it or give it content")
            yield text
    if number == 0:
        raise I2CLError(f"{where} is empty: give at least one text")


def chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of up to ``size`` texts."""
    iterator = iter(texts)
    while chunk := list(islice(iterator, size)):
        yield chunk


@contextmanager
def written(path: Path | None) -> Iterator[IO[str]]:
    """stdout, or a file that appears under its name only when the block ends without an error.

    What is no regular file, such as /dev/null or a pipe, is written to and not replaced.

    Raises:
        I2CLError: if the file cannot be written.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        if path.exists() and not path.is_file():
            with path.open("w", encoding="utf-8") as handle:
                yield handle
        else:
            with _replaced(path) as handle:
                yield handle
    except OSError as error:
        raise I2CLError(f"cannot write {str(path)!r} ({error.strerror}): choose another place") from None


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    scratch = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            yield handle
        scratch.chmod(0o644)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_predictions(
    handle: IO[str], labels: Sequence[str], rows: Iterable[Sequence[float]], *, as_json: bool, header: bool
) -> None:
    """One line per text: JSON, or tab-separated with the best label first."""
    if header and not as_json:
        handle.write("\t".join(["label", *labels]) + "\n")
    for row in rows:
        best = labels[max(range(len(row)), key=row.__getitem__)]
        if as_json:
            probabilities = {label: round(value, 6) for label, value in zip(labels, row, strict=True)}
            line = json.dumps({"label": best, "probabilities": probabilities}, ensure_ascii=False)
        else:
            line = "\t".join([best, *(f"{value:.6f}" for value in row)])
        handle.write(line + "\n")
    handle.flush()


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
            raise I2CLError(
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
        raise I2CLError(f"{place} is no JSON ({error}): one object a line is needed") from None
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        raise I2CLError(f"{place} has no string {column!r}: name the key with --text-column")
    text = str(record[column])
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise I2CLError(f"{place} holds half a surrogate pair: repair the escape")
    return text


def _table(lines: Iterator[str], kind: TextFormat, column: str, where: str) -> Iterator[str]:
    before = csv.field_size_limit(MAX_FIELD)
    try:
        rows = csv.reader(lines, delimiter="\t" if kind == "tsv" else ",", strict=True)
        header = next(rows, None)
        if header is None:
            return
        if column not in header:
            raise I2CLError(f"{where} has no column {column!r} but {', '.join(header)}: use --text-column")
        place = header.index(column)
        for row in rows:
            if row:
                if len(row) <= place:
                    raise I2CLError(
                        f"{where} line {rows.line_num} has {len(row)} of {len(header)} columns: complete it"
                    )
                yield row[place]
    except csv.Error as error:
        raise I2CLError(f"{where} line {rows.line_num}: {error}: check its quotation marks") from None
    finally:
        csv.field_size_limit(before)
