"""A store's records, sorted into the lines and tasks of one experiment, with all that is computed of them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Bool

from i2cl.errors import I2CLError
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.grid import Experiment, GridRow, Scale, spread
from i2cl.experiments.records import Record, Run
from i2cl.experiments.statistics import ALPHA, Accuracy, Difference, accuracy, difference
from i2cl.methods import METHODS, is_stochastic

Right = list[Bool[np.ndarray, "_seeds _queries"]]  # by task, as `i2cl.experiments.statistics` wants it

PERMUTATIONS = 9999
# A sampled p-value is at least 2 / permutations, and must be able to survive the correction of a table.
PERMUTATIONS_PER_COMPARISON = 60
LISTED = 6  # names in one note, before "and n more"


@dataclass(frozen=True)
class Setting:
    """What must agree before results are set side by side: the model and the queries."""

    model: str
    revision: str | None
    dtype: str | None
    limit: int | None
    skew: int

    @property
    def words(self) -> str:
        """As shown."""
        parts = [self.model, f"revision {self.revision}" if self.revision is not None else None, self.dtype]
        queries = "all queries" if self.limit is None else f"at most {self.limit} queries per task"
        skew = f"every other class {self.skew} times as frequent" if self.skew > 1 else None
        return ", ".join(part for part in (*parts, queries, skew) if part is not None)


@dataclass(frozen=True)
class Line:
    """A row of an experiment, or its part with one number of demonstrations or one source."""

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
    def transductive(self) -> bool:
        """Whether a query's answer depends on the other queries."""
        return any(METHODS[part].transductive for part in self.row.method.split("+") if part in METHODS)

    @property
    def fixed(self) -> bool:
        """Whether its one seed stands for all, since nothing of it is drawn."""
        return self.row.seeds == 1 and self.row.study == "method" and not is_stochastic(self.row.method)


