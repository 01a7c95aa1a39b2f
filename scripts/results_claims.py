"""Parts of docs/does_it_hold.md: each claim of the paper, our measurement, and a verdict by rule.

``claims.toml`` lists the claims. A claim is tested as soon as a store has the rows that it names. Verdicts:

- "holds": significantly better (`Comparison.significant`); "does not hold": significantly worse.
- With a margin the claim is "no worse": it holds if the interval lies above minus the margin.
- Counts, such as stored values, have no interval: the claim holds if they are as claimed.
"""

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

import numpy as np
from scipy.stats import ttest_1samp

from i2cl.experiments.library import load_experiment
from i2cl.experiments.report.printed import printed_tables
from i2cl.experiments.report.results import Line, Results, compare, outcome
from i2cl.experiments.report.tables import NO_RESULT, format_interval, format_points, format_range
from i2cl.experiments.statistics import Comparison, Difference
from results_tables import ROOT, STORES, all_results, find_line, format_differences, format_q, table

HOLDS, FAILS, UNDECIDED, UNTESTED = "holds", "does not hold", "not significant", "cannot be tested here"
TOY_ONLY = "run on the bundled toy model only"
MAIN_MODEL = ("real", "SmolLM2-135M")
"""Store and model of the full table."""
OTHER_MODELS = [
    (store, model)
    for store, model in (("gemma", "Gemma 3 270M"), ("qwen", "Qwen2.5-Coder-1.5B"))
    if store in STORES
]
"""Stores and models of the table of claims that others can test."""


@dataclass(frozen=True)
class Measurement:
    """What was compared, and the difference; a count has ``holds`` instead, None if it decides nothing."""

    compared: str
    difference: Difference | None = None
    holds: bool | None = None


@dataclass(frozen=True, eq=False)
class Claim:
    """A claim of the paper and how it is tested; for the attributes see ``claims.toml``."""

    text: str
    paper: str
    rows: Sequence[Sequence[str]] = ()
    margin: float = 0.0
    task: str | None = None
    measure: str | None = None
    reason: str = TOY_ONLY

    def measured(self, store: str) -> Measurement | None:
        """Return the measurement in a store, or None if it lacks the rows."""
        if self.measure is not None:
            return MEASURES[self.measure](store)
        found = first_pair(store, self.rows)
        difference = found and found[0].difference(*found[1:], self.task)
        if not found or not difference:
            return None
        result, ours, theirs = found
        tasks = self.task or f"{len(set(result.tasks_of(ours)) & set(result.tasks_of(theirs)))} tasks"
        where = f"`{result.experiment.name}`, {tasks}, {format_seeds(difference.seeds)}"
        return Measurement(f"{ours.name} − {theirs.name} ({where})", difference)

    @property
    def printed(self) -> str:
        """The difference in the paper's table, or a dash."""
        name = load_experiment(self.rows[0][0]).printed if self.rows else None
        paper = printed_tables(name)[0] if name else None
        rows = [paper.rows.get(row) for row in self.rows[0][1:]] if paper else [None]
        if paper is None or None in rows:
            return NO_RESULT
        at = [paper.tasks.index(self.task)] if self.task else range(len(paper.tasks))
        ours, theirs = (fmean(row.mean[i] for i in at) if row.mean else row.average for row in rows)
        return format_points((ours - theirs) / 100)


@dataclass(frozen=True)
class Judged:
    """A claim with its measurement in a store and, if that has an interval, the comparison."""

    claim: Claim
    measurement: Measurement | None
    comparison: Comparison | None

    @property
    def verdict(self) -> str:
        """The verdict, see the module."""
        one, comparison, margin = self.measurement, self.comparison, self.claim.margin
        if one is None or (comparison is not None and not comparison.difference.decidable):
            return UNTESTED
        if comparison is None:
            return UNDECIDED if one.holds is None else HOLDS if one.holds else FAILS
        difference = comparison.difference
        if (margin and difference.low > -margin) or (comparison.significant and difference.mean > 0):
            return HOLDS
        return FAILS if comparison.significant and difference.high < -margin else UNDECIDED

    @property
    def cells(self) -> list[str]:
        """Cells of a row of the table."""
        compared = self.claim.reason if self.measurement is None else self.measurement.compared
        numbers = [NO_RESULT] * 3
        if (one := self.comparison) is not None:
            q = format_q(one).removesuffix(", not significant")
            numbers = [format_points(one.difference.mean), format_interval(one.difference), q]
        sentence = f"{self.claim.text} ({self.claim.paper})"
        return [sentence, f"**{self.verdict}**", compared, *numbers, self.claim.printed]


HEAD = ("Claim", "Verdict", "Measured", "Difference", "95 % interval", "q", "Paper")


