"""Output formats of `predict`: tab-separated, CSV, JSON Lines and Parquet.

A row of TSV or JSON Lines is one line, so an interrupted run resumes after the last line. A CSV cell may hold
line breaks and Parquet has no lines: their rows are collected as JSON Lines and converted at the end.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from i2cl.errors import I2CLError, needs
from i2cl.injections.confidence import confident_index

OutputFormat = Literal["tsv", "csv", "jsonl", "parquet"]

# Formats by file ending; any other ending means tab-separated.
ENDINGS: dict[str, OutputFormat] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
ENDINGS |= {".parquet": "parquet"}

NUMBER = "row"  # name of the column with the number of the row
ROW_GROUP = 50_000  # rows of a Parquet file in memory at a time
FORMULAS = ("=", "+", "-", "@")  # first characters that make a cell a formula in a spreadsheet

_NO_BREAKS = str.maketrans("\t\r\n", "   ")


def output_format(path: Path | None, named: OutputFormat | None, *, as_json: bool) -> OutputFormat:
    """Return the format of the output: the named one, else by the file's ending, else tab-separated.

    Raises I2CLError if ``--json`` contradicts it, or Parquet would go to stdout.
    """
    meant = named or (ENDINGS.get(path.suffix.lower()) if path is not None else None)
    if as_json and meant not in {None, "jsonl"}:
        source = "--output-format" if named else f"the ending of {str(path)!r}"
        cure = "leave out --json, or name --output-format"
        raise I2CLError(f"--json means JSON Lines, and {source} means {meant}: {cure}")
    if meant == "parquet":
        if path is None or (path.exists() and not path.is_file()):
            raise I2CLError("Parquet is written to a file: name one with -o, or take another --output-format")
        needs("Parquet", "parquet", "pyarrow", instead="take another --output-format")
    return meant or ("jsonl" if as_json else "tsv")


@dataclass(frozen=True)
class Table:
    """The output of `predict`: kept columns, the best label, and the probability of every label.

    Attributes:
        labels: label words of the task; each has a column.
        kind: file format.
        kept: names of input columns that are repeated.
        numbered: whether the first column is the number of the row.
        waits: whether rows are collected as JSON until `finish` writes the file (CSV and Parquet files).
        least: the label is left empty where its probability is below this; None for never.
    """

    labels: tuple[str, ...]
    kind: OutputFormat = "tsv"
    kept: tuple[str, ...] = ()
    numbered: bool = False
    waits: bool = False
    least: float | None = None

    def __post_init__(self) -> None:
        if self.numbered and NUMBER in self.kept:
            cure = "leave one out"
            raise I2CLError(f"--keep {NUMBER} and --row-number would both be called {NUMBER!r}: {cure}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the repeated columns, as the input has them."""
        return (NUMBER, *self.kept) if self.numbered else self.kept

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns.

        A label named like another column becomes ``probability.NAME``, a kept column ``input.NAME``.
        """
        ours = ["label"]
        for label in self.labels:
            name = label
            while name in ours or (name != label and name in self.labels):
                name = f"probability.{name}"
            ours.append(name)
        names: list[str] = []
        for name in self.names:
            while name in ours or name in names:
                name = f"input.{name}"  # noqa: PLW2901
            names.append(name)
        return (*names, *ours)

    @property
    def renamed(self) -> dict[str, str]:
        """Output names of kept columns that could not keep theirs; JSON Lines nest them, so all do."""
        pairs = zip(self.names, self.columns, strict=False)
        return {} if self.kind == "jsonl" else {name: column for name, column in pairs if name != column}

    @property
    def header(self) -> str:
        """The header line, empty for formats without one."""
        return "" if self.waits or self.kind == "jsonl" else self._line(self.columns)

    def lines(
        self,
        rows: Sequence[Sequence[float] | None],
        kept: Sequence[Sequence[object]] | None = None,
        errors: Sequence[str] | None = None,
    ) -> str:
        """Format rows, each as one line.

        Args:
            rows: a probability per label; None for a row that could not be classified.
            kept: values of the kept columns of each row.
            errors: why each row could not be classified, which only JSON Lines tell; "" where it was.
        """
        each = zip(rows, kept or [()] * len(rows), errors or [""] * len(rows), strict=True)
        return "".join(self._row(list(values), row, error) for row, values, error in each)

    def finish(self, waiting: Path, new: Path) -> str:
        """Write the collected rows to the file ``new``, and return a note for the user, if any."""
        with waiting.open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines)
            return self._parquet(rows, new) if self.kind == "parquet" else self._csv(rows, new)

    def _row(self, kept: list[object], row: Sequence[float] | None, error: str) -> str:
        place = None if row is None else confident_index(row, self.least)
        best = "" if place is None else self.labels[place]
        shares = [None] * len(self.labels) if row is None else [round(value, 6) for value in row]
        if self.waits:
            return json.dumps([*kept, best, *shares], ensure_ascii=False) + "\n"
        if self.kind != "jsonl":
            return self._line([*kept, best, *map(_decimal, shares)])
        record: dict[str, Any] = {"input": dict(zip(self.names, kept, strict=True))} if self.names else {}
        known = {} if row is None else dict(zip(self.labels, shares, strict=True))
        record |= {"label": best, "probabilities": known} | ({"error": error} if error else {})
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _line(self, cells: Iterable[object]) -> str:
        if self.kind == "csv":
            return _csv_line(cells)
        return "\t".join(_text(cell).translate(_NO_BREAKS) for cell in cells) + "\n"

    def formula_note(self, path: Path) -> str:
        """Return a note if cells of a tab-separated file would run as formulas in a spreadsheet."""
        if self.kind != "tsv" or not path.is_file():
            return ""
        with path.open(encoding="utf-8", newline="\n") as file:
            count = sum(_is_formula(cell) for line in file for cell in line.rstrip("\n").split("\t"))
        return _formula_note(count)

    def _csv(self, rows: Iterator[list[Any]], new: Path) -> str:
        formulas = sum(map(_is_formula, self.columns))
        with new.open("w", encoding="utf-8-sig", newline="") as file:  # or Excel takes it for Windows-1252
            file.write(_csv_line(self.columns))
            for row in rows:
                texts = row[: len(self.names) + 1]
                formulas += sum(map(_is_formula, texts))
                file.write(_csv_line([*texts, *map(_decimal, row[len(texts) :])]))
        return _formula_note(formulas)

    def _parquet(self, rows: Iterator[list[Any]], new: Path) -> str:
        arrow: Any = import_module("pyarrow")
        kinds = [arrow.int64()] * self.numbered + [arrow.string()] * (len(self.kept) + 1)
        kinds += [arrow.float64()] * len(self.labels)
        schema = arrow.schema(list(zip(self.columns, kinds, strict=True)))
        with import_module("pyarrow.parquet").ParquetWriter(new, schema) as file:
            while group := list(islice(rows, ROW_GROUP)):
                columns = [list(column) for column in zip(*group, strict=True)]
                for place in range(self.numbered, len(self.names)):
                    columns[place] = [None if cell is None else _text(cell) for cell in columns[place]]
                arrays = [arrow.array(*pair) for pair in zip(columns, kinds, strict=True)]
                file.write_table(arrow.Table.from_arrays(arrays, schema=schema))
        return ""


def _csv_line(cells: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow("" if cell is None else _text(cell) for cell in cells)
    return line.getvalue()


def _decimal(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _text(cell: object) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def _formula_note(count: int) -> str:
    what = f"cells that begin with =, +, - or @: {count}. A spreadsheet takes them for formulas"
    return f"{what}: import them as text if others wrote them" if count else ""


def _is_formula(cell: object) -> bool:
    if not isinstance(cell, str) or not cell.startswith(FORMULAS):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
