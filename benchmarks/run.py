"""The benchmark: ratios of paired runs against the naive program and the plain model.

    python benchmarks/run.py -o results/bench.json

Every ratio is the median over pairs of neighbouring runs, which change who goes first.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from i2cl import CalibrationConfig, Decoder, evaluate, load_task
from i2cl.benchmark import measures
from i2cl.benchmark.timing import seconds
from i2cl.benchmark.workload import Workload
from i2cl.context import extract
from i2cl.memory import peak_memory
from i2cl.methods import make_methods
from i2cl.reference.tasks import DEMO_TASKS
from naive import Naive
from shapes import random_decoder
from told import machine, show

console = Console(stderr=True)


@dataclass(frozen=True)
class Scale:
    """How much is run.

    Attributes:
        queries: to predict.
        epochs: of calibration.
        rounds: of the whole jobs.
        pairs: of short comparisons.
        demonstrations: for extraction.
        tokens: in front of a query, for few-shot.
        tasks: served in turns, against few-shot.
        served: queries of those.
        loaded: tasks in a pool.
        accuracy_seeds: of the fast recipe's accuracy on the reference model.
    """

    queries: int = 500
    epochs: int = 100
    rounds: int = 2
    pairs: int = 7
    demonstrations: tuple[int, ...] = (10, 100, 1000, 10_000)
    tokens: tuple[int, ...] = (100, 500, 2000)
    tasks: tuple[int, ...] = (1, 10, 100)
    served: int = 100
    loaded: int = 10_000
    accuracy_seeds: int = 3


QUICK = Scale(8, 2, 1, 2, (10, 20), (20, 40), (1, 4), 8, 70, 1)


def whole_jobs(work: Workload, scale: Scale) -> list[dict[str, Any]]:
    """Fit and predict, all of it, by the naive program and by both recipes in turns."""
    rounds = []
    for turn in range(scale.rounds):
        console.print(f"whole jobs, round {turn + 1} of {scale.rounds}")
        rounds.append(one_round(work, scale.epochs, backwards=bool(turn % 2)))
    rows = []
    for name, target in (("paper", ">= 1.6"), ("fast", ">= 4")):
        times = [(taken["naive"], taken[name]) for taken, _ in rounds]
        right = [(best[name] == best["naive"]).float().mean().item() for _, best in rounds]
        detail = {"naive_seconds": [a for a, _ in times], "seconds": [b for _, b in times]}
        rows.append(
            {
                "name": f"fit + predict {len(work.texts)} against naive, recipe {name}",
                "value": median(a / b for a, b in times),
                "unit": "x",
                "target": target,
                "detail": {**detail, "predictions_as_naive": min(right)},
            }
        )
    return rows


def one_round(
    work: Workload, epochs: int, *, backwards: bool
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Seconds and predictions of each job."""
    naive = Naive(work.decoder, work.task, CalibrationConfig(epochs=epochs))
    taken: dict[str, float] = {}
    best: dict[str, torch.Tensor] = {}
    jobs: dict[str, Callable[[], torch.Tensor]] = {
        "fast": partial(our_job, work, "fast"),
        "naive": partial(naive_job, naive, work),
        "paper": partial(our_job, work, "paper", epochs=epochs),
    }
    for name, job in sorted(jobs.items(), reverse=backwards):
        started = time.perf_counter()
        best[name] = job().argmax(-1)
        taken[name] = time.perf_counter() - started
        console.print(f"  {name}: {taken[name]:.1f} s")
    return taken, best


def naive_job(naive: Naive, work: Workload) -> torch.Tensor:
    """Fit and predict as the naive program does, on the batches of the exact recipe."""
    naive.extract(work.demonstrations)
    naive.calibrate(work.demonstrations, naive.config.batches(len(work.demonstrations), seed=0))
    return naive.scores(work.texts)


def our_job(work: Workload, recipe: str, **changes: object) -> torch.Tensor:
    """The same by the package."""
    return measures.fitted(work, recipe, **changes).scores(work.decoder, work.texts)


