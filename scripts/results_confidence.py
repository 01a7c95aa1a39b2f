"""Tables of docs/guide/confidence.md: calibration and thresholds, from stored scores of fits to SmolLM2.

``refits.jsonl`` is the output of `benchmarks/refits.py`. ``scores.safetensors`` has ``TASK-SEED/scores`` and
``TASK-SEED/gold`` of the test queries in half precision, from `benchmarks/greedy.py --keep`. Temperature and
threshold are fitted on draws of 100 rows; all queries of a task and seed are the population.
"""

import json
from collections import defaultdict
from dataclasses import astuple, dataclass
from functools import cache, cached_property

import numpy as np
from safetensors.numpy import load_file

from i2cl.experiments.confidence import Confidence, confidence, highest
from i2cl.experiments.evidence.selective import select
from i2cl.injections.temperature import best_temperature, likely_temperature, log_softmax
from results_tables import ROOT, table

TARGET, ROWS, DRAWS = 0.9, 100, 50
"""Target accuracy; rows per draw; draws per fit."""

TASKS = ("sst2", "tickets", "agnews", "mr")
"""Tasks of the threshold table."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Label scores of one task and seed: demonstrations in cross-validation, and test queries by the fit."""

    task: str
    left_out: np.ndarray
    left_out_gold: np.ndarray
    scores: np.ndarray
    gold: np.ndarray

    @cached_property
    def best(self) -> float:
        """The temperature with the lowest log-loss on the test queries."""
        return best_temperature(self.scores, self.gold)

    @cached_property
    def chosen(self) -> float:
        """The temperature that `i2cl fit` chooses by cross-validation."""
        return likely_temperature(self.left_out, self.left_out_gold)

    def temperatures(self, others: list[float]) -> dict[str, float]:
        """Return the temperature by rule; ``others`` are the best temperatures of the other tasks' fits."""
        own, median = (self.left_out, self.left_out_gold), float(np.median(others))
        spread = float(np.log(others).std())
        return {
            "1 (no scaling)": 1.0,
            "median of the other tasks": median,
            "cross-validation": best_temperature(*own),
            "cross-validation with prior (default)": self.chosen,
            "cross-validation with the other tasks' prior": likely_temperature(*own, median, spread),
            "best for these queries": self.best,
        }


@cache
def confidence_fits() -> tuple[Fit, ...]:
    """Return the fits that both files have."""
    folder = ROOT / "docs/experiments/real"
    stored, fits = load_file(folder / "scores.safetensors"), []
    for one in map(json.loads, (folder / "refits.jsonl").read_text(encoding="utf-8").splitlines()):
        name = f"{one['task']}-{one['seed']}"
        if f"{name}/scores" in stored:
            scores, gold = log_softmax(stored[f"{name}/scores"]), stored[f"{name}/gold"].astype(int)
            fits.append(Fit(one["task"], np.array(one["scores"]), np.array(one["gold"]), scores, gold))
    return tuple(fits)


def temperatures() -> str:
    """Tabulate the calibration metrics by rule for the temperature: means over tasks."""
    by_rule: dict[str, dict[str, list[tuple[np.ndarray, np.ndarray]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for fit in confidence_fits():
        others = [other.best for other in confidence_fits() if other.task != fit.task]
        for rule, temperature in fit.temperatures(others).items():
            by_rule[rule][fit.task].append((log_softmax(fit.scores, temperature), fit.gold))
    rows = []
    for rule, by_task in by_rule.items():
        per_fit = [[astuple(metrics(*seed)) for seed in seeds] for seeds in by_task.values()]
        log_loss, brier, ece, aurc = np.mean([np.mean(task, 0) for task in per_fit], 0)
        pooled = [[np.concatenate(part) for part in zip(*seeds, strict=True)] for seeds in by_task.values()]
        pooled_ece = np.mean([metrics(*task).ece for task in pooled])
        percent = (f"{100 * value:.1f}" for value in (ece, pooled_ece, aurc))
        rows.append([rule, f"{log_loss:.3f}", f"{brier:.3f}", *percent])
    return table(["temperature", "log-loss", "Brier", "ECE, %", "ECE of all seeds, %", "AURC, %"], rows)


def metrics(scores: np.ndarray, gold: np.ndarray) -> Confidence:
    """Return the calibration metrics of log-probabilities."""
    return confidence(scores, gold, scores.argmax(1))


def thresholds() -> str:
    """Tabulate how often a threshold exists, and how often it misses the target: shares of the draws."""
    random, rows = np.random.default_rng(0), []
    for task in TASKS:
        outcomes = []
        for fit in (one for one in confidence_fits() if one.task == task):
            correct = fit.scores.argmax(1) == fit.gold
            for _ in range(DRAWS):
                drawn = random.integers(0, len(correct), ROWS)
                temperature = likely_temperature(fit.scores[drawn], fit.gold[drawn])
                confidences = highest(log_softmax(fit.scores, temperature))
                selection = select(confidences[drawn], correct[drawn], TARGET)
                reached = confidences >= (selection.threshold if selection else 2.0)
                missed = bool(selection) and correct[reached].mean() < TARGET
                outcomes.append((bool(selection), missed, reached.mean()))
        shares = (f"{share:.3f}" for share in np.mean(outcomes, 0))
        rows.append([task, str(len(outcomes)), *shares])
    return table(["task", "draws", "threshold found", "target missed", "coverage"], rows)
