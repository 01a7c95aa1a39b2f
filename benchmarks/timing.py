"""Timing in pairs: machines are noisy, but a ratio of neighbouring runs is not."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

Work = Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """Two pieces of work, run in turns.

    Attributes:
        first: median seconds of the first.
        second: median seconds of the second.
        ratio: median over the pairs of second / first.
        low: smallest ratio of a pair.
        high: largest.
        pairs: how many.
    """

    first: float
    second: float
    ratio: float
    low: float
    high: float
    pairs: int


def seconds(work: Work, device: torch.device) -> float:
    """How long it takes, with what it left running on an accelerator."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def paired(first: Work, second: Work, device: torch.device, pairs: int, *, warm: bool = True) -> Pair:
    """Run both in turns, each once for warmth if wanted, changing who goes first."""
    if warm:
        first()
        second()
    times: list[tuple[float, float]] = []
    for turn in range(pairs):
        if turn % 2:
            late = seconds(second, device)
            times.append((seconds(first, device), late))
        else:
            early = seconds(first, device)
            times.append((early, seconds(second, device)))
    ratios = [b / a for a, b in times]
    return Pair(
        median(a for a, _ in times),
        median(b for _, b in times),
        median(ratios),
        min(ratios),
        max(ratios),
        pairs,
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