def accuracy(scale: Scale) -> dict[str, Any]:
    """Accuracy of the fast recipe minus the paper's, in points, on the reference model."""
    decoder = Decoder.from_pretrained("reference", device="cpu")
    kept: dict[str, list[float]] = {}
    for recipe in ("paper", "fast"):
        (method,) = make_methods(["i2cl"], recipe=CalibrationConfig.recipe(recipe).model_dump())
        kept[recipe] = [
            100 * evaluate(decoder, load_task(name), method, seed=seed, limit=100).accuracy
            for name in DEMO_TASKS
            for seed in range(scale.accuracy_seeds)
        ]
    mean = {recipe: sum(values) / len(values) for recipe, values in kept.items()}
    return {
        "name": "accuracy of recipe fast - recipe paper, reference model",
        "value": mean["fast"] - mean["paper"],
        "unit": "points",
        "target": "equal",
        "detail": {**mean, "tasks": list(DEMO_TASKS), "seeds": scale.accuracy_seeds, "runs": kept},
    }


def extraction(decoder: Decoder, scale: Scale) -> dict[str, Any]:
    """Milliseconds a demonstration at the largest number against the second smallest, and peak memory."""
    rows = []
    for count in scale.demonstrations:
        console.print(f"extraction over {count} demonstrations")
        work = Workload.make(decoder, queries=1, shots=count // 2)
        run = partial(extract, decoder, work.task, work.demonstrations)
        with peak_memory(decoder.device) as peak:
            taken = seconds(run, decoder.device)
        rows.append(
            {"demonstrations": count, "ms_each": 1000 * taken / count, "peak_memory_bytes": peak.bytes}
        )
    few, many = rows[1], rows[-1]
    return {
        "name": f"extraction, time each: {many['demonstrations']} / {few['demonstrations']} demonstrations",
        "value": many["ms_each"] / few["ms_each"],
        "unit": "x",
        "target": "1 (linear), memory flat",
        "detail": {"rows": rows},
    }


def start_up(pairs: int) -> list[dict[str, Any]]:
    """Median seconds of a bare import, and of the command line's help."""
    program = [sys.executable, "-c"]
    bare, imported, helped = [], [], []
    for _ in range(pairs):
        bare.append(_process([*program, "pass"]))
        imported.append(_process([*program, "import i2cl"]))
        helped.append(_process([*program, "from i2cl.cli import main; main(['--help'])"]))
    detail = {"bare_python_seconds": median(bare)}
    return [
        {"name": name, "value": median(times), "unit": "s", "target": "<= 0.3", "detail": detail}
        for name, times in (("import i2cl", imported), ("i2cl --help", helped))
    ]


def _process(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def table(scale: Scale) -> dict[str, Any]:
    """Every row, and the machine it was measured on."""
    decoder = random_decoder("gpt2-small" if scale != QUICK else "tiny")
    work = Workload.make(decoder, scale.queries)
    some = Workload.make(decoder, min(200, scale.queries))
    injection = work.injection()
    rows = start_up(5)
    for told, measure, target in (
        ("injected / plain", lambda: measures.injected_over_plain(work, injection, scale.pairs), "<= 1.02"),
        ("64 tasks / one", lambda: measures.mixed_over_one(work, scale.pairs), ">= 0.95"),
        ("many loaded", lambda: measures.mixed_over_one(work, scale.pairs, scale.loaded), ">= 0.95"),
        ("predict / forward", lambda: measures.predict_over_forward(some, injection, 3), ">= 0.9"),
    ):
        console.print(told)
        rows.append({**asdict(measure()), "target": target})
    rows.append(extraction(decoder, scale))
    served = Workload.make(decoder, scale.served)
    prefixed = measures.against_prefix(served, scale.tokens, scale.tasks, console.print)
    against = [asdict(row) for row in prefixed]
    rows += whole_jobs(work, scale)
    console.print("accuracy of the fast recipe")
    rows.append(accuracy(scale))
    return {"machine": machine(), "shape": decoder.name, "rows": rows, "against_cached_prefix": against}


def main() -> None:
    """Measure, write JSON, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few runs: does it work?")
    given = parser.parse_args()
    started = time.perf_counter()
    results = table(QUICK if given.quick else Scale())
    results["minutes"] = (time.perf_counter() - started) / 60
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(results)


if __name__ == "__main__":
    main()
