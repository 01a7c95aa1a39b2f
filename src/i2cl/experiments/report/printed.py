"""The numbers that the paper prints, read from ``printed.toml``, and their place beside measured results."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Self

from pydantic import model_validator

from i2cl.errors import I2CLError
from i2cl.experiments.grid import Frozen
from i2cl.experiments.report.results import Line, Results
from i2cl.tasks.loaders import PAPER_TASKS

ROUNDING_ERROR = 0.005  # of the paper's numbers, which have two decimals


class PrintedRow(Frozen):
    """One row of a table. Accuracies are in percent; a field is None if the paper does not print it."""

    mean: tuple[float, ...] = ()  # mean accuracy on each task; empty if only the average is printed
    sd: tuple[float, ...] | None = None  # its standard deviation on each task
    average: float | None = None  # average over tasks, as printed
    trainable_thousands: float | None = None  # trained parameters in thousands
    # numbers stored per task in the paper's symbols, such as "2DL" (D: width, L: layers, M: demonstration
    # tokens, 1/K: compression rate)
    cached: str | None = None


class PrintedTable(Frozen):
    """One table of the paper."""

    name: str  # `Experiment.printed`; tables of several models share it
    paper: str  # number and subject
    model: str  # the paper's name of the model, shortened
    tasks: tuple[str, ...]  # names of the tasks in order; empty if only averages are printed
    rows: Mapping[str, PrintedRow]  # by name, in order; the proposed method is "I2CL" in every table

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
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
    """Return the paper's tables in order, all or those with a name. Raises I2CLError for an unknown name."""
    tables = _file().table
    matches = tuple(table for table in tables if name in (None, table.name))
    if not matches:
        known = ", ".join(dict.fromkeys(table.name for table in tables))
        raise I2CLError(f"the paper has no table {name!r}: use one of {known}")
    return matches


def printed_for(name: str, model: str) -> PrintedTable | None:
    """Return the paper's table of a name for a model, or None if the paper has none.

    For the model of a single method, such as a prompt compressor, the table has only that method's row. The
    last part of the model's name must match exactly, because fine-tuned variants are other models. Raises
    I2CLError for an unknown table name.
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


@dataclass(frozen=True, eq=False)
class Paper:
    """The paper's numbers for an experiment; ``table`` is None if it has none for this model."""

    results: Results
    table: PrintedTable | None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that the paper averages over: those of the table, or all nine if it prints none."""
        return (self.table.tasks if self.table else ()) or PAPER_TASKS

    @property
    def has_averages(self) -> bool:
        """Whether the paper prints an average for any row with results."""
        return any(None in self.numbers(line) for line in self.results.lines)

    def row(self, line: Line) -> PrintedRow | None:
        """Return the paper's row with the name of a line, or None for one number of shots or one source."""
        whole = line.shots is None and line.source is None
        return self.table.rows.get(line.row.name) if self.table is not None and whole else None

    def numbers(self, line: Line) -> dict[str | None, tuple[float, float | None]]:
        """Return the paper's mean and standard deviation of a row by task; the key None is the average."""
        row = self.row(line)
        if self.table is None or row is None:
            return {}
        sds = (*(row.sd or [None] * len(row.mean)), None)
        columns = zip((*self.table.tasks, None), (*row.mean, row.average), sds, strict=True)
        return {task: (mean, sd) for task, mean, sd in columns if mean is not None}

    def disagrees(self, line: Line, task: str | None) -> bool:
        """Whether the paper's number is outside our 95 % interval; averages need the paper's tasks."""
        comparable = task is not None or set(self.results.tasks_of(line)) == set(self.tasks)
        ours = self.results.accuracy(line, task) if comparable else None
        if ours is None or task not in self.numbers(line):
            return False
        mean, _ = self.numbers(line)[task]
        return not 100 * ours.low - ROUNDING_ERROR <= mean <= 100 * ours.high + ROUNDING_ERROR