@cache
def judge(store: str) -> dict[str, list[Judged]]:
    """Judge all claims by a store, by group; q has Holm's correction over the claims of a group."""
    listed = tomllib.loads((ROOT / "scripts/claims.toml").read_text(encoding="utf-8"))
    groups = {}
    for name, group in listed.items():
        measured = {(claim := Claim(**one)): claim.measured(store) for one in group}
        tests = compare({claim: one.difference for claim, one in measured.items() if one})
        groups[name] = [Judged(claim, one, tests.get(claim)) for claim, one in measured.items()]
    return groups


def claims(models: Sequence[tuple[str, str]] = (MAIN_MODEL,), *, tested: bool = False) -> str:
    """Tabulate the claims, judged by the stores of these models, or only those that are ``tested`` there."""
    rows: list[Sequence[str]] = []
    for store, model in models:
        for name, group in judge(store).items():
            shown = [one.cells for one in group if not tested or one.verdict != UNTESTED]
            if shown:
                rows += [[f"**{model}: {name}**", *[""] * (len(HEAD) - 1)], *shown]
    return table(HEAD, rows, 3)


def summary() -> str:
    """Count the verdicts of the first store."""
    verdicts = Counter(one.verdict for group in judge(MAIN_MODEL[0]).values() for one in group)
    return (
        f"On {MAIN_MODEL[1]}, {verdicts[HOLDS]} of {verdicts.total()} claims hold, {verdicts[FAILS]} do not, "
        f"{verdicts[UNDECIDED]} are not significant, and {verdicts[UNTESTED]} cannot be tested here."
    )


def few_shot_with_prior() -> str:
    """Compare I2CL by the paper's recipe with few-shot whose label bias is removed."""
    found = first_pair(MAIN_MODEL[0], [("real", "I2CL, the paper's recipe", "Few-shot, label prior")])
    difference = found and found[0].difference(*found[1:])
    if not difference:
        return ""
    points, interval, q = format_differences({"": difference})[""]
    return f"From few-shot with a label prior, I2CL differs by {points} points ({interval}, q = {q})."


def first_pair(store: str, rows: Iterable[Sequence[str]]) -> tuple[Results, Line, Line] | None:
    """Return the first results in a store that have both rows of an alternative, with their lines."""
    for experiment, *names in rows:
        for result in all_results(experiment, store):
            lines = {line.name: line for line in result.moves} | {
                name: line for name in names if (line := find_line(result, name)) is not None
            }
            if result.setting.skew == 1 and set(names) <= set(lines):
                return result, lines[names[0]], lines[names[1]]
    return None


def format_seeds(count: int) -> str:
    """Format a number of seeds."""
    return f"{count} seed{'s' * (count > 1)}"


def over_tasks(values: Sequence[float], count: int) -> Difference:
    """Estimate a mean over tasks, with the interval and p-value of a t-test over tasks."""
    test = ttest_1samp(values, 0)
    return Difference(fmean(values), *test.confidence_interval(), test.pvalue, test.pvalue, count)


# Measurements other than a difference of accuracies

AT_ZERO_SHOT_COST = ("Noise vector", "Label-anchor", "Task-vector", "ICV")


def against(store: str, *rivals: str) -> list[tuple[Results, Line, Line]]:
    """Return the results and lines of I2CL and each rival, without rivals that have no results."""
    names = ("main-real", "larger", "real")
    found = (first_pair(store, [(name, "I2CL", rival) for name in names]) for rival in rivals)
    return [one for one in found if one is not None]


def best_on_all(store: str) -> Measurement | None:
    """Count the tasks on which I2CL has the highest mean."""
    found = against(store, *AT_ZERO_SHOT_COST)
    if len(found) < len(AT_ZERO_SHOT_COST):
        return None
    result, ours, _ = found[0]
    lines = [ours, *(theirs for _, _, theirs in found)]
    means = [[one.mean for line in lines if (one := result.accuracy(line, task))] for task in result.tasks]
    wins = sum(task[0] == max(task) for task in means)
    return Measurement(f"highest mean on {wins} of {len(means)} tasks", holds=wins == len(means))


def spread(store: str) -> Measurement | None:
    """Compare the standard deviations over seeds, by task."""
    for result, ours, few in against(store, "Few-shot (ICL)"):
        pairs = [(result.accuracy(few, task), result.accuracy(ours, task)) for task in result.tasks]
        values = [theirs.sd - own.sd for theirs, own in pairs if theirs and own]
        count = min(one.seeds for pair in pairs for one in pair if one)
        where = f"`{result.experiment.name}`, {len(values)} tasks, {format_seeds(count)}"
        compared = f"standard deviation over seeds, {few.name} − {ours.name} ({where})"
        return Measurement(compared, over_tasks(values, count))
    return None


