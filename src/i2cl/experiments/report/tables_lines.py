"""The lines of an experiment's tables, with everything computed about them kept for the next table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from i2cl.errors import I2CLError
from i2cl.experiments.grid import GridRow, Scale, spread
from i2cl.experiments.printed import PrintedTable, printed_for
from i2cl.experiments.records import Record
from i2cl.experiments.report.results import Results, outcome, right
from i2cl.experiments.report.tables_model import listing
from i2cl.experiments.statistics import ALPHA, Accuracy, Difference, accuracy, difference, holm

Right = list[Bool[np.ndarray, "_seeds _queries"]]  # by task, as `i2cl.experiments.statistics` wants it

PERMUTATIONS = 9999
PERMUTATIONS_PER_COMPARISON = 60
"""A sampled p-value is at least 2 / permutations, and must be able to survive the correction of a table."""


@dataclass(frozen=True)
class Line:
    """A row of an experiment, or the part of it with one number of demonstrations or one source.

    Attributes:
        place: of the row in the experiment.
        shots: demonstrations per class, where the row has several numbers of them.
        source: task that was moved from, where the row moves.
        row: itself.
    """

    place: int
    shots: int | None
    source: str | None
    row: GridRow = field(compare=False)  # its options cannot be hashed

    @property
    def name(self) -> str:
        """As shown."""
        shots = f", {self.shots} per class" if self.shots is not None else ""
        return self.row.name + shots + (f", from {self.source}" if self.source is not None else "")

    @property
    def whole(self) -> bool:
        """Whether it is all of its row, which alone can stand beside a row of the paper."""
        return self.shots is None and self.source is None


Printed = Callable[[str, str], PrintedTable | None]
"""Finds the paper's table by name and model, like `i2cl.experiments.printed.printed_for`."""


