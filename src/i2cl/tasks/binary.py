"""Read rows from Parquet and Excel files with pyarrow and openpyxl (``i2cl[tables]``)."""

import json
import math
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import IO, Any

from i2cl.errors import first_line, require_packages
from i2cl.tasks.files import ReadAsWarning, RowError
from i2cl.tasks.row import Columns, Row

PARQUET_BATCH_ROWS = 4096  # rows in memory at a time


def parquet_rows(handle: IO[bytes], columns: Columns, name: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file, numbered from 1.

    Raises:
        RowError: if the file is damaged or a column is missing.
        I2CLError: if pyarrow is not installed.
    """
    require_packages(f"{name}, a Parquet file,", "tables", "pyarrow", instead="save it as CSV")
    arrow: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    number = 0
    try:
        file = parquet.ParquetFile(handle)
        columns.require(file.schema_arrow.names, name)
        unique_names = list(dict.fromkeys(columns.names))
        for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=unique_names):
            cells = [map(_to_json_value, batch.column(column).to_pylist()) for column in columns.names]
            for values in zip(*cells, strict=True):
                number += 1
                yield Row(f"{name} row {number}", values)
    except (arrow.ArrowException, OSError) as error:
        raise RowError(
            f"{name} is a damaged Parquet file ({first_line(error)}): download or write it again"
        ) from error


def excel_rows(handle: IO[bytes], columns: Columns, name: str) -> Iterator[Row]:
    """Yield the rows of the first sheet of a workbook, numbered as in Excel: the header is row 1.

    Numbers in the text column are converted to strings, as in CSV.

    Raises:
        RowError: if the file is damaged or a column is missing.
        I2CLError: if openpyxl is not installed.
    """
    require_packages(f"{name}, an Excel file,", "tables", "openpyxl", instead="save it as CSV")
    try:
        book = import_module("openpyxl").load_workbook(handle, read_only=True, data_only=True)
    except Exception as error:  # openpyxl raises errors of many unrelated types on damaged files
        raise RowError(f"{name} is a damaged Excel file ({first_line(error)}): save it again") from error
    sheet = book.worksheets[0]
    if len(book.worksheets) > 1:
        message = f"{name} has {len(book.worksheets)} sheets: only the first, {sheet.title!r}, is read"
        warnings.warn(message, ReadAsWarning, stacklevel=2)
    sheet.reset_dimensions()  # some programs write wrong dimensions
    positions: list[int] | None = None
    for number, cells in enumerate(sheet.iter_rows(values_only=True), start=1):
        if all(cell is None for cell in cells):
            continue
        if positions is None:
            header = ["" if cell is None else str(cell).strip() for cell in cells]
            positions = columns.positions(header, name)
            continue
        values = [_to_json_value(cells[index]) if index < len(cells) else None for index in positions]
        if isinstance(values[0], int | float) and not isinstance(values[0], bool):
            values[0] = str(values[0])
        yield Row(f"{name} row {number}", tuple(values))


def _to_json_value(value: object) -> object:
    """Convert a cell to a type that JSON supports: dates and other types to strings, NaN to None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | dict):
        return json.loads(json.dumps(value, default=str))
    return str(value)
