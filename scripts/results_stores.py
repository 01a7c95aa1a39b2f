"""What the committed stores hold of a grid, for pages and figures alike."""

import runpy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from i2cl.experiments.library import load_experiment
from i2cl.experiments.records import Record
from i2cl.experiments.report.results import Line, Results, results_of
from i2cl.experiments.store import Store

ROOT = Path(__file__).resolve().parents[1]
STORES = {"real": "docs/experiments/real/store", "gemma": "docs/experiments/gemma/store"}

OURS = "Anchored"
FORMER = {OURS: "Anchored, all anew"}
"""What stands for a row in a store that was made before its default changed."""

SHOWN = {
    "Zero-shot": "Zero-shot",
    "Zero-shot, label prior": "Zero-shot, label prior",
    "Zero-shot, batch calibration": "Zero-shot, batch calibration",
    "Few-shot (ICL)": "Few-shot",
    "Few-shot, label prior": "Few-shot, label prior",
    "TF-IDF": "TF-IDF + logistic regression",
    "Linear probe": "Linear probe of the LLM",
    "I2CL": "I2CL, fast recipe",
    "IA3": "IA3",
    "LoRA": "LoRA",
    "sentence_embeddings": "Sentence embeddings + logistic regression",
    "setfit": "SetFit",
    OURS: "Anchored calibration",
    "Anchored and sentence embeddings": "Anchored calibration and sentence embeddings",
}
"""Rows of the grid ``real`` by name, or by method, and what the pages call them."""


@cache
def records(store: str) -> tuple[Record, ...]:
    """All cells of a committed store."""
    return tuple(Store.open(ROOT / STORES[store]).records.values())


@cache
def results(grid: str, store: str = "real", limit: int | None = None, skew: int = 1) -> Results:
    """What a store has of a grid, with the most queries where no limit is given. Seeds beyond the grid's own,
    which another grid ran on some tasks only, are left out: a task's mean and that of all tasks share seeds.
    """
    experiment = load_experiment(grid)
    own = [one for one in records(store) if one.cell.seed < experiment.full.seeds]
    result = results_of(experiment, own)
    return next(one for one in result if limit in (None, one.setting.limit) and one.setting.skew == skew)


def line_of(result: Results, wanted: str) -> Line | None:
    """The line of a row's name, or else of a method's."""
    named = [one for one in result.lines if one.name == wanted]
    former = [one for one in result.lines if one.name == FORMER.get(wanted)]
    method = [one for one in result.lines if one.row.method == wanted]
    return next(iter(named or former or method), None)


def lines_of(result: Results, wanted: Sequence[str]) -> dict[str, Line]:
    """Those that the store has, in the order asked for."""
    return {name: line for name in wanted if (line := line_of(result, name)) is not None}


def named_line(result: Results, name: str) -> Line:
    """A line that has to be there.

    Raises:
        LookupError: where it is not.
    """
    line = line_of(result, name)
    if line is None:
        raise LookupError(f"the store has no row {name!r}")
    return line


def seeds_of(result: Results, line: Line) -> int:
    """Seeds that its mean is of: those that all of its tasks have."""
    return len(result.shared_seeds(line, result.tasks_of(line)))


def enough(result: Results, line: Line) -> bool:
    """Whether a row has all seeds and nearly all tasks, so that a verdict means something."""
    got = result.accuracy(line)
    seeds = got is not None and (line.fixed or got.seeds == result.expected_seeds)
    return seeds and 3 * len(result.tasks_of(line)) > 2 * len(result.tasks)


@cache
def confidence_fits() -> tuple[dict[str, Any], Any]:
    """The functions of benchmarks/confidence.py, and the fits that it reads."""
    functions, folder = runpy.run_path(str(ROOT / "benchmarks/confidence.py")), ROOT / "docs/experiments/real"
    return functions, functions["read"](folder / "refits.jsonl", folder / "scores.safetensors")


def average(result: Results, line: Line) -> str:
    """Mean over tasks, with the number of tasks where it lacks some."""
    got, tasks = result.accuracy(line), len(result.tasks_of(line))
    if got is None:
        return "–"
    lacking = "" if tasks == len(result.tasks) else f" ({tasks} of {len(result.tasks)} tasks)"
    return written(got.mean, got.sd, got.seeds) + lacking


def shown(result: Results, line: Line, task: str) -> str:
    """Accuracy on one task."""
    got = result.accuracy(line, task) if task in result.tasks_of(line) else None
    return "–" if got is None else written(got.mean, got.sd, got.seeds)


def written(mean: float, sd: float, seeds: int) -> str:
    """In percent, with the standard deviation over seeds where there are several."""
    return f"{100 * mean:.1f}" + (f" ± {100 * sd:.1f}" if seeds > 1 else "")


def points(value: float) -> str:
    """Percentage points, signed."""
    return f"{100 * value:+.1f}".replace("-", "−")
