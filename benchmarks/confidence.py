"""Calibration of probabilities and thresholds, from cross-validation and from scores of test queries.

    cd docs/experiments/real && python ../../../benchmarks/confidence.py refits.jsonl scores.safetensors

The first file is the output of `refits.py`. The second has ``TASK-SEED/scores`` and ``TASK-SEED/gold`` of the
test queries in half precision, from `greedy.py --keep`. It prints, for the tasks and seeds in both files,

- the calibration metrics for each rule that chooses the temperature,
- the accuracy in cross-validation minus that on the test queries,
- how often a threshold for 90 % accuracy misses it. Temperature and threshold are fitted on draws of 100
  rows; all queries of a task and seed are the population.
"""

import json
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from i2cl.experiments.confidence import confidence, highest
from i2cl.experiments.evidence.selective import select
from i2cl.injections.temperature import best_temperature, likely_temperature, normalised

TARGET, ROWS, DRAWS = 0.9, 100, 50
"""Target accuracy; rows per draw; draws per fit."""

SELECTED = ("sst2", "tickets", "agnews", "mr")
"""Tasks of the threshold table."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Label scores of one task and seed: demonstrations in cross-validation, and test queries by the fit."""

    task: str
    left_out: np.ndarray
    left_out_gold: np.ndarray
    scores: np.ndarray
    gold: np.ndarray
    seconds: float

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


def read(refits: Path, kept: Path) -> list[Fit]:
    """Read the fits that both files have."""
    held, result = load_file(kept), []
    for one in map(json.loads, refits.read_text(encoding="utf-8").splitlines()):
        name = f"{one['task']}-{one['seed']}"
        if f"{name}/scores" in held:
            scores, gold = normalised(held[f"{name}/scores"]), held[f"{name}/gold"].astype(int)
            own = np.array(one["scores"]), np.array(one["gold"])
            result.append(Fit(one["task"], *own, scores, gold, one["cpu_seconds"]))
    return result


def temperature_table(fits: list[Fit]) -> str:
    """Tabulate the metrics by rule: means over tasks."""
    each, all_seeds = defaultdict(list), defaultdict(list)
    for fit in fits:
        others = [other.best for other in fits if other.task != fit.task]
        for rule, temperature in fit.temperatures(others).items():
            at = normalised(fit.scores, temperature)
            each[rule, fit.task].append(astuple(confidence(at, fit.gold, fit.scores.argmax(1))))
            all_seeds[rule, fit.task].append((at, fit.gold))
    lines = ["| temperature | log-loss | Brier | ECE, % | ECE of all seeds, % | AURC, % |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for rule in dict.fromkeys(rule for rule, _ in each):
        keys = [key for key in each if key[0] == rule]
        log_loss, brier, ece, aurc = np.mean([np.mean(each[key], 0) for key in keys], 0)
        pooled = error_of_all_seeds([(key[1], *part) for key in keys for part in all_seeds[key]])
        numbers = f"{100 * ece:.1f} | {100 * pooled:.1f} | {100 * aurc:.1f}"
        lines.append(f"| {rule} | {log_loss:.3f} | {brier:.3f} | {numbers} |")
    return "\n".join(lines)


def drawn(fits: list[Fit], random: np.random.Generator) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return task, log-probabilities, and labels drawn from them, so the probabilities are calibrated."""
    result = []
    for fit in fits:
        at = normalised(fit.scores, fit.best)
        answers = (np.exp(at).cumsum(1) > random.random((len(at), 1))).argmax(1)
        result.append((fit.task, at, answers))
    return result


def error_of_all_seeds(parts: list[tuple[str, np.ndarray, np.ndarray]]) -> float:
    """Return the ECE over the pooled queries of all seeds, averaged over tasks."""
    by_task = defaultdict(list)
    for task, scores, gold in parts:
        by_task[task].append((scores, gold))
    joined = [[np.concatenate(part) for part in zip(*own, strict=True)] for own in by_task.values()]
    return float(np.mean([confidence(scores, gold, scores.argmax(1)).ece for scores, gold in joined]))


def with_unseen_rows(fits: list[Fit], times: int, random: np.random.Generator) -> float:
    """Return the ECE of all seeds with temperatures fitted on held-out queries instead of cross-validation.

    Uses ``times`` as many queries as the fit has demonstrations.
    """
    result = []
    for _ in range(DRAWS):
        parts = []
        for fit in fits:
            rows = random.permutation(len(fit.gold))[: times * len(fit.left_out_gold)]
            chosen = likely_temperature(fit.scores[rows], fit.gold[rows])
            parts.append((fit.task, normalised(fit.scores, chosen), fit.gold))
        result.append(error_of_all_seeds(parts))
    return float(np.mean(result))


def threshold_table(fits: list[Fit], random: np.random.Generator) -> str:
    """Tabulate how often a threshold exists and misses the target: shares of the draws."""
    lines = ["| task | draws | threshold found | target missed | coverage |", "|---|---:|---:|---:|---:|"]
    for task in SELECTED:
        result = []
        for fit in (one for one in fits if one.task == task):
            right = fit.scores.argmax(1) == fit.gold
            for _ in range(DRAWS):
                rows = random.integers(0, len(right), ROWS)
                temperature = likely_temperature(fit.scores[rows], fit.gold[rows])
                sure = highest(normalised(fit.scores, temperature))
                selection = select(sure[rows], right[rows], TARGET)
                reached = sure >= (selection.threshold if selection else 2.0)
                broken = bool(selection) and right[reached].mean() < TARGET
                result.append((bool(selection), broken, reached.mean()))
        shown, broken, coverage = np.mean(result, 0)
        lines.append(f"| {task} | {len(result)} | {shown:.3f} | {broken:.3f} | {coverage:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print everything."""
    fits, random = read(Path(sys.argv[1]), Path(sys.argv[2])), np.random.default_rng(0)
    by_refits = np.array([(fit.left_out.argmax(1) == fit.left_out_gold).mean() for fit in fits])
    apart = 100 * (by_refits - np.array([(fit.scores.argmax(1) == fit.gold).mean() for fit in fits]))
    seconds = np.mean([fit.seconds for fit in fits])
    sizes = f"mean {apart.mean():.1f} points, mean size {np.abs(apart).mean():.1f}"
    right = drawn(fits, random)
    by_fit = np.mean([confidence(at, answers, at.argmax(1)).ece for _, at, answers in right])
    more = np.random.default_rng(1)
    all_seeds = np.mean([error_of_all_seeds(drawn(fits, more)) for _ in range(DRAWS)])
    unseen = [100 * with_unseen_rows(fits, times, more) for times in (1, 2)]
    parts = (
        f"{len(fits)} fits of {', '.join(sorted({fit.task for fit in fits}))}",
        temperature_table(fits),
        f"ECE of calibrated probabilities: {100 * by_fit:.1f} %, of all seeds {100 * all_seeds:.1f} %",
        "ECE of all seeds with temperatures from held-out rows: {:.1f} % with as many rows as examples, "
        "{:.1f} % with twice as many".format(*unseen),
        f"Cross-validation minus test accuracy: {sizes}; {seconds:.0f} CPU seconds per fit",
        threshold_table(fits, random),
    )
    sys.stdout.write("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
