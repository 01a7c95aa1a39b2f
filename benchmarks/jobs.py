"""Part of `run.py`: complete fit-and-predict jobs of the naive program and of the package's recipes."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console

import measures
from i2cl import CalibrationConfig, Decoder, evaluate, load_task
from i2cl.methods import make_methods
from naive import Naive
from workload import Workload

console = Console(stderr=True)


def whole_jobs(work: Workload, rounds: int, epochs: int) -> list[dict[str, Any]]:
    """Fit and predict with the naive program and both recipes, in alternating order."""
    done = []
    for turn in range(rounds):
        console.print(f"whole jobs, round {turn + 1} of {rounds}")
        done.append(one_round(work, epochs, backwards=bool(turn % 2)))
    rows = []
    for name, target in (("paper", ">= 1.6"), ("fast", ">= 4")):
        times = [(taken["naive"], taken[name]) for taken, _ in done]
        right = [(best[name] == best["naive"]).float().mean().item() for _, best in done]
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
    """Return the seconds and the predictions of each job."""
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
    """Fit and predict with the naive program, on the batches of the paper's recipe."""
    naive.extract(work.demonstrations)
    naive.calibrate(work.demonstrations, naive.config.batches(len(work.demonstrations), seed=0))
    return naive.scores(work.texts)


def our_job(work: Workload, recipe: str, **changes: object) -> torch.Tensor:
    """Fit and predict with the package."""
    return measures.fitted(work, recipe, **changes).log_probs(work.decoder, work.texts)


def agreement(work: Workload, epochs: int) -> dict[str, Any]:
    """Compare predictions of the paper's recipe with the naive program's, both without noise."""
    config = CalibrationConfig(epochs=epochs, noise=0)
    naive = naive_job(Naive(work.decoder, work.task, config), work)
    ours = our_job(work, "paper", epochs=epochs, noise=0)
    return {
        "name": "predictions equal to naive's without noise, recipe paper",
        "value": 100 * (ours.argmax(-1) == naive.argmax(-1)).float().mean().item(),
        "unit": "%",
        "target": "100",
        "detail": {
            "epochs": epochs,
            "queries": len(work.texts),
            "largest_difference_nats": (ours - naive).abs().max().item(),
        },
    }


def accuracy(tasks: Sequence[str], seeds: int, **changes: object) -> dict[str, Any]:
    """Compare the accuracy of the fast recipe with the paper's, on the reference model."""
    decoder = Decoder.from_pretrained("reference", device="cpu")
    kept: dict[str, list[float]] = {}
    for recipe in ("paper", "fast"):
        (method,) = make_methods(["i2cl"], changes, recipe)
        kept[recipe] = [
            100 * evaluate(decoder, load_task(name), method, seed=seed, limit=100).accuracy
            for name in tasks
            for seed in range(seeds)
        ]
    mean = {recipe: sum(values) / len(values) for recipe, values in kept.items()}
    return {
        "name": "accuracy of recipe fast - recipe paper, reference model",
        "value": mean["fast"] - mean["paper"],
        "unit": "points",
        "target": "equal",
        "detail": {**mean, "tasks": list(tasks), "seeds": seeds, "runs": kept},
    }