@dataclass(frozen=True, eq=False)
class Results:
    """What a store holds of one experiment under one setting; what is computed of it is computed once.
    ``left_out`` are tasks that at most half of the rows have; other experiments ran the rest of them.
    """

    experiment: Experiment
    setting: Setting
    tasks: tuple[str, ...]
    cells: tuple[Record, ...]
    left_out: tuple[str, ...] = ()
    _accuracies: dict[tuple[Line, tuple[str, ...]], Accuracy | None] = field(default_factory=dict, init=False)
    _gaps: dict[tuple[Line, Line, str | None], Difference | None] = field(default_factory=dict, init=False)

    @cached_property
    def _records(self) -> dict[tuple[Line, str], dict[int, Record]]:
        """By line, task and seed, without seeds beyond a row's, which another experiment may have run."""
        by_sources: dict[tuple[Line, str], dict[tuple[str, ...], dict[int, Record]]] = defaultdict(dict)
        for record in self.cells:
            cell = record.cell
            for place, row in enumerate(self.experiment.rows):
                if row.holds(cell) and (row.seeds is None or cell.seed < row.seeds):
                    source = cell.sources[0] if row.study == "move" and cell.sources else None
                    line = Line(place, cell.shots if row.shots else None, source, row)
                    sources = cell.sources if row.study == "transfer" else ()
                    by_sources[line, cell.task].setdefault(sources, {})[cell.seed] = record
        # A transfer may have been run from more and from fewer tasks, which do not mix: first, most seeds.
        chosen = {
            place: max(sets.items(), key=lambda one: (len(one[1]), len(one[0])))[1]
            for place, sets in by_sources.items()
        }
        return {place: dict(sorted(seeds.items())) for place, seeds in chosen.items()}

    @cached_property
    def _sorted(self) -> list[Line]:
        at = {task: number for number, task in enumerate(self.tasks)}
        lines = dict.fromkeys(line for line, _ in self._records)  # in one order, whatever hashes are
        return sorted(lines, key=lambda one: (one.place, one.shots or 0, at.get(one.source or "", len(at))))

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Those of rows that stay on their task."""
        return tuple(line for line in self._sorted if line.source is None)

    @cached_property
    def moves(self) -> tuple[Line, ...]:
        """Those of rows that move, one per source."""
        return tuple(line for line in self._sorted if line.source is not None)

    @property
    def rows(self) -> tuple[GridRow, ...]:
        """Rows with any result."""
        there = {line.place for line in self._sorted}
        return tuple(row for place, row in enumerate(self.experiment.rows) if place in there)

    @property
    def default(self) -> GridRow | None:
        """The row that others are tested against, if it is there."""
        return next((row for row in self.rows if row.name == self.experiment.against), None)

    @property
    def scale(self) -> Scale:
        """The experiment's scale that asks for as many queries as there are; else the full one."""
        full, quick = self.experiment.full, self.experiment.quick
        return quick if self.setting.limit == quick.limit != full.limit else full

    @property
    def absent(self) -> list[str]:
        """Tasks that the experiment names, and that have no result."""
        named = self.experiment.tasks
        wanted = () if named == "all" else spread(named, self.scale.tasks)
        return [task for task in wanted if task not in self.tasks]

    def check_queries(self) -> None:
        """Refuse records of one task with different queries, rows, wording or weights (I2CLError)."""
        first: dict[tuple[str, str | None], tuple[object, str]] = {}
        for record in self.cells:
            task, origin = record.cell.task, record.provenance
            traits: dict[tuple[str, str | None], object] = {}
            traits["classify different queries", task] = outcome(record).gold
            if "wording" in origin:  # which older records do not tell
                what = "come from different wordings (template, label words, shots)"
                traits[what, task] = origin["wording"]
            if "rows" in origin:  # of an older record, the weights may have another hash too
                traits["come from different rows", task] = origin["rows"]
                traits["come from different weights", origin.get("dtype")] = origin.get("weights")
            for place, value in traits.items():
                known, key = first.setdefault(place, (value, record.key))
                if known != value:
                    cure = "keep them in stores of their own"
                    raise I2CLError(f"cells {key} and {record.key} {place[0]} of task {task!r}: {cure}")

    def records(self, line: Line, task: str) -> Mapping[int, Record]:
        """Records of a line on a task by seed, in the order of seeds."""
        return self._records.get((line, task), {})

    def outcomes(self, line: Line, task: str) -> list[Run]:
        """Runs of a line on a task, in the order of seeds."""
        return [outcome(record) for record in self.records(line, task).values()]

    def of_default(self, task: str) -> list[Record]:
        """Records of the row that others are tested against on a task, in the order of seeds."""
        lines = [self.records(line, task) for line in self.lines if line.row is self.default]
        return sorted((one for line in lines for one in line.values()), key=lambda one: one.cell.seed)

    def tasks_of(self, line: Line) -> tuple[str, ...]:
        """Tasks that a line has results on."""
        return tuple(task for task in self.tasks if self.records(line, task))

    def shared_seeds(self, line: Line, tasks: Sequence[str]) -> set[int]:
        """Seeds that a line has on all of these tasks."""
        return set.intersection(*(set(self.records(line, task)) for task in tasks)) if tasks else set()

    def _right(self, line: Line, tasks: Sequence[str], seeds: set[int]) -> Right:
        runs = [[outcome(self.records(line, task)[seed]) for seed in sorted(seeds)] for task in tasks]
        return [np.stack([np.equal(run.predictions, run.gold) for run in of_task]) for of_task in runs]

    def accuracy(self, line: Line, task: str | None = None, *, over: tuple[str, ...] = ()) -> Accuracy | None:
        """Accuracy on a task; without one, over all tasks of the line, for the seeds that they share.
        Over some tasks, only these count in the average. None where there is no seed that all tasks have.
        """
        tasks = (task,) if task is not None else over or self.tasks_of(line)
        if (line, tasks) not in self._accuracies:
            seeds = self.shared_seeds(line, tasks)
            self._accuracies[line, tasks] = accuracy(self._right(line, tasks, seeds)) if seeds else None
        return self._accuracies[line, tasks]

    @cached_property
    def most_seeds(self) -> int:
        """Seeds of the scale, or more where a line has more on all tasks."""
        everywhere = [min(len(self.records(line, task)) for task in self.tasks) for line in self.lines]
        return max(self.scale.seeds, *everywhere, 0)

    def lacking(self, line: Line) -> tuple[str, ...]:
        """What a line lacks of its experiment, in words; empty where it is complete."""
        tasks, wanted = self.tasks_of(line), min(self.most_seeds, line.row.seeds or self.most_seeds)
        absent = [task for task in self.tasks if task not in tasks]
        short = {task: n for task in tasks if (n := len(self.records(line, task))) < wanted}
        said = [f"{len(tasks)} of {len(self.tasks)} tasks, not {listing(absent)}"] if absent else []
        if len(set(short.values())) == 1 and len(short) == len(tasks):
            said.append(f"{short[tasks[0]]} of {wanted} seeds")
        elif short:
            on = listing([f"{task} ({n})" for task, n in short.items()])
            said.append(f"fewer than {wanted} seeds on {on}; averaged over the seeds that all its tasks have")
        return tuple(said)

    def difference(self, line: Line, other: Line, task: str | None = None) -> Difference | None:
        """Paired difference, on a task or over all tasks that both lines have; None if they share nothing."""
        if (other.place, other.shots or 0) < (line.place, line.shots or 0):  # each pair is compared once
            gap = self.difference(other, line, task)
            return gap and gap.reversed()
        if (line, other, task) not in self._gaps:
            pair = self._paired(line, other, task)
            needed = PERMUTATIONS_PER_COMPARISON * len(self.lines) * len(self.tasks)
            often = PERMUTATIONS if task is None else max(PERMUTATIONS, needed)
            drawn = not (line.fixed and other.fixed)
            gap = difference(*pair, drawn=drawn, permutations=often) if pair[0] else None
            self._gaps[line, other, task] = gap
        return self._gaps[line, other, task]

    def _paired(self, line: Line, other: Line, task: str | None) -> tuple[Right, Right]:
        """What two lines got right on each task that both have, for the seeds that both have on all of these.
        A line that nothing is drawn for keeps its one seed, which is paired with every seed of the other.
        """
        theirs = self.tasks_of(other)
        tasks = [one for one in self.tasks_of(line) if one in theirs and task in {None, one}]
        seeds, other_seeds = self.shared_seeds(line, tasks), self.shared_seeds(other, tasks)
        if not (line.fixed or other.fixed):
            seeds = other_seeds = seeds & other_seeds
        if not seeds or not other_seeds:
            return [], []
        return self._right(line, tasks, seeds), self._right(other, tasks, other_seeds)

    def reference(self, line: Line) -> Line | None:
        """The line that another is tested against: of the default row, with as many demonstrations."""
        lines = [one for one in self.lines if one.row is self.default]
        matches = [one for one in lines if one.shots == line.shots]
        reference = matches[0] if matches else lines[0] if len(lines) == 1 else None
        return None if reference == line else reference

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
            gap = self.difference(best, other, task)
            if gap is None or gap.low <= 0 or gap.p >= ALPHA or not gap.decidable:
                return None
            p_values.append(gap.p)
        return best if max(holm(p_values)) < ALPHA else None


