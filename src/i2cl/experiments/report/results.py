"""Results of one experiment: a store's records by line and task, and the statistics computed from them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from i2cl.errors import I2CLError
from i2cl.experiments.confidence import confidence
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.grid import Experiment, GridRow, Scale, spread
from i2cl.experiments.records import Record, Run
from i2cl.experiments.statistics import ALPHA, Accuracy, Comparison, Difference, accuracy, difference
from i2cl.injections.temperature import best_temperature, log_softmax
from i2cl.methods import METHODS, is_stochastic

Correct = list[Bool[np.ndarray, "_seeds _queries"]]  # by task, see `i2cl.experiments.statistics.Result`

Key = TypeVar("Key")

PERMUTATIONS = 9999
# a sampled p-value is at least 2 / permutations; this many per test let it survive Holm's correction
PERMUTATIONS_PER_COMPARISON = 60
MAX_LISTED = 6  # names in a note before "and n more"


@dataclass(frozen=True)
class Setting:
    """Model and queries of comparable results."""

    model: str
    revision: str | None
    dtype: str | None
    limit: int | None
    skew: int

    @property
    def words(self) -> str:
        """Description for a report."""
        parts = [self.model, f"revision {self.revision}" if self.revision is not None else None, self.dtype]
        queries = "all queries" if self.limit is None else f"at most {self.limit} queries per task"
        skew = f"every other class {self.skew} times as frequent" if self.skew > 1 else None
        return ", ".join(part for part in (*parts, queries, skew) if part is not None)


@dataclass(frozen=True)
class Line:
    """A row of an experiment, with one number of demonstrations and one source if it has several.

    Attributes:
        index: position of the row in the experiment.
        shots: demonstrations per class; None for the task's own number.
        source: task that a ``move`` row injects from; None for other rows.
        row: the row.
    """

    index: int
    shots: int | None
    source: str | None
    row: GridRow = field(compare=False)  # its options are not hashable

    @property
    def name(self) -> str:
        """Name in a report."""
        shots = f", {self.shots} per class" if self.shots is not None else ""
        return self.row.name + shots + (f", from {self.source}" if self.source is not None else "")

    @property
    def transductive(self) -> bool:
        """Whether a prediction depends on the other queries."""
        return any(METHODS[part].is_transductive for part in self.row.method.split("+") if part in METHODS)

    @property
    def fixed(self) -> bool:
        """Whether the method is deterministic, so that one seed gives all there is."""
        return self.row.seeds == 1 and self.row.study == "method" and not is_stochastic(self.row.method)


@dataclass(frozen=True, eq=False)
class Results:
    """Results of one experiment in one setting, with cached statistics.

    Attributes:
        experiment: the experiment.
        setting: model and queries of all records.
        tasks: names of the tasks in the report.
        cells: records of these tasks.
        left_out: tasks with results for at most half of the rows, such as those of another experiment.
    """

    experiment: Experiment
    setting: Setting
    tasks: tuple[str, ...]
    cells: tuple[Record, ...]
    left_out: tuple[str, ...] = ()
    _accuracies: dict[tuple[Line, tuple[str, ...]], Accuracy | None] = field(default_factory=dict, init=False)
    _differences: dict[tuple[Line, Line, str | None], Difference | None] = field(
        default_factory=dict, init=False
    )

    @cached_property
    def _records(self) -> dict[tuple[Line, str], dict[int, Record]]:
        """Records by line, task and seed, without seeds above a row's maximum."""
        by_sources: dict[tuple[Line, str], dict[tuple[str, ...], dict[int, Record]]] = defaultdict(dict)
        for record in self.cells:
            cell = record.cell
            for index, row in enumerate(self.experiment.rows):
                if row.holds(cell) and (row.seeds is None or cell.seed < row.seeds):
                    source = cell.sources[0] if row.study == "move" and cell.sources else None
                    line = Line(index, cell.shots if row.shots else None, source, row)
                    sources = cell.sources if row.study == "transfer" else ()
                    by_sources[line, cell.task].setdefault(sources, {})[cell.seed] = record
        # transfers from different sets of tasks are not comparable: use the set with the most seeds
        chosen = {
            key: max(sets.items(), key=lambda item: (len(item[1]), len(item[0])))[1]
            for key, sets in by_sources.items()
        }
        return {key: dict(sorted(seeds.items())) for key, seeds in chosen.items()}

    @cached_property
    def _sorted(self) -> list[Line]:
        at = {task: number for number, task in enumerate(self.tasks)}
        lines = dict.fromkeys(line for line, _ in self._records)  # deterministic order, unlike a set
        return sorted(
            lines, key=lambda line: (line.index, line.shots or 0, at.get(line.source or "", len(at)))
        )

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Lines of all rows except ``move`` rows."""
        return tuple(line for line in self._sorted if line.source is None)

    @cached_property
    def moves(self) -> tuple[Line, ...]:
        """Lines of ``move`` rows, one per source."""
        return tuple(line for line in self._sorted if line.source is not None)

    @property
    def rows(self) -> tuple[GridRow, ...]:
        """Rows with any result."""
        present = {line.index for line in self._sorted}
        return tuple(row for index, row in enumerate(self.experiment.rows) if index in present)

    @property
    def reference_row(self) -> GridRow | None:
        """The row that others are tested against, if it has results."""
        return next((row for row in self.rows if row.name == self.experiment.against), None)

    @property
    def scale(self) -> Scale:
        """The experiment's quick scale if only that has this number of queries, else the full scale."""
        full, quick = self.experiment.full, self.experiment.quick
        return quick if self.setting.limit == quick.limit != full.limit else full

    @property
    def missing_tasks(self) -> list[str]:
        """Tasks that the experiment names and that have no results."""
        named = self.experiment.tasks
        expected = () if named == "all" else spread(named, self.scale.tasks)
        return [task for task in expected if task not in self.tasks]

    def check_comparable(self) -> None:
        """Raise I2CLError if records of a task differ in their queries, rows, wording or weights."""
        first: dict[tuple[str, str | None], tuple[object, str]] = {}
        for record in self.cells:
            task, origin = record.cell.task, record.provenance
            traits: dict[tuple[str, str | None], object] = {
                ("classify different queries", task): outcome(record).gold,
                ("come from different wordings (template, label words, shots)", task): origin.get("wording"),
                ("come from different rows", task): origin.get("rows"),
            }
            if "rows" in origin:  # older records hash weights differently
                traits["come from different weights", origin.get("dtype")] = origin.get("weights")
            for trait, value in traits.items():
                expected, key = first.setdefault(trait, (value, record.key)) if value else (value, "")
                if expected != value:
                    raise I2CLError(
                        f"cells {key} and {record.key} {trait[0]} of task {task!r}: use separate stores"
                    )

    def records(self, line: Line, task: str) -> Mapping[int, Record]:
        """Return the records of a line on a task by seed, in the order of seeds."""
        return self._records.get((line, task), {})

    def outcomes(self, line: Line, task: str) -> list[Run]:
        """Return the runs of a line on a task, in the order of seeds."""
        return [outcome(record) for record in self.records(line, task).values()]

    def reference_records(self, task: str) -> list[Record]:
        """Return the records of the reference row on a task, in the order of seeds."""
        lines = [self.records(line, task) for line in self.lines if line.row is self.reference_row]
        return sorted(
            (record for line in lines for record in line.values()), key=lambda record: record.cell.seed
        )

    def tasks_of(self, line: Line) -> tuple[str, ...]:
        """Return the tasks that a line has results on."""
        return tuple(task for task in self.tasks if self.records(line, task))

    def shared_seeds(self, line: Line, tasks: Sequence[str]) -> set[int]:
        """Return the seeds that a line has on all of these tasks."""
        return set.intersection(*(set(self.records(line, task)) for task in tasks)) if tasks else set()

    def _correct(self, line: Line, tasks: Sequence[str], seeds: set[int]) -> Correct:
        runs = [[outcome(self.records(line, task)[seed]) for seed in sorted(seeds)] for task in tasks]
        return [np.stack([np.equal(run.predictions, run.gold) for run in of_task]) for of_task in runs]

    def accuracy(self, line: Line, task: str | None = None, *, over: tuple[str, ...] = ()) -> Accuracy | None:
        """Return the accuracy on a task, or the average over the tasks ``over`` (default: all of the line).

        An average uses the seeds that the line has on every task; None if there is no such seed.
        """
        tasks = (task,) if task is not None else over or self.tasks_of(line)
        if (line, tasks) not in self._accuracies:
            seeds = self.shared_seeds(line, tasks)
            self._accuracies[line, tasks] = accuracy(self._correct(line, tasks, seeds)) if seeds else None
        return self._accuracies[line, tasks]

    @cached_property
    def expected_seeds(self) -> int:
        """Number of seeds of the scale, or more if a line has more on all tasks."""
        on_all_tasks = [min(len(self.records(line, task)) for task in self.tasks) for line in self.lines]
        return max(self.scale.seeds, *on_all_tasks, 0)

    def gaps(self, line: Line) -> tuple[str, ...]:
        """Describe which tasks and seeds of a line are missing; empty if it is complete."""
        tasks, expected = self.tasks_of(line), min(self.expected_seeds, line.row.seeds or self.expected_seeds)
        missing = [task for task in self.tasks if task not in tasks]
        short = {task: n for task in tasks if (n := len(self.records(line, task))) < expected}
        gaps = [f"{len(tasks)} of {len(self.tasks)} tasks, not {listing(missing)}"] if missing else []
        if len(set(short.values())) == 1 and len(short) == len(tasks):
            gaps.append(f"{short[tasks[0]]} of {expected} seeds")
        elif short:
            on = listing([f"{task} ({n})" for task, n in short.items()])
            gaps.append(
                f"fewer than {expected} seeds on {on}; averaged over the seeds that all its tasks have"
            )
        return tuple(gaps)

    def difference(self, line: Line, other: Line, task: str | None = None) -> Difference | None:
        """Return the paired difference on a task, or over all tasks that both lines have.

        None if the lines share no task or no seed.
        """
        if (other.index, other.shots or 0) < (line.index, line.shots or 0):  # each pair is compared once
            swapped = self.difference(other, line, task)
            return swapped and swapped.reversed()
        if (line, other, task) not in self._differences:
            pair = self._paired(line, other, task)
            needed = PERMUTATIONS_PER_COMPARISON * len(self.lines) * len(self.tasks)
            permutations = PERMUTATIONS if task is None else max(PERMUTATIONS, needed)
            drawn = not (line.fixed and other.fixed)
            result = difference(*pair, drawn=drawn, permutations=permutations) if pair[0] else None
            self._differences[line, other, task] = result
        return self._differences[line, other, task]

    def _paired(self, line: Line, other: Line, task: str | None) -> tuple[Correct, Correct]:
        """Return the correct predictions of two lines, on their shared tasks and seeds.

        A deterministic line has one seed, which is paired with every seed of the other line.
        """
        other_tasks = self.tasks_of(other)
        tasks = [target for target in self.tasks_of(line) if target in other_tasks and task in {None, target}]
        seeds, other_seeds = self.shared_seeds(line, tasks), self.shared_seeds(other, tasks)
        if not (line.fixed or other.fixed):
            seeds = other_seeds = seeds & other_seeds
        if not seeds or not other_seeds:
            return [], []
        return self._correct(line, tasks, seeds), self._correct(other, tasks, other_seeds)

    def reference(self, line: Line) -> Line | None:
        """Return the line of the reference row with as many demonstrations, which ``line`` is tested against.

        If the reference row has a single line, that one is used. None for the reference line itself.
        """
        lines = [candidate for candidate in self.lines if candidate.row is self.reference_row]
        matches = [candidate for candidate in lines if candidate.shots == line.shots]
        reference = matches[0] if matches else lines[0] if len(lines) == 1 else None
        return None if reference == line else reference

    def leader(self, task: str | None = None) -> Line | None:
        """Return the line that is significantly better than every other, on a task or on average."""
        means = {line: result.mean for line in self.lines if (result := self.accuracy(line, task))}
        if len(means) < 2:
            return None
        best, *others = sorted(means, key=lambda line: -means[line])
        if task is None and self.tasks_of(best) != self.tasks:
            return None
        p_values = []
        for other in others:  # tests are slow, and the closest line usually ends the search
            lead = self.difference(best, other, task)
            if lead is None or lead.low <= 0 or lead.p >= ALPHA or not lead.decidable:
                return None
            p_values.append(lead.p)
        return best if max(holm(p_values)) < ALPHA else None


