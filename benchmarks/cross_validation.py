"""Compare a cross-validation whose folds share the derivatives of one fit with one that refits.

    python benchmarks/cross_validation.py smollm2 sst2,trec,emoc -o cross_validation.jsonl
    python benchmarks/cross_validation.py --table -o cross_validation.jsonl

Both score each demonstration of an anchored fit without its fold. What depends on these scores is compared:
the accuracy that they estimate, beside the accuracy on test rows, and the temperature and the weights of an
ensemble that they choose, by accuracy and log-loss on the test rows. Appends a line of JSON per task and
seed; existing lines are not run again. The tasks need I2CL_DATA_DIR or the hub.
"""

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import t

from i2cl import Decoder, load_task
from i2cl.injections.ensemble import (
    TEXT_PRIORS,
    EnsembleConfig,
    WeightPrior,
    cross_fitted,
    likely_weights,
    pool_log_probs,
)
from i2cl.methods import Predictor
from i2cl.methods.anchored import Anchored
from i2cl.methods.cross_validation import cross_validate, fold_rows
from i2cl.methods.ensemble import llm_prior, text_methods
from i2cl.methods.injecting import fit_with_refits, injection_predictor
from i2cl.models.encoding import ScoringWarning
from i2cl.tasks import Examples
from tables import measure_missing

TEST_ROWS = 200
KINDS = ("shared", "refits")
Scores = Float[np.ndarray, "members rows labels"]


def measure(decoder: Decoder, name: str, seed: int, *, shots: int, folds: int) -> dict[str, Any]:
    """Cross-validate a fit in both ways."""
    task, method = load_task(name), Anchored()
    rows = task.sample(shots, seed)
    gold = np.array([row.label for row in rows])
    chosen = Random(1).sample(range(len(task.test)), min(TEST_ROWS, len(task.test)))
    test = tuple(task.test[at] for at in chosen)
    test_gold = np.array([row.label for row in test])
    parts = fold_rows(task, rows, folds, seed)
    started = time.process_time()
    injection, known = fit_with_refits(method, decoder, task, rows, parts, seed)
    seconds = {"fit": time.process_time() - started}
    if injection.settings["solved_by"] != "gauss_newton":
        raise ValueError(f"{name}: AdamW fits share no derivatives")
    fresh = partial(method.fit_injection, decoder, task, seed=seed, scoring=injection.scoring)
    experts = text_methods(EnsembleConfig())
    text_scores = [
        scores(cross_validate(task, rows, partial(one.fit, decoder, task, seed=seed), folds, seed), rows)
        for one in experts.values()
    ]
    text_test = [scores(one.fit(decoder, task, rows, seed), test) for one in experts.values()]
    llm_test = scores(injection_predictor(injection, decoder, task), test)
    priors = [llm_prior(method), *(TEXT_PRIORS[expert] for expert in experts)]
    record: dict[str, Any] = {"rows": len(rows), "labels": len(task.labels), "seconds": seconds}
    llm_scores = {}
    for kind, refit in zip(KINDS, (known, fresh), strict=True):
        started = time.process_time()
        predictor = cross_validate(
            task,
            rows,
            lambda rest, refit=refit: injection_predictor(refit(rest), decoder, task),  # type: ignore[misc]
            folds,
            seed,
        )
        llm_scores[kind] = scores(predictor, rows)
        seconds[kind] = time.process_time() - started
        members = np.stack([llm_scores[kind], *text_scores])
        tested = np.stack([llm_test, *text_test])
        record[kind] = {
            "llm": outcome(members[:1], gold, tested[:1], test_gold, priors[:1]),
            "ensemble": outcome(members, gold, tested, test_gold, priors),
        }
    record["agreement"] = float((llm_scores["shared"].argmax(1) == llm_scores["refits"].argmax(1)).mean())
    return record


def scores(predictor: Predictor, rows: Examples) -> Float[np.ndarray, "rows labels"]:
    """Return the normalized log-probabilities of some rows."""
    return predictor.log_probs([row.text for row in rows]).double().log_softmax(-1).numpy()


def outcome(
    members: Scores, gold: np.ndarray, tested: Scores, test_gold: np.ndarray, priors: Sequence[WeightPrior]
) -> dict[str, Any]:
    """Return the estimated accuracy, and accuracy and log-loss on test rows at the chosen weights."""
    estimated = cross_fitted(members, gold, priors)
    weights = likely_weights(members, gold, priors)
    pooled = pool_log_probs(tested, weights)
    return {
        "estimated": float((estimated.argmax(1) == gold).mean()),
        "accuracy": float((pooled.argmax(1) == test_gold).mean()),
        "log_loss": float(-pooled[np.arange(len(test_gold)), test_gold].mean()),
        "weights": [round(weight, 3) for weight in weights],
    }


def show(path: Path) -> None:
    """Print means over tasks, and differences with 95 % t-intervals over the tasks."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tasks = list(dict.fromkeys(record["task"] for record in records))
    print(f"{len(tasks)} tasks, {len(records)} runs: {', '.join(tasks)}")
    for part in ("fit", *KINDS):
        print(f"CPU seconds, {part}: {mean(record['seconds'][part] for record in records):.1f}")
    print(f"equal answers: {100 * mean(record['agreement'] for record in records):.1f} %")
    for who in ("llm", "ensemble"):
        for what in ("estimated", "accuracy", "log_loss"):
            by_task = [
                [mean(one[kind][who][what] for one in records if one["task"] == task) for kind in KINDS]
                for task in tasks
            ]
            shared, refits = (mean(values) for values in zip(*by_task, strict=True))
            gaps = [first - second for first, second in by_task]
            margin = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5
            print(f"{who} {what}: {shared:.3f} {refits:.3f} {mean(gaps):+.3f} +- {margin:.3f}")


def main() -> None:
    """Run what is missing in the file, or print its means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("tasks", nargs="?", default="", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--shots", type=int, default=5, help="per class")
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--dtype", help="such as bfloat16")
    parser.add_argument("--table", action="store_true", help="print the results and run nothing")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    if not given.table:
        warnings.simplefilter("ignore", ScoringWarning)
        decoder = Decoder.from_pretrained(given.model, dtype=given.dtype)
        run = partial(measure, decoder, shots=given.shots, folds=given.folds)
        measure_missing(given.output, given.tasks.split(","), given.seeds, run)
    show(given.output)


if __name__ == "__main__":
    main()