def outcome(record: Record) -> Run:
    """The outcome of a record that ended well."""
    if record.outcome is None:
        raise ValueError(f"cell {record.key} did not end well")
    return record.outcome


def mean_times(results: Results, line: Line, tasks: Iterable[str]) -> tuple[float, float]:
    """Seconds to fit and milliseconds per query: mean over seeds, then over tasks."""
    each = []
    for outcomes in (results.outcomes(line, task) for task in tasks):
        queries = [1000 * one.predict_seconds / len(one.predictions) for one in outcomes]
        each.append((np.mean([one.fit_seconds for one in outcomes]), np.mean(queries)))
    fit, query = np.mean(each, axis=0)
    return float(fit), float(query)


def listing(names: Sequence[str]) -> str:
    """Names with commas, cut short where there are many."""
    more = len(names) - LISTED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:LISTED])} and {more} more"


def results_of(experiment: Experiment, records: Iterable[Record]) -> list[Results]:
    """Results of an experiment, one for each setting that a store holds, most queries first.
    A cell belongs to an experiment if one of its rows holds it, its task is among the experiment's (or those
    are "all", which leaves out the synthetic task), and it ended well.
    """
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        cell = record.cell
        wanted = cell.task != "synthetic" if experiment.tasks == "all" else cell.task in experiment.tasks
        wanted = wanted and cell.skew in experiment.skews
        if record.status == "done" and wanted and any(row.holds(cell) for row in experiment.rows):
            groups[Setting(cell.model, cell.revision, cell.dtype, cell.limit, cell.skew)].append(record)
    by_setting = [_shared(experiment, setting, group) for setting, group in groups.items()]
    return sorted(by_setting, key=lambda one: (-(one.setting.limit or 10**9), one.setting.skew))


def _shared(experiment: Experiment, setting: Setting, records: Sequence[Record]) -> Results:
    """Results on the tasks that more than half of the rows have."""
    rows: dict[str, set[str]] = defaultdict(set)
    for record in records:
        rows[record.cell.task] |= {row.name for row in experiment.rows if row.holds(record.cell)}
    there = set().union(*rows.values())
    tasks = tuple(sorted(task for task, names in rows.items() if 2 * len(names) > len(there)))
    kept = tuple(record for record in records if record.cell.task in tasks)
    return Results(experiment, setting, tasks, kept, tuple(task for task in rows if task not in tasks))
