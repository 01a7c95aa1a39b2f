"""Part of `run.py` and `gpu.py`: measurements, one function per row of the table.

Comparisons are ratios of adjacent runs, which are much less noisy than absolute times.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any, TypeVar

import torch

from i2cl.core.calibration import calibrate
from i2cl.core.context import extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.injections.pool import InjectionPool
from i2cl.models.batching import Ids, make_batch
from i2cl.models.memory import peak_memory
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import score
from workload import Workload

ROWS = 64
"""Rows of a compared batch."""


Work = Callable[[], Any]


@dataclass(frozen=True)
class Pair:
    """Times of two functions, run alternately.

    Attributes:
        first: median seconds of the first.
        second: median seconds of the second.
        ratio: median of second / first over the pairs.
        low: smallest ratio of a pair.
        high: largest ratio of a pair.
        pairs: number of pairs.
    """

    first: float
    second: float
    ratio: float
    low: float
    high: float
    pairs: int


def seconds(work: Work, device: torch.device) -> float:
    """Time a function, including pending work on an accelerator."""
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def paired(first: Work, second: Work, device: torch.device, pairs: int, *, warm: bool = True) -> Pair:
    """Run both functions alternately, after a warm-up if ``warm``, and alternate which one is first."""
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


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        name: what was measured.
        value: the result.
        unit: its unit; ``x`` for a ratio.
        detail: the numbers it is computed from.
    """

    name: str
    value: float
    unit: str
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, pair: Pair, **detail: object) -> "Measure":
        """Build the measure of a pair's ratio."""
        return cls(name, pair.ratio, "x", {**asdict(pair), **detail})


def fit(work: Workload, recipe: str, **changes: object) -> tuple[Measure, Injection]:
    """Time extraction and calibration with a recipe, and measure their peak memory besides the model."""
    result: list[Injection] = []
    with peak_memory(work.decoder.device) as peak:
        taken = seconds(lambda: result.append(fitted(work, recipe, **changes)), work.decoder.device)
    detail = {"peak_memory_bytes": peak.bytes, "added_memory_bytes": peak.added}
    return Measure(f"fit, recipe {recipe}", taken, "s", detail), result[0]


def fitted(work: Workload, recipe: str, **changes: object) -> Injection:
    """Calibrate an injection on the workload's demonstrations."""
    context = extract(work.decoder, work.task, work.demonstrations)
    config = CalibrationConfig.recipe(recipe, **changes)
    return calibrate(work.decoder, work.task, work.demonstrations, context, config)


def predict(work: Workload, injection: Injection) -> Measure:
    """Time the classification of all texts, tokenization included, and measure its peak memory."""
    run = partial(injection.log_probs, work.decoder, work.texts)
    run()
    with peak_memory(work.decoder.device) as peak:
        taken = seconds(run, work.decoder.device)
    detail = {"seconds": taken, "peak_memory_bytes": peak.bytes, "added_memory_bytes": peak.added}
    return Measure("predict", len(work.texts) / taken, "queries/s", detail)


def predict_over_forward(work: Workload, injection: Injection, pairs: int) -> Measure:
    """Compare the throughput of prediction with the base model's forward on unpadded batches of the texts."""
    groups = [list(group) for _, group in groupby(sorted(work.queries, key=len), key=len)]
    plain = partial(_base_forward, work, groups)
    whole = partial(injection.log_probs, work.decoder, work.texts)
    pair = paired(whole, plain, work.decoder.device, pairs)
    return Measure.of("predict / plain forward, throughput", pair, queries=len(work.texts))


def injected_over_plain(work: Workload, injection: Injection, pairs: int) -> Measure:
    """Compare the times of an injected and a plain forward pass on the same batch."""
    batch = make_batch(_middle(work.queries), work.decoder.device)
    with work.decoder.frozen(), torch.no_grad():
        plain = partial(work.decoder.forward, batch)
        pair = paired(plain, partial(plain, edit=injection.edit()), work.decoder.device, pairs)
    return Measure.of("injected / plain forward, time", pair, rows=len(batch.rows))


