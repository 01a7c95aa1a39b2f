"""Build the calibration table: metrics of each row, as predicted and at the best temperature."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from jaxtyping import Float, Int

from i2cl.experiments.confidence import BINS, NAMES, confidence
from i2cl.experiments.records import Run
from i2cl.experiments.report.layout import (
    NO_RESULT,
    Entry,
    Table,
    Values,
    incomplete_notes,
    mark_of,
    measured,
)
from i2cl.experiments.report.paper import Paper
from i2cl.experiments.report.results import Line, Results, outcome
from i2cl.injections.temperature import best_temperature, normalised

# headings of the four metrics
COLUMNS = {"log_loss": "Log-loss", "brier": "Brier", "ece": "ECE, %", "aurc": "AURC, %"}
UNITS = {"log_loss": "nats", "brier": "squared distance", "ece": "percent", "aurc": "percent"}


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
        return np.stack([normalised(scores, temperature) for scores in self.scores])

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


def confidence_table(results: Results, _paper: Paper) -> list[Table]:
    """Tabulate the metrics of each row, each as predicted and at the best temperature."""
    rows: list[list[Entry]] = []
    values: list[Values] = []
    for line in results.lines:
        tasks = scores_by_task(results, line)
        name = Entry(line.name, mark=mark_of(results, line))
        if not tasks:
            rows.append([name, *[Entry(NO_RESULT)] * (2 * len(NAMES) + 1)])
            continue
        predicted = np.array([one.metrics(1.0) for one in tasks.values()])
        best = np.array([one.metrics(one.temperature) for one in tasks.values()])
        cells = [
            _cell(metrics.mean(0)[:, index], measure)
            for index, measure in enumerate(NAMES)
            for metrics in (predicted, best)
        ]
        temperature = float(np.median([one.temperature for one in tasks.values()]))
        rows.append([name, *cells, Entry(f"{temperature:.2f}")])
        values += _values(results, line, tasks, predicted, best)
    if not values:
        return []
    heads = (part for name in COLUMNS.values() for part in (name, "at best T"))
    return [Table("Calibration", ("Row", *heads, "Best T"), rows, _notes(results, rows), values)]


def _notes(results: Results, rows: Sequence[Sequence[Entry]]) -> list[str]:
    without = [row[0].text for row in rows if row[1].text == NO_RESULT]
    older = f"{NO_RESULT} no stored scores (runs of an older version): {'; '.join(without)}."
    return [
        "Means over tasks, ± standard deviation over seeds. Lower is better in every column.",
        "Log-loss: mean negative log-probability of the gold label, in nats.",
        "Brier: mean squared error of the probabilities, summed over labels.",
        f"ECE: expected calibration error over {BINS} equal-mass bins.",
        "AURC: area under the risk-coverage curve.",
        "At best T: at the temperature with the lowest log-loss on each task, fitted on the gold labels.",
        "Best T: median of this temperature over tasks.",
        *([older] if without else []),
        *incomplete_notes(results, results.lines),
    ]


def _cell(seeds: Float[np.ndarray, " seeds"], name: str) -> Entry:
    factor, digits = (100, 1) if UNITS[name] == "percent" else (1, 3)
    plus_minus = f" ± {factor * seeds.std(ddof=1):.{digits}f}" if len(seeds) > 1 else ""
    return Entry(f"{factor * seeds.mean():.{digits}f}{plus_minus}")


def _values(
    results: Results,
    line: Line,
    tasks: dict[str, TaskScores],
    predicted: Float[np.ndarray, "tasks seeds 4"],
    best: Float[np.ndarray, "tasks seeds 4"],
) -> list[Values]:
    """Return a CSV row for each task, metric and temperature, and for the average over tasks."""
    values: list[Values] = []
    for task in (*tasks, None) if len(tasks) > 1 else tasks:
        chosen = [one for name, one in tasks.items() if task in (None, name)]
        for suffix, metrics in (("", predicted), ("_at_best", best)):
            seeds = metrics.mean(0) if task is None else metrics[[*tasks].index(task)]
            common = {
                **measured("confidence", results, task, line),
                "temperature": 1.0 if not suffix else None if task is None else tasks[task].temperature,
                "seeds": len(seeds),
                "queries": sum(one.gold.shape[1] for one in chosen),
            }
            for (name, unit), each in zip(UNITS.items(), seeds.T, strict=True):
                factor, sd = 100 if unit == "percent" else 1, each.std(ddof=1) if len(each) > 1 else 0.0
                numbers = {"mean": round(factor * float(each.mean()), 8), "sd": round(factor * float(sd), 8)}
                values.append({**common, "measure": name + suffix, "unit": unit, **numbers})
    return values