def outcome(record: Record) -> Run:
    """Return the outcome of a record that is done."""
    if record.outcome is None:
        raise ValueError(f"cell {record.key} is {record.status}, not done")
    return record.outcome


def compare(differences: Mapping[Key, Difference | None]) -> dict[Key, Comparison | None]:
    """Apply Holm's correction over all differences that have enough seeds; None stays None."""
    ps = {
        key: difference.p
        for key, difference in differences.items()
        if difference is not None and difference.decidable
    }
    q = dict(zip(ps, holm(list(ps.values())), strict=True))
    return {
        key: None if difference is None else Comparison(difference, q.get(key, 1.0))
        for key, difference in differences.items()
    }


def mean_times(results: Results, line: Line, tasks: Iterable[str]) -> tuple[float, float]:
    """Return the seconds per fit and the milliseconds per query: means over seeds, then over tasks."""
    by_task = []
    for outcomes in (results.outcomes(line, task) for task in tasks):
        queries = [1000 * outcome.predict_seconds / len(outcome.predictions) for outcome in outcomes]
        by_task.append((np.mean([outcome.fit_seconds for outcome in outcomes]), np.mean(queries)))
    fit, query = np.mean(by_task, axis=0)
    return float(fit), float(query)


def listing(names: Sequence[str]) -> str:
    """Join up to `MAX_LISTED` names with commas, and count the rest."""
    more = len(names) - MAX_LISTED
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:MAX_LISTED])} and {more} more"


