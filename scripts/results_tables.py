"""Results from the committed stores, and the parts that the tables and figures of the documentation share."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from i2cl.experiments.library import load_experiment
from i2cl.experiments.records import Record
from i2cl.experiments.report.results import Line, Results, compare, mean_times, results_of
from i2cl.experiments.report.tables import (
    NO_RESULT,
    format_accuracy,
    format_interval,
    format_p,
    format_points,
    format_range,
    markdown_table,
)
from i2cl.experiments.statistics import Comparison, Difference
from i2cl.experiments.store import Store

ROOT = Path(__file__).resolve().parents[1]
STORES = {name: f"docs/experiments/{name}/store" for name in ("real", "gemma", "qwen")}
MODELS = {"SmolLM2-135M": ("real", "real"), "Gemma 3 270M": ("real", "gemma")}
"""Experiment and store of each model with all rows and seeds."""
LARGER = "Qwen2.5-Coder-1.5B"

OURS = "Anchored"
FALLBACKS = {OURS: "Anchored, recompute all"}
"""Rows to use instead in a store that was made before the default of a row changed."""

LABELS = {
    "Zero-shot": "Zero-shot",
    "Zero-shot, label prior": "Zero-shot, label prior",
    "Zero-shot, batch calibration": "Zero-shot, batch calibration",
    "Few-shot (ICL)": "Few-shot",
    "Few-shot, label prior": "Few-shot, label prior",
    "Options by letter": "Options by letter, as in decision APIs",
    "Options by letter, few-shot": "Options by letter, few-shot",
    "TF-IDF": "TF-IDF + logistic regression",
    "TF-IDF, character n-grams": "Character n-grams + logistic regression",
    "Linear probe": "Linear probe of the LLM",
    "I2CL": "I2CL, fast recipe",
    "IA3": "IA3",
    "LoRA": "LoRA",
    "LoRA, rate 0.0003": "LoRA, learning rate 0.0003",
    "sentence_embeddings": "Sentence embeddings + logistic regression",
    "setfit": "SetFit",
    OURS: "Anchored calibration",
    "Anchored and sentence embeddings": "Anchored calibration and sentence embeddings",
}
"""Labels on the pages for rows of the experiment ``real``, by name or method."""

Key = TypeVar("Key")


@cache
def records(store: str) -> tuple[Record, ...]:
    """Return all records of a committed store."""
    return tuple(Store.open(ROOT / STORES[store]).records.values())


@cache
def all_results(name: str, store: str = "real") -> list[Results]:
    """Return the results of an experiment by setting, by descending number of queries.

    Seeds above the experiment's own are dropped. Another experiment ran them on some tasks only, and the
    means on each task and over all tasks must use the same seeds.
    """
    experiment = load_experiment(name)
    own_seeds = [one for one in records(store) if one.cell.seed < experiment.full.seeds]
    return results_of(experiment, own_seeds)


def results(name: str, store: str = "real", limit: int | None = None, skew: int = 1) -> Results:
    """Return the results of an experiment with this number of queries (default: the largest) and skew."""
    by_setting = all_results(name, store)
    return next(one for one in by_setting if limit in (None, one.setting.limit) and one.setting.skew == skew)


def find_line(result: Results, name: str) -> Line | None:
    """Return the line with a name, else its fallback's, else the first line of the method ``name``."""
    for wanted in (name, FALLBACKS.get(name)):
        if named := [line for line in result.lines if line.name == wanted]:
            return named[0]
    return next((line for line in result.lines if line.row.method == name), None)


def find_lines(result: Results, names: Sequence[str]) -> dict[str, Line]:
    """Return the lines with these names, in this order, without those that have no results."""
    return {name: line for name in names if (line := find_line(result, name)) is not None}


def line_of(result: Results, name: str) -> Line:
    """Return the line with a name. Raises LookupError if it has no results."""
    line = find_line(result, name)
    if line is None:
        raise LookupError(f"the store has no results of the row {name!r}")
    return line


def is_complete(result: Results, line: Line) -> bool:
    """Whether a line has all seeds, on more than two thirds of the tasks."""
    accuracy = result.accuracy(line)
    has_seeds = accuracy is not None and (line.fixed or accuracy.seeds == result.expected_seeds)
    return has_seeds and 3 * len(result.tasks_of(line)) > 2 * len(result.tasks)