def mixed_over_one(work: Workload, pairs: int, loaded: int = ROWS) -> Measure:
    """Compare the throughputs of batches with 64 tasks and with one task."""
    pool = InjectionPool(work.decoder)
    base = work.injection()
    device = work.decoder.device
    names = [f"task {number}" for number in range(loaded)]
    with peak_memory(device) as peak:
        took = seconds(partial(_load, pool, names, base), device)
    texts = sorted(work.texts, key=len)[:ROWS]  # short ones: with 64 long rows, a CPU's allocator dominates
    chosen = names[:: max(1, loaded // len(texts))][: len(texts)]
    mixed = partial(pool.log_probs, texts, chosen)
    with _one_batch(work):
        pair = paired(mixed, partial(base.log_probs, work.decoder, texts), device, pairs)
    return Measure.of(
        f"{len(texts)} tasks in a batch / one task, throughput, {loaded} loaded",
        pair,
        load_seconds_each=took / loaded,
        bytes_each=4 * 2 * work.decoder.layers * work.decoder.d_model,
        measured_bytes_each=peak.added / loaded,
    )


S = TypeVar("S", str, Ids)


def _middle(items: Sequence[S]) -> list[S]:
    """Return up to 64 items of similar length, for a batch with little padding."""
    start = max(0, (len(items) - ROWS) // 2)
    return sorted(items, key=len)[start : start + ROWS]


@contextmanager
def _one_batch(work: Workload) -> Iterator[None]:
    """Raise the token budget so that all compared rows fit into a batch."""
    budget = work.decoder.token_budget
    work.decoder.token_budget = max(budget, ROWS * max(map(len, work.queries)))
    try:
        yield
    finally:
        work.decoder.token_budget = budget


def _load(pool: InjectionPool, names: Sequence[str], injection: Injection) -> None:
    for name in names:
        pool.load(name, injection)


def rows_of(work: Workload, pairs: int, **changes: object) -> Iterator[Measure]:
    """Measure a model: fits with both recipes, prediction, and comparisons.

    Args:
        work: workload of the model.
        pairs: number of pairs of each comparison.
        changes: changed options of the recipes.
    """
    paper, injection = fit(work, "paper", **changes)
    yield paper
    yield fit(work, "fast", **changes)[0]
    yield predict(work, injection)
    yield injected_over_plain(work, injection, pairs)
    yield predict_over_forward(work, injection, pairs)
    yield mixed_over_one(work, pairs)


def _base_forward(work: Workload, groups: Sequence[Sequence[Ids]]) -> None:
    model: Any = work.decoder.model.base_model
    with torch.no_grad():
        for group in groups:
            size = max(1, work.decoder.token_budget // len(group[0]))
            for start in range(0, len(group), size):
                ids = torch.tensor(group[start : start + size], device=work.decoder.device)
                model(input_ids=ids, use_cache=False)


@dataclass(frozen=True)
class Prefixed:
    """I2CL against few-shot with a cached prefix, on alternating queries of several tasks.

    Attributes:
        demonstration_tokens: tokens in front of a few-shot query.
        tasks: number of tasks.
        i2cl_queries_per_second: with mixed batches.
        few_shot_queries_per_second: with a task per batch.
        i2cl_bytes: stored for all tasks.
        few_shot_bytes: cached for all tasks.
        few_shot_first_use_seconds: time to fill the cache of a task.
    """

    demonstration_tokens: int
    tasks: int
    i2cl_queries_per_second: float
    few_shot_queries_per_second: float
    i2cl_bytes: int
    few_shot_bytes: int
    few_shot_first_use_seconds: float


def against_prefix(
    work: Workload,
    tokens: Sequence[int],
    tasks: Sequence[int],
    report: Callable[[str], None] = lambda _: None,
) -> Iterator[Prefixed]:
    """Serve the workload's texts both ways. Tasks share one cache, but its bytes count for each."""
    base = work.injection()
    pool = InjectionPool(work.decoder, {f"task {number}": base for number in range(max(tasks))})
    device = work.decoder.device
    ids = [token for row in work.queries for token in row]
    injected = {}
    for count in tasks:
        names = [f"task {row % count}" for row in range(len(work.texts))]
        pool.log_probs(work.texts[:8], names[:8])
        injected[count] = len(work.texts) / seconds(partial(pool.log_probs, work.texts, names), device)
    for length in tokens:
        report(f"{length} demonstration tokens")
        prefix, first = _timed_prefix(work, tuple((ids * (length // len(ids) + 1))[:length]))
        for count in tasks:
            taken = seconds(partial(_few_shot, work, prefix, count), device)
            yield Prefixed(
                length,
                count,
                injected[count],
                len(work.texts) / taken,
                count * 4 * 2 * work.decoder.layers * work.decoder.d_model,
                count * prefix.bytes,
                first,
            )


def _timed_prefix(work: Workload, ids: Ids) -> tuple[Prefix, float]:
    made: list[Prefix] = []
    with torch.no_grad():
        taken = seconds(lambda: made.append(work.decoder.prefix(ids)), work.decoder.device)
    return made[0], taken


def _few_shot(work: Workload, prefix: Prefix, tasks: int) -> None:
    queries, labels = work.queries, work.labels
    for task in range(min(tasks, len(queries))):
        score(work.decoder, queries[task::tasks], labels, prefix=prefix)