def results_of(experiment: Experiment, records: Iterable[Record]) -> list[Results]:
    """Collect the results of an experiment, one for each setting, by descending number of queries.

    A record belongs to an experiment if it is done, a row of the experiment holds its cell, and its task is
    one of the experiment's tasks, where "all" stands for every task but the synthetic one.
    """
    groups: dict[Setting, list[Record]] = defaultdict(list)
    for record in records:
        cell = record.cell
        matches = cell.task != "synthetic" if experiment.tasks == "all" else cell.task in experiment.tasks
        matches = matches and cell.skew in experiment.skews
        if record.status == "done" and matches and any(row.holds(cell) for row in experiment.rows):
            groups[Setting(cell.model, cell.revision, cell.dtype, cell.limit, cell.skew)].append(record)
    by_setting = [_on_common_tasks(experiment, setting, group) for setting, group in groups.items()]
    return sorted(by_setting, key=lambda results: (-(results.setting.limit or 10**9), results.setting.skew))


def _on_common_tasks(experiment: Experiment, setting: Setting, records: Sequence[Record]) -> Results:
    """Restrict the results to tasks that more than half of the rows have."""
    rows: dict[str, set[str]] = defaultdict(set)
    for record in records:
        rows[record.cell.task] |= {row.name for row in experiment.rows if row.holds(record.cell)}
    all_rows = set().union(*rows.values())
    tasks = tuple(sorted(task for task, names in rows.items() if 2 * len(names) > len(all_rows)))
    kept = tuple(record for record in records if record.cell.task in tasks)
    return Results(experiment, setting, tasks, kept, tuple(task for task in rows if task not in tasks))