def average(result: Results, line: Line) -> str:
    """Format the mean over tasks, with the number of tasks if some are missing."""
    accuracy, tasks = result.accuracy(line), len(result.tasks_of(line))
    if accuracy is None:
        return NO_RESULT
    missing = "" if tasks == len(result.tasks) else f" ({tasks} of {len(result.tasks)} tasks)"
    return format_accuracy(accuracy.mean, accuracy.sd, accuracy.seeds) + missing


def seeds(result: Results, line: Line) -> str:
    """Format the number of seeds that a line has on all of its tasks."""
    return str(len(result.shared_seeds(line, result.tasks_of(line))))


def on_task(result: Results, line: Line, task: str) -> str:
    """Format the accuracy on one task."""
    accuracy = result.accuracy(line, task) if task in result.tasks_of(line) else None
    return NO_RESULT if accuracy is None else format_accuracy(accuracy.mean, accuracy.sd, accuracy.seeds)


def by_task(result: Results, lines: Mapping[str, Line]) -> str:
    """Tabulate the accuracy of lines on every task, and their mean."""
    rows = [["**mean**", *(average(result, line) for line in lines.values())]]
    rows += [[task, *(on_task(result, line, task) for line in lines.values())] for task in result.tasks]
    return table(["Task", *(LABELS[name] for name in lines)], rows)


def differences(result: Results, pairs: Mapping[str, tuple[Line, Line]]) -> dict[str, list[str]]:
    """Format the first minus the second line of each pair, see `format_differences`."""
    return format_differences({name: result.difference(*pair) for name, pair in pairs.items()})


def format_differences(differences: Mapping[Key, Difference | None]) -> dict[Key, list[str]]:
    """Format differences, their intervals, and q with Holm's correction over all of them."""
    return {
        key: [NO_RESULT] * 3
        if one is None
        else [format_points(one.difference.mean), format_interval(one.difference), format_q(one)]
        for key, one in compare(differences).items()
    }


def format_q(comparison: Comparison) -> str:
    """Format q, or the number of seeds if there are too few for a test."""
    difference, q = comparison.difference, comparison.q
    if not difference.decidable:
        return "one seed" if difference.seeds == 1 else f"{difference.seeds} seeds"
    return format_p(q) + ("" if comparison.significant else ", not significant")


def stored_values(result: Results, line: Line) -> str:
    """Format how many numbers a line stores per task: a range if tasks differ."""
    return format_range(
        one.cost.cached_values for task in result.tasks_of(line) for one in result.outcomes(line, task)
    )


def against_first(result: Results, name: str) -> str:
    """Compare every row with one, on average, and list the accuracies by task."""
    first = line_of(result, name)
    others = [line for line in result.lines if line != first]
    by_name = differences(result, {line.name: (line, first) for line in others})
    rows = [
        [
            line.name if line != first else f"**{line.name}**",
            average(result, line),
            *(by_name[line.name] if line != first else [""] * 3),
            *(on_task(result, line, task).split(" ")[0] for task in result.tasks),
        ]
        for line in (first, *others)
    ]
    return table(["Row", "Mean", "Difference", "95 % interval", "q", *result.tasks], rows)


def against_ours(result: Results, names: Sequence[str]) -> str:
    """Compare some rows with `OURS` on the tasks that both have, with their costs."""
    ours, lines = line_of(result, OURS), find_lines(result, names)
    by_name = differences(result, {name: (line, ours) for name, line in lines.items()})
    rows = [
        [
            name,
            average(result, line),
            str(len(result.shared_seeds(line, result.tasks_of(line)))),
            stored_values(result, line),
            fit_time_ratio(result, line, ours),
            *by_name[name],
        ]
        for name, line in lines.items()
    ]
    own = [
        average(result, ours),
        str(len(result.shared_seeds(ours, result.tasks))),
        stored_values(result, ours),
        "1",
        *[""] * 3,
    ]
    head = ["Row", "Mean", "Seeds", "Stored values", "Fit, ratio", "Difference", "95 % interval", "q"]
    return table(head, [*rows, [f"**{OURS}**", *own]])


def fit_time_ratio(result: Results, line: Line, ours: Line) -> str:
    """Format the ratio of the fit times of two lines, on the tasks that both have."""
    both = [task for task in result.tasks_of(line) if task in result.tasks_of(ours)]
    theirs, own = (mean_times(result, one, both)[0] for one in (line, ours))
    return f"{theirs / own:.2g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Format a Markdown table; all but the first ``text_columns`` are aligned to the right."""
    return markdown_table(head, rows, [index >= text_columns for index in range(len(head))], padded=False)
