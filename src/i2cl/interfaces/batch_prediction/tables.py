"""Output formats of `predict`: tab-separated, CSV, JSON Lines and Parquet.

In TSV and JSON Lines every row is one line, so an interrupted run can resume after the last line. CSV cells
may contain line breaks, and Parquet has no lines: their rows are collected as JSON Lines and converted at the
end.
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

from i2cl.errors import I2CLError, require_packages
from i2cl.tasks.labels import predicted_labels
from i2cl.tasks.task import LABEL_SEPARATOR

OutputFormat = Literal["tsv", "csv", "jsonl", "parquet"]

# Formats by file suffix; any other suffix means tab-separated.
SUFFIXES: dict[str, OutputFormat] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}

ROW_NUMBER_COLUMN = "row"
ROW_GROUP_SIZE = 50_000  # rows of a Parquet file in memory at a time
FORMULA_PREFIXES = ("=", "+", "-", "@")  # first characters that make a cell a formula in a spreadsheet

_BREAKS_TO_SPACES = str.maketrans("\t\r\n", "   ")


def output_format(path: Path | None, named: OutputFormat | None, *, as_json: bool) -> OutputFormat:
    """Return the output format: the named one, else by the suffix of ``path``, else tab-separated.

    Raises:
        I2CLError: if ``--json`` contradicts the format, or Parquet cannot be written.
    """
    requested = named or (SUFFIXES.get(path.suffix.lower()) if path is not None else None)
    if as_json and requested not in {None, "jsonl"}:
        source = "--output-format" if named else f"the suffix of {str(path)!r}"
        raise I2CLError(
            f"--json means JSON Lines, but {source} means {requested}: leave out --json, or change "
            "--output-format"
        )
    if requested == "parquet":
        if path is None or (path.exists() and not path.is_file()):
            raise I2CLError("Parquet needs an output file: give one with -o, or use another --output-format")
        require_packages("Parquet", "parquet", "pyarrow", instead="use another --output-format")
    return requested or ("jsonl" if as_json else "tsv")


@dataclass(frozen=True)
class Table:
    """Formats rows of `predict`: kept columns, the most probable label, and the probability of every label.

    For a multi-label task, the column ``labels`` holds the labels of a text, joined by `LABEL_SEPARATOR`.
    JSON Lines have a list.

    Attributes:
        labels: label words of the task; each has a column of probabilities.
        kind: file format.
        kept: names of input columns to repeat.
        numbered: whether the first column is the row number.
        deferred: whether rows are collected as JSON until `finish` writes the file (CSV and Parquet files).
        min_confidence: the label is left empty if its probability is lower; None to always give it. For a
            multi-label task, it replaces the thresholds.
        thresholds: minimum probability of each label of a multi-label task, else None.
    """

    labels: tuple[str, ...]
    kind: OutputFormat = "tsv"
    kept: tuple[str, ...] = ()
    numbered: bool = False
    deferred: bool = False
    min_confidence: float | None = None
    thresholds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.numbered and ROW_NUMBER_COLUMN in self.kept:
            raise I2CLError(
                f"--keep {ROW_NUMBER_COLUMN} and --row-number would both create a column "
                f"{ROW_NUMBER_COLUMN!r}: leave one out"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns before the label, as in the input."""
        return (ROW_NUMBER_COLUMN, *self.kept) if self.numbered else self.kept

    @property
    def label_name(self) -> str:
        """Name of the column of predicted labels."""
        return "label" if self.thresholds is None else "labels"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all output columns.

        In case of conflicts, labels are renamed to ``probability.NAME`` and kept columns to ``input.NAME``.
        """
        predicted = [self.label_name]
        for label in self.labels:
            name = label
            while name in predicted or (name != label and name in self.labels):
                name = f"probability.{name}"
            predicted.append(name)
        kept: list[str] = []
        for name in self.names:
            while name in predicted or name in kept:
                name = f"input.{name}"  # noqa: PLW2901
            kept.append(name)
        return (*kept, *predicted)

    @property
    def renamed(self) -> dict[str, str]:
        """New names of renamed kept columns; empty for JSON Lines, which nests them under "input"."""
        pairs = zip(self.names, self.columns, strict=False)
        return {} if self.kind == "jsonl" else {name: column for name, column in pairs if name != column}

    @property
    def header(self) -> str:
        """The header line; empty for formats without one."""
        return "" if self.deferred or self.kind == "jsonl" else self._line(self.columns)

    def lines(
        self,
        rows: Sequence[Sequence[float] | None],
        kept: Sequence[Sequence[object]] | None = None,
        errors: Sequence[str] | None = None,
    ) -> str:
        """Format rows, each as one line.

        Args:
            rows: probability of each label; None for a row that could not be classified.
            kept: values of the kept columns of each row.
            errors: why each row could not be classified, "" if it could. Only JSON Lines include it.
        """
        records = zip(rows, kept or [()] * len(rows), errors or [""] * len(rows), strict=True)
        return "".join(self._row(list(values), row, error) for row, values, error in records)

    def finish(self, collected: Path, new: Path) -> str:
        """Convert the collected rows to the file ``new``, and return a note for the user ("" for none)."""
        with collected.open(encoding="utf-8") as lines:
            rows = (json.loads(line) for line in lines)
            return self._parquet(rows, new) if self.kind == "parquet" else self._csv(rows, new)

    def _row(self, kept: list[object], row: Sequence[float] | None, error: str) -> str:
        chosen = () if row is None else predicted_labels(row, self.thresholds, self.min_confidence)
        words = [self.labels[index] for index in chosen]
        label = LABEL_SEPARATOR.join(words)
        probabilities = [None] * len(self.labels) if row is None else [round(value, 6) for value in row]
        if self.deferred:
            return json.dumps([*kept, label, *probabilities], ensure_ascii=False) + "\n"
        if self.kind != "jsonl":
            return self._line([*kept, label, *map(_decimal, probabilities)])
        record: dict[str, Any] = {"input": dict(zip(self.names, kept, strict=True))} if self.names else {}
        by_label = {} if row is None else dict(zip(self.labels, probabilities, strict=True))
        record |= {self.label_name: label if self.thresholds is None else words, "probabilities": by_label}
        record |= {"error": error} if error else {}
        return json.dumps(record, ensure_ascii=False) + "\n"

    def _line(self, cells: Iterable[object]) -> str:
        if self.kind == "csv":
            return _csv_line(cells)
        return "\t".join(_text(cell).translate(_BREAKS_TO_SPACES) for cell in cells) + "\n"

    def formula_note(self, path: Path) -> str:
        """Return a note if a spreadsheet would interpret cells of a tab-separated file as formulas."""
        if self.kind != "tsv" or not path.is_file():
            return ""
        with path.open(encoding="utf-8", newline="\n") as file:
            count = sum(is_formula(cell) for line in file for cell in line.rstrip("\n").split("\t"))
        return formula_note(count)

    def _csv(self, rows: Iterator[list[Any]], new: Path) -> str:
        formulas = sum(map(is_formula, self.columns))
        with new.open("w", encoding="utf-8-sig", newline="") as file:  # Excel needs the BOM
            file.write(_csv_line(self.columns))
            for row in rows:
                texts = row[: len(self.names) + 1]
                formulas += sum(map(is_formula, texts))
                file.write(_csv_line([*texts, *map(_decimal, row[len(texts) :])]))
        return formula_note(formulas)

    def _parquet(self, rows: Iterator[list[Any]], new: Path) -> str:
        arrow: Any = import_module("pyarrow")
        types = [arrow.int64()] * self.numbered + [arrow.string()] * (len(self.kept) + 1)
        types += [arrow.float64()] * len(self.labels)
        schema = arrow.schema(list(zip(self.columns, types, strict=True)))
        with import_module("pyarrow.parquet").ParquetWriter(new, schema) as file:
            while group := list(islice(rows, ROW_GROUP_SIZE)):
                columns = [list(column) for column in zip(*group, strict=True)]
                for index in range(self.numbered, len(self.names)):
                    columns[index] = [None if cell is None else _text(cell) for cell in columns[index]]
                arrays = [arrow.array(*pair) for pair in zip(columns, types, strict=True)]
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


def formula_note(count: int) -> str:
    """Return a note on this number of cells that a spreadsheet interprets as formulas; "" for none."""
    if not count:
        return ""
    return (
        f"cells that begin with =, +, - or @: {count}. A spreadsheet interprets them as formulas: import "
        "them as text if you do not trust the input"
    )


def is_formula(cell: object) -> bool:
    """Return whether a spreadsheet would interpret a cell as a formula."""
    if not isinstance(cell, str) or not cell.startswith(FORMULA_PREFIXES):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False
