"""The numbers of the paper's tables of results, as printed, to set beside measured ones."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Self

from pydantic import model_validator

from i2cl.errors import I2CLError
from i2cl.experiments.grid import Frozen


class PrintedRow(Frozen):
    """One row of a table; accuracies are in percent."""

    # accuracy on each of the table's tasks; empty where only the average is printed
    mean: tuple[float, ...] = ()
    sd: tuple[float, ...] | None = None  # standard deviation on each, or None
    average: float | None = None  # over tasks, as printed, or None
    trainable_thousands: float | None = None  # trained parameters in thousands, or None
    # numbers kept per task in the paper's symbols, such as "2DL" (D: width, L: layers, M: demonstration
    # tokens, 1/K: compression rate), or None
    cached: str | None = None


class PrintedTable(Frozen):
    """One table of the paper."""

    name: str  # of the experiment that it belongs to; tables of several models share it
    paper: str  # its number in the paper, and what it is about
    model: str  # as the paper calls it, shortened
    tasks: tuple[str, ...]  # names of the tasks in the table's order; empty where only averages are printed
    # by name, in the table's order; the method as proposed is "I2CL" in every table
    rows: Mapping[str, PrintedRow]

    @model_validator(mode="after")
    def _one_number_a_task(self) -> Self:
        for name, row in self.rows.items():
            if any(len(numbers) != len(self.tasks) for numbers in (row.mean, row.sd) if numbers is not None):
                raise I2CLError(f"{self.paper}, row {name!r}: give one number for each of {self.tasks}")
        return self


class _File(Frozen):
    models: Mapping[str, tuple[str, ...]]
    own_models: Mapping[str, tuple[str, ...]]
    table: tuple[PrintedTable, ...]


@cache
def _file() -> _File:
    content = (resources.files("i2cl.experiments.report") / "printed.toml").read_text(encoding="utf-8")
    return _File.model_validate(tomllib.loads(content))


def printed_tables(name: str | None = None) -> tuple[PrintedTable, ...]:
    """The paper's tables of results, in its order; raises I2CLError if none has that name."""
    tables = _file().table
    if name is None:
        return tables
    matches = tuple(table for table in tables if table.name == name)
    if not matches:
        known = ", ".join(dict.fromkeys(table.name for table in tables))
        raise I2CLError(f"the paper has no table {name!r}: use one of {known}")
    return matches


def printed_for(name: str, model: str) -> PrintedTable | None:
    """The table of a name that was measured on a model, or None if the paper has none.
    Of a model that a single method needs, such as a prompt compressor's, that method's row alone. Only the
    last part of a model's name counts, and all of it: fine-tuned or instructed variants are other models.
    Raises I2CLError if no table has that name.
    """
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1].casefold()
    tables = printed_tables(name)
    for table in tables:
        if last in map(str.casefold, _file().models[table.model]):
            return table
        for row, models in _file().own_models.items():
            if row in table.rows and last in map(str.casefold, models):
                return table.model_copy(update={"rows": {row: table.rows[row]}})
    return None
