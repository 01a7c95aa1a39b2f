"""A store's records, sorted into the rows and tasks of one experiment."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from i2cl.experiments.grid import Experiment, GridRow
from i2cl.experiments.records import Record, Run


@dataclass(frozen=True)
class Setting:
    """What must agree before results are set side by side: the model and the queries."""

    model: str
    revision: str | None
    dtype: str | None
    limit: int | None


@dataclass(frozen=True)
class Results:
    """What a store holds of one experiment under one setting.

    Attributes:
        experiment: rows and views.
        setting: model and queries.
        tasks: those with any result, in the order of first appearance.
        records: those that ended well.
        left_out: tasks that at most half of the rows have; other experiments ran the rest of them.
    """

    experiment: Experiment
    setting: Setting
    tasks: tuple[str, ...]
    records: tuple[Record, ...]
    left_out: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[GridRow, ...]:
        """Rows with any result."""
        return tuple(row for row in self.experiment.rows if any(row.holds(one.cell) for one in self.records))

    @property
    def default(self) -> GridRow | None:
        """The row that others are tested against: "I2CL", if it is there."""
        return next((row for row in self.rows if row.name == "I2CL"), None)

    @cached_property
    def _sorted(self) -> dict[tuple[str, str, int | None], list[Record]]:
        """Records by row, task and number of demonstrations, each in the order of seeds.

        Another experiment may have run more seeds than a row has, and a transfer from fewer tasks: such
        records are left out.
        """
        kept: dict[tuple[str, str, int | None], dict[tuple[int, str], Record]] = defaultdict(dict)
        for record in sorted(self.records, key=lambda one: len(one.cell.sources)):
            cell = record.cell
            for row in self.experiment.rows:
                if row.holds(cell) and (row.seeds is None or cell.seed < row.seeds):
                    source = cell.sources[0] if row.study == "move" else ""
                    kept[row.name, cell.task, cell.shots][cell.seed, source] = record
        return {place: [found[one] for one in sorted(found)] for place, found in kept.items()}

    def of(self, row: GridRow, task: str, shots: int | None = None) -> list[Record]:
        """Records of a row on a task, in the order of seeds; one per seed, and per source where it moves.

        Args:
            row: of the experiment.
            task: target task.
            shots: demonstrations per class, where the row has several; None for all of them.
        """
        curve = (shots,) if shots is not None else row.shots or (None,)
        found = [record for count in curve for record in self._sorted.get((row.name, task, count), [])]
        return sorted(found, key=lambda one: one.cell.seed)


def outcome(record: Record) -> Run:
    """The outcome of a record that ended well."""
    if record.outcome is None:
        raise ValueError(f"cell {record.key} did not end well")
    return record.outcome


def right(records: Sequence[Record]) -> Bool[np.ndarray, "seeds queries"]:
    """Whether each query was classified rightly, by seed."""
    if not records:
        return np.zeros((0, 0), dtype=bool)
    found = [np.equal(outcome(one).predictions, outcome(one).gold) for one in records]
    return np.stack(found)


def results_of(experiment: Experiment, records: Iterable[Record]) -> list[Results]:
    """Results of an experiment, one for each setting that a store holds, most queries first.

    A cell belongs to an experiment if one of its rows holds it, its task is among the experiment's (or
    those are "all", which leaves out the synthetic task), and it ended well.
    """
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        cell = record.cell
        wanted = cell.task != "synthetic" if experiment.tasks == "all" else cell.task in experiment.tasks
        if record.status == "done" and wanted and any(row.holds(cell) for row in experiment.rows):
            groups[Setting(cell.model, cell.revision, cell.dtype, cell.limit)].append(record)
    found = [_shared(experiment, setting, group) for setting, group in groups.items()]
    return sorted(found, key=lambda one: -(one.setting.limit or 10**9))


def _shared(experiment: Experiment, setting: Setting, records: Sequence[Record]) -> Results:
    """Results on the tasks that more than half of the rows have."""
    rows: dict[str, set[str]] = defaultdict(set)
    for record in records:
        rows[record.cell.task] |= {row.name for row in experiment.rows if row.holds(record.cell)}
    there = set().union(*rows.values())
    tasks = tuple(task for task, names in rows.items() if 2 * len(names) > len(there))
    kept = tuple(record for record in records if record.cell.task in tasks)
    return Results(experiment, setting, tasks, kept, tuple(task for task in rows if task not in tasks))