def counts(store: str, cost: str, rivals: Sequence[str]) -> Measurement | None:
    """Compare counts; the claim holds if I2CL has one, whatever the task, and it is the lowest."""
    by_row: dict[str, set[int]] = {}
    for result, *lines in against(store, *rivals):
        for name, line in zip(("I2CL", lines[1].name), lines, strict=True):
            runs = [run for task in result.tasks_of(line) for run in result.outcomes(line, task)]
            by_row.setdefault(name, set()).update(getattr(run.cost, cost) for run in runs)
    if not by_row:
        return None
    ours, *others = by_row.values()
    text = ", ".join(f"{name} {format_range(one)}" for name, one in by_row.items())
    return Measurement(text, holds=len(ours) == 1 and max(ours) < min(map(min, others)))


def speed(store: str) -> Measurement | None:
    """Compare the times of an injected and a plain forward pass, measured in turns on one machine."""
    if store != MAIN_MODEL[0]:
        return None
    report = json.loads((ROOT / "docs/performance/cpu.json").read_text(encoding="utf-8"))
    row = next(one for one in report["rows"] if one["name"] == "injected / plain forward, time")
    low, high, limit = row["detail"]["low"], row["detail"]["high"], float(row["target"].split()[-1])
    times = f"{row['value']:.2f} times a plain pass (95 % interval {low:.2f} to {high:.2f}"
    holds = True if high <= limit else False if low > limit else None
    return Measurement(f"{times}; limit {limit}), {report['shape']}", holds=holds)


def coefficients(store: str) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return the tasks, and I2CL's coefficients of shape (tasks, seeds, layers, sublayers, 2)."""
    for result, ours, _ in against(store, "Zero-shot"):
        shared = sorted(result.shared_seeds(ours, result.tasks))
        runs = [[outcome(result.records(ours, task)[seed]) for seed in shared] for task in result.tasks]
        return result.tasks, np.array([[run.coefficients for run in task] for task in runs])
    return None


def similarities(store: str) -> tuple[tuple[str, ...], np.ndarray] | None:
    """Return the tasks, and cosines of coefficients of shape (tasks, seeds, tasks, seeds)."""
    if (found := coefficients(store)) is None:
        return None
    vectors = found[1].reshape(*found[1].shape[:2], -1)
    vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return found[0], np.einsum("isd,jtd->isjt", vectors, vectors)


def task_ids(store: str) -> Measurement | None:
    """Measure how often the most similar coefficients are of the same task, above chance."""
    if (found := similarities(store)) is None:
        return None
    n, count = found[1].shape[:2]
    cosines = found[1].reshape(n * count, -1).copy()
    np.fill_diagonal(cosines, -np.inf)
    same = (cosines.argmax(1) // count).reshape(n, count) == np.arange(n)[:, None]
    chance = (count - 1) / (n * count - 1)
    compared = (
        f"most similar fit is of the same task: {100 * same.mean():.0f} % − {100 * chance:.0f} % by chance"
    )
    difference = over_tasks(list(same.mean(1) - chance), count)
    return Measurement(f"{compared} ({n} tasks, {format_seeds(count)})", difference)


def closest_tasks(store: str) -> Measurement | None:
    """Find the two tasks with the most similar coefficients."""
    if (found := similarities(store)) is None:
        return None
    cosines = found[1].mean((1, 3))
    np.fill_diagonal(cosines, -np.inf)
    pair = sorted(found[0][one] for one in np.unravel_index(cosines.argmax(), cosines.shape))
    compared = f"highest mean cosine of coefficients: {' and '.join(pair)}, {cosines.max():.2f}"
    return Measurement(compared, holds=pair == ["mr", "sst2"])


def signs(store: str) -> Measurement | None:
    """Measure how many λ are negative; the claim holds if every fit has both signs."""
    if (found := coefficients(store)) is None:
        return None
    negative = (found[1][..., 0] < 0).mean((2, 3))
    mixed = bool(((negative > 0) & (negative < 1)).all())
    return Measurement(f"{100 * negative.mean():.0f} % of λ are negative", holds=mixed)


MEASURES: dict[str, Callable[[str], Measurement | None]] = {
    "best_on_all": best_on_all,
    "spread": spread,
    "stored": partial(counts, cost="cached_values", rivals=("Few-shot (ICL)",)),
    "trained": partial(counts, cost="trained", rivals=("Prompt tuning", "IA3", "LoRA")),
    "speed": speed,
    "task_ids": task_ids,
    "closest_tasks": closest_tasks,
    "signs": signs,
}
"""Functions that ``claims.toml`` names: they take a store, and return None if it lacks the results."""
