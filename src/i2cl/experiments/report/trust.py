"""How far the probabilities of each row can be trusted: as they are, and at the best temperature."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from jaxtyping import Float, Int

from i2cl.experiments.confidence import BINS, NAMES, confidence
from i2cl.experiments.records import Run
from i2cl.experiments.report.layout import NOTHING, Entry, Table, Values, incomplete_notes, mark_of, measured
from i2cl.experiments.report.paper import Paper
from i2cl.experiments.report.results import Line, Results, outcome
from i2cl.injections.temperature import best_temperature, normalised

# Names of the four numbers in a table.
COLUMNS = {"log_loss": "Log-loss", "brier": "Brier", "ece": "ECE, %", "aurc": "AURC, %"}
UNITS = {"log_loss": "nats", "brier": "squared distance", "ece": "percent", "aurc": "percent"}


@dataclass(frozen=True)
class Scored:
    """A line's queries on one task for the seeds of all its tasks, and the best temperature of them."""

    temperature: float
    scores: Float[np.ndarray, "seeds queries labels"]
    gold: Int[np.ndarray, "seeds queries"]
    answers: Int[np.ndarray, "seeds queries"]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Scored":
        """Runs of one task, all of which kept scores."""
        scores = np.stack([run.scores.array for run in runs if run.scores is not None])
        gold, answers = np.array([run.gold for run in runs]), np.array([run.predictions for run in runs])
        return cls(best_temperature(np.concatenate(scores), gold.ravel()), scores, gold, answers)

    def at(self, temperature: float) -> Float[np.ndarray, "seeds queries labels"]:
        """Log-probabilities at a temperature."""
        return np.stack([normalised(one, temperature) for one in self.scores])

    def numbers(self, temperature: float) -> Float[np.ndarray, "seeds 4"]:
        """The four numbers of each seed at a temperature."""
        each = zip(self.at(temperature), self.gold, self.answers, strict=True)
        return np.array([astuple(confidence(*one)) for one in each])


def scored(results: Results, line: Line) -> dict[str, Scored]:
    """By task; empty where a run kept no scores, or the tasks share no seed."""
    tasks = results.tasks_of(line)
    seeds = sorted(results.shared_seeds(line, tasks))
    runs = {task: [outcome(results.records(line, task)[seed]) for seed in seeds] for task in tasks}
    kept = seeds and all(run.scores is not None for each in runs.values() for run in each)
    return {task: Scored.of(each) for task, each in runs.items()} if kept else {}


def confidence_table(results: Results, _paper: Paper) -> list[Table]:
    """Four numbers of each row, each beside what it is at the best temperature; nothing without scores."""
    rows: list[list[Entry]] = []
    values: list[Values] = []
    for line in results.lines:
        tasks = scored(results, line)
        name = Entry(line.name, mark=mark_of(results, line))
        if not tasks:
            rows.append([name, *[Entry(NOTHING)] * (2 * len(NAMES) + 1)])
            continue
        plain = np.array([one.numbers(1.0) for one in tasks.values()])
        best = np.array([one.numbers(one.temperature) for one in tasks.values()])
        cells = (_cell(one.mean(0)[:, at], NAMES[at]) for at in range(len(NAMES)) for one in (plain, best))
        temperature = float(np.median([one.temperature for one in tasks.values()]))
        rows.append([name, *cells, Entry(f"{temperature:.2f}")])
        values += _values(results, line, tasks, plain, best)
    if not values:
        return []
    heads = (part for name in COLUMNS.values() for part in (name, "at best T"))
    return [Table("Confidence", ("Row", *heads, "Best T"), rows, _notes(results, rows), values)]


def _notes(results: Results, rows: Sequence[Sequence[Entry]]) -> list[str]:
    lacking = [row[0].text for row in rows if row[1].text == NOTHING]
    older = f"{NOTHING} cells without scores, which older versions did not keep: {'; '.join(lacking)}."
    return [
        "Means over tasks, ± standard deviation over seeds. Lower is better for all.",
        "Log-loss: minus the log-probability of the right label, in nats.",
        "Brier: squared distance to the right answer, summed over labels.",
        f"ECE: mean distance of confidence and accuracy over {BINS} bins of equally many queries.",
        "AURC: share of errors among the surest queries, averaged over all numbers of them.",
        "At best T: at the temperature with the least log-loss on each task, found with the right labels.",
        "Best T: its median over tasks.",
        *([older] if lacking else []),
        *incomplete_notes(results, results.lines),
    ]


def _cell(seeds: Float[np.ndarray, " seeds"], name: str) -> Entry:
    factor, digits = (100, 1) if UNITS[name] == "percent" else (1, 3)
    spread = f" ± {factor * seeds.std(ddof=1):.{digits}f}" if len(seeds) > 1 else ""
    return Entry(f"{factor * seeds.mean():.{digits}f}{spread}")


def _values(
    results: Results,
    line: Line,
    tasks: dict[str, Scored],
    plain: Float[np.ndarray, "tasks seeds 4"],
    best: Float[np.ndarray, "tasks seeds 4"],
) -> list[Values]:
    """One line for each task, number and temperature; those over tasks tell no temperature of their own."""
    values: list[Values] = []
    for task in (*tasks, None) if len(tasks) > 1 else tasks:
        held = [one for name, one in tasks.items() if task in (None, name)]
        for suffix, numbers in (("", plain), ("_at_best", best)):
            seeds = numbers.mean(0) if task is None else numbers[[*tasks].index(task)]
            common = {
                **measured("confidence", results, task, line),
                "temperature": 1.0 if not suffix else None if task is None else tasks[task].temperature,
                "seeds": len(seeds),
                "queries": sum(one.gold.shape[1] for one in held),
            }
            for (name, unit), each in zip(UNITS.items(), seeds.T, strict=True):
                factor, sd = 100 if unit == "percent" else 1, each.std(ddof=1) if len(each) > 1 else 0.0
                spread = {"mean": round(factor * float(each.mean()), 8), "sd": round(factor * float(sd), 8)}
                values.append({**common, "measure": name + suffix, "unit": unit, **spread})
    return values