@dataclass(frozen=True)
class TaskScores:
    """Label scores of a line on one task, for the seeds that all tasks of the line share.

    Attributes:
        temperature: the temperature with the lowest log-loss on these queries.
        scores: label log-probabilities.
        gold: gold label ids.
        predictions: predicted label ids.
    """

    temperature: float
    scores: Float[np.ndarray, "seeds queries labels"]
    gold: Int[np.ndarray, "seeds queries"]
    predictions: Int[np.ndarray, "seeds queries"]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "TaskScores":
        """Collect the scores of runs on one task; every run must have them."""
        scores = np.stack([run.scores.array for run in runs if run.scores is not None])
        gold = np.array([run.gold for run in runs])
        predictions = np.array([run.predictions for run in runs])
        return cls(best_temperature(np.concatenate(scores), gold.ravel()), scores, gold, predictions)

    def at(self, temperature: float) -> Float[np.ndarray, "seeds queries labels"]:
        """Return the log-probabilities at a temperature."""
        return np.stack([log_softmax(scores, temperature) for scores in self.scores])

    def metrics(self, temperature: float) -> Float[np.ndarray, "seeds 4"]:
        """Return the calibration metrics of each seed at a temperature."""
        seeds = zip(self.at(temperature), self.gold, self.predictions, strict=True)
        return np.array([astuple(confidence(*seed)) for seed in seeds])


def scores_by_task(results: Results, line: Line) -> dict[str, TaskScores]:
    """Return the scores of a line by task; empty if a run has no scores, or the tasks share no seed."""
    tasks = results.tasks_of(line)
    seeds = sorted(results.shared_seeds(line, tasks))
    runs = {task: [outcome(results.records(line, task)[seed]) for seed in seeds] for task in tasks}
    complete = seeds and all(run.scores is not None for each in runs.values() for run in each)
    return {task: TaskScores.of(each) for task, each in runs.items()} if complete else {}