class Comparisons:
    """Accuracies, differences and what is lacking, each computed once.

    Attributes:
        results: of one experiment under one setting.
        tasks: those with any result.
        lines: those of rows that stay on their task.
        moves: those of rows that move, one per source.
        printed: the paper's table for this experiment and model, or None.
    """

    def __init__(self, results: Results, printed: Printed = printed_for) -> None:
        self.results = results
        self.tasks = results.tasks
        self._records = _sorted_in(results)
        lines = sorted({line for line, _ in self._records}, key=self._order)
        self.lines = tuple(line for line in lines if line.source is None)
        self.moves = tuple(line for line in lines if line.source is not None)
        name = results.experiment.printed
        self.printed = printed(name, results.setting.model) if name else None
        self._accuracies: dict[tuple[Line, str | None], Accuracy | None] = {}
        self._differences: dict[tuple[Line, Line, str | None], Difference | None] = {}

    def _order(self, line: Line) -> tuple[int, int, int]:
        known = line.source in self.tasks
        return line.place, line.shots or 0, self.tasks.index(line.source or "") if known else len(self.tasks)

    @cached_property
    def scale(self) -> Scale:
        """The experiment's scale that asks for as many queries as there are; else the full one."""
        full, quick = self.results.experiment.full, self.results.experiment.quick
        return quick if self.results.setting.limit == quick.limit != full.limit else full

    def wanted_seeds(self, line: Line) -> int:
        """How many seeds the experiment asks for."""
        return min(self.scale.seeds, line.row.seeds or self.scale.seeds)

    def wanted_tasks(self) -> tuple[str, ...]:
        """Tasks that the experiment names, or else those with any result."""
        named = self.results.experiment.tasks
        return self.tasks if named == "all" else spread(named, self.scale.tasks)

    def records(self, line: Line, task: str) -> Mapping[int, Record]:
        """Records of a line on a task by seed."""
        return self._records.get((line, task), {})

    def sizes(self, line: Line, task: str) -> tuple[int, int]:
        """How many seeds a line has on a task, and of how many queries."""
        found = self.records(line, task)
        return len(found), len(outcome(next(iter(found.values()))).predictions)

    def tasks_of(self, line: Line) -> tuple[str, ...]:
        """Tasks that a line has results on."""
        return tuple(task for task in self.tasks if self.records(line, task))

    def _shared_seeds(self, line: Line, tasks: Sequence[str]) -> set[int]:
        return set.intersection(*(set(self.records(line, task)) for task in tasks)) if tasks else set()

    def _right(self, line: Line, tasks: Sequence[str], seeds: set[int]) -> Right:
        return [right([self.records(line, task)[seed] for seed in sorted(seeds)]) for task in tasks]

    def accuracy(self, line: Line, task: str | None = None) -> Accuracy | None:
        """Accuracy on a task; without one, over all tasks of the line, for the seeds that they share."""
        if (line, task) not in self._accuracies:
            tasks = self.tasks_of(line) if task is None else (task,)
            seeds = self._shared_seeds(line, tasks)
            found = accuracy(self._right(line, tasks, seeds)) if seeds else None
            self._accuracies[line, task] = found
        return self._accuracies[line, task]

    def lacking(self, line: Line) -> tuple[str, ...]:
        """What a line lacks of its experiment, in words; empty where it is complete."""
        tasks, wanted = self.tasks_of(line), self.wanted_seeds(line)
        absent = [task for task in self.tasks if task not in tasks]
        short = {task: n for task in tasks if (n := len(self.records(line, task))) < wanted}
        parts = [f"{len(tasks)} of {len(self.tasks)} tasks, not {listing(absent)}"] if absent else []
        if short and len(set(short.values())) == 1 and len(short) == len(tasks):
            parts.append(f"{next(iter(short.values()))} of {wanted} seeds")
        elif short:
            on = listing([f"{task} ({n})" for task, n in short.items()])
            parts.append(
                f"fewer than {wanted} seeds on {on}; averaged over the seeds that all its tasks have"
            )
        return tuple(parts)

    def difference(self, line: Line, other: Line, task: str | None = None) -> Difference | None:
        """Paired difference, on a task or over all tasks that both lines have; None if they share nothing."""
        if (other.place, other.shots or 0) < (line.place, line.shots or 0):  # each pair is compared once
            found = self.difference(other, line, task)
            return found and replace(found, mean=0.0 - found.mean, low=0.0 - found.high, high=0.0 - found.low)
        if (line, other, task) not in self._differences:
            pair = self.paired(line, other, task)
            asked = PERMUTATIONS_PER_COMPARISON * len(self.lines) * len(self.tasks)
            often = PERMUTATIONS if task is None else max(PERMUTATIONS, asked)
            self._differences[line, other, task] = difference(*pair, permutations=often) if pair[0] else None
        return self._differences[line, other, task]

    def paired(self, line: Line, other: Line, task: str | None = None) -> tuple[Right, Right]:
        """What two lines got right on each task that both have, for the seeds that both have on all of these.

        A line with one seed by nature keeps it: it is paired with every seed of the other.
        """
        theirs = self.tasks_of(other)
        tasks = [one for one in self.tasks_of(line) if one in theirs and task in {None, one}]
        seeds = self._shared_seeds(line, tasks), self._shared_seeds(other, tasks)
        if 1 not in {line.row.seeds, other.row.seeds}:
            seeds = (seeds[0] & seeds[1],) * 2
        if not all(seeds):
            return [], []
        return self._right(line, tasks, seeds[0]), self._right(other, tasks, seeds[1])

    def reference(self, line: Line) -> Line | None:
        """The line that another is tested against: of the default row, with as many demonstrations."""
        default = self.results.default
        lines = [one for one in self.lines if default is not None and one.row is default]
        alike = [one for one in lines if one.shots == line.shots]
        found = alike[0] if alike else lines[0] if len(lines) == 1 else None
        return None if found == line else found

    def leader(self, task: str | None = None) -> Line | None:
        """The best line, if it can be told from every other; without a task, by average over all tasks."""
        means = {line: got.mean for line in self.lines if (got := self.accuracy(line, task))}
        if len(means) < 2:
            return None
        best, *others = sorted(means, key=lambda line: -means[line])
        if task is None and self.tasks_of(best) != self.tasks:
            return None
        p_values = []
        for other in others:  # the closest first: most often it ends the search, and tests are slow
            found = self.difference(best, other, task)
            if found is None or found.low <= 0 or found.p >= ALPHA or found.seeds < 2:
                return None
            p_values.append(found.p)
        return best if bool((holm(p_values) < ALPHA).all()) else None


def _sorted_in(results: Results) -> dict[tuple[Line, str], dict[int, Record]]:
    found: dict[tuple[Line, str], dict[int, Record]] = {}
    first: dict[str, Record] = {}
    for record in results.records:
        cell = record.cell
        asked = first.setdefault(cell.task, record)
        if outcome(asked).gold != outcome(record).gold:
            raise I2CLError(
                f"cells {asked.key} and {record.key} classify different queries of task {cell.task!r}: "
                "keep them in stores of their own"
            )
        for place, row in enumerate(results.experiment.rows):
            if row.holds(cell) and (row.seeds is None or cell.seed < row.seeds):
                source = cell.sources[0] if row.study == "move" and cell.sources else None
                line = Line(place, cell.shots if len(row.shots) > 1 else None, source, row)
                seeds = found.setdefault((line, cell.task), {})
                # A transfer may have been run from more and from fewer tasks: the most counts.
                if cell.seed not in seeds or len(cell.sources) >= len(seeds[cell.seed].cell.sources):
                    seeds[cell.seed] = record
    return found
