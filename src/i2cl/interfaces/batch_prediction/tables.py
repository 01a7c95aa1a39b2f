"""How predictions are written: tab-separated, CSV, JSON Lines or Parquet.

Tabs and JSON Lines have a line for each row, so a killed run goes on behind the last of them. CSV whose cells
hold line breaks, and Parquet, have not: their rows wait as lines of JSON, and are written at the end.
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
from i2cl.injections.confidence import sure_place

OutputFormat = Literal["tsv", "csv", "jsonl", "parquet"]

# What a file's ending says; any other one is tab-separated.
ENDINGS: dict[str, OutputFormat] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
ENDINGS |= {".parquet": "parquet"}

NUMBER = "row"  # what the number of a row is called
ROW_GROUP = 50_000  # rows of a Parquet file that are held in memory at a time
FORMULAS = ("=", "+", "-", "@")  # what a spreadsheet takes the rest of a cell for a formula behind

_NO_BREAKS = str.maketrans("\t\r\n", "   ")


def output_format(path: Path | None, named: OutputFormat | None, *, as_json: bool) -> OutputFormat:
    """What OUT is written as: what is named, or what its ending says, else tab-separated. Raises I2CLError if
    ``--json`` says something else, or Parquet has no file to go to.
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
    """A row for each text: what is kept of it, the best label, and every label's probability."""

    labels: tuple[str, ...]  # of the task; each has a column
    kind: OutputFormat = "tsv"  # how it is written
    kept: tuple[str, ...] = ()  # names of columns that are repeated
    numbered: bool = False  # whether the number of the row is, before them
    waits: bool = False  # whether rows wait for `finish`, as those of a file of CSV or Parquet do
    least: float | None = None  # the label is empty where its probability is below it; None for never

    def __post_init__(self) -> None:
        if self.numbered and NUMBER in self.kept:
            cure = "leave one out"
            raise I2CLError(f"--keep {NUMBER} and --row-number would both be called {NUMBER!r}: {cure}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of what is repeated."""
        return (NUMBER, *self.kept) if self.numbered else self.kept

    @property
    def columns(self) -> tuple[str, ...]:
        """All names; a label that is called like another column is ``probability.NAME``, and a kept column
        that is called like one of ours, or one before, ``input.NAME``.
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
    def header(self) -> str:
        """The line before the first row."""
        return "" if self.waits or self.kind == "jsonl" else self._line(self.columns)

    def lines(self, rows: Sequence[Sequence[float]], kept: Sequence[Sequence[object]] | None = None) -> str:
        """A line for each row: a probability per label, and values of the columns that are kept, if any."""
        pairs = zip(rows, kept or [()] * len(rows), strict=True)
        return "".join(self._row(list(values), row) for row, values in pairs)

    def finish(self, waiting: Path, new: Path) -> str:
        """Write the rows that waited, and say what somebody should know of them."""
        with waiting.open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines)
            return self._parquet(rows, new) if self.kind == "parquet" else self._csv(rows, new)

    def _row(self, kept: list[object], row: Sequence[float]) -> str:
        place = sure_place(row, self.least)
        best = "" if place is None else self.labels[place]
        if self.waits:
            return json.dumps([*kept, best, *(round(value, 6) for value in row)], ensure_ascii=False) + "\n"
        if self.kind != "jsonl":
            return self._line([*kept, best, *(f"{value:.6f}" for value in row)])
        record: dict[str, Any] = {"input": dict(zip(self.names, kept, strict=True))} if self.names else {}
        pairs = zip(self.labels, row, strict=True)
        record |= {"label": best, "probabilities": {label: round(value, 6) for label, value in pairs}}
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _line(self, cells: Iterable[object]) -> str:
        if self.kind == "csv":
            return _csv_line(cells)
        return "\t".join(_text(cell).translate(_NO_BREAKS) for cell in cells) + "\n"

    def _csv(self, rows: Iterator[list[Any]], new: Path) -> str:
        formulas = 0
        with new.open("w", encoding="utf-8-sig", newline="") as file:  # Excel takes it for Windows-1252 else
            file.write(_csv_line(self.columns))
            for row in rows:
                texts = row[: len(self.names) + 1]
                formulas += sum(_is_formula(cell) for cell in texts)
                file.write(_csv_line([*texts, *(f"{value:.6f}" for value in row[len(texts) :])]))
        what = f"cells that begin with =, +, - or @: {formulas}. A spreadsheet takes them for formulas"
        return f"{what}: import them as text if others wrote them" if formulas else ""

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


def _text(cell: object) -> str:
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def _is_formula(cell: object) -> bool:
    if not isinstance(cell, str) or not cell.startswith(FORMULAS):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
