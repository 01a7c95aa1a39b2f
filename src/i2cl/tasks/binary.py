"""Rows of Parquet and Excel files, read in chunks with pyarrow and openpyxl (``i2cl[tables]``)."""

import json
import math
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import IO, Any

from i2cl.errors import first_line, needs
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.row import Columns, Row

BATCH = 4096  # rows of a Parquet file in memory at a time


def parquet_rows(handle: IO[bytes], columns: Columns, where: str) -> Iterator[Row]:
    """Read the rows of a Parquet file, numbered from 1. Raises RowError on a damaged file or missing column,
    I2CLError without pyarrow.
    """
    needs(f"{where}, a Parquet file,", "tables", "pyarrow", instead="save it as CSV")
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    number = 0
    try:
        file = parquet.ParquetFile(handle)
        columns.require(file.schema_arrow.names, where)
        for batch in file.iter_batches(batch_size=BATCH, columns=list(dict.fromkeys(columns.names))):
            cells = [map(_plain, batch.column(name).to_pylist()) for name in columns.names]
            for values in zip(*cells, strict=True):
                number += 1
                yield Row(f"{where} row {number}", values)
    except (arrow.ArrowException, OSError) as error:
        what = f"{where} is a damaged Parquet file ({first_line(error)})"
        raise RowError(f"{what}: download or write it again") from error


def excel_rows(handle: IO[bytes], columns: Columns, where: str) -> Iterator[Row]:
    """Read the rows of the first sheet of a workbook, numbered as there: the header is row 1.

    Numbers in the text column are taken as text, as they would be in CSV. Raises RowError on a damaged file
    or missing column, I2CLError without openpyxl.
    """
    needs(f"{where}, an Excel file,", "tables", "openpyxl", instead="save it as CSV")
    try:
        book = import_module("openpyxl").load_workbook(handle, read_only=True, data_only=True)
    except Exception as error:  # openpyxl raises many kinds on a damaged file, with no common class
        what = f"{where} is a damaged Excel file ({first_line(error)})"
        raise RowError(f"{what}: save it again") from error
    sheet = book.worksheets[0]
    if len(book.worksheets) > 1:
        line = f"{where} is read from the first of its {len(book.worksheets)} sheets, {sheet.title!r}"
        warnings.warn(line, ReadAsWarning, stacklevel=2)
    sheet.reset_dimensions()  # some programs write wrong ones
    positions: list[int] | None = None
    for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
        if all(cell is None for cell in cells):
            continue
        if positions is None:
            header = ["" if cell is None else str(cell).strip() for cell in cells]
            columns.require_once(header, where)
            columns.require(header, where, header=True)
            positions = [header.index(name) for name in columns.names]
            continue
        values = [_plain(cells[place]) if place < len(cells) else None for place in positions]
        if isinstance(values[0], int | float) and not isinstance(values[0], bool):
            values[0] = str(values[0])
        yield Row(f"{where} row {number}", tuple(values))


def _plain(value: object) -> object:
    """Return a cell as JSON has it: dates and other types as strings, NaN as None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | dict):
        return json.loads(json.dumps(value, default=str))
    return str(value)
