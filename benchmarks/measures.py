"""What the benchmark measures, one function a row of its table.

Machines are noisy, but a ratio of neighbouring runs is not: comparisons are made in pairs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from statistics import median
from typing import Any, TypeVar

import torch

from i2cl.core.calibration import calibrate, calibrate_many
from i2cl.core.context import extract
from i2cl.core.injection import Injection
from i2cl.core.recipe import CalibrationConfig
from i2cl.injections.pool import InjectionPool
from i2cl.models.batching import Ids, make_batch
from i2cl.models.encoding import LabelTokens
from i2cl.models.memory import peak_memory
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import score
from workload import Workload

ROWS = 64
"""Rows of the batches that are compared."""


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


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        name: what was measured.
        value: the figure.
        unit: of the figure; ``x`` for a ratio.
        detail: the numbers it was made from.
    """

    name: str
    value: float
    unit: str
    detail: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, pair: Pair, **detail: object) -> "Measure":
        """The ratio of a pair."""
        return cls(name, pair.ratio, "x", {**asdict(pair), **detail})


def fit(work: Workload, recipe: str, **changes: object) -> tuple[Measure, Injection]:
    """Extract and calibrate under a recipe, with its peak memory beyond the model's."""
    result: list[Injection] = []
    with peak_memory(work.decoder.device) as peak:
        taken = seconds(lambda: result.append(fitted(work, recipe, **changes)), work.decoder.device)
    detail = {"peak_memory_bytes": peak.bytes, "added_memory_bytes": peak.added}
    return Measure(f"fit, recipe {recipe}", taken, "s", detail), result[0]


def fitted(work: Workload, recipe: str, **changes: object) -> Injection:
    """An injection calibrated on the workload's demonstrations."""
    context = extract(work.decoder, work.task, work.demonstrations)
    config = CalibrationConfig.recipe(recipe, **changes)
    return calibrate(work.decoder, work.task, work.demonstrations, context, config)


def predict(work: Workload, injection: Injection) -> Measure:
    """Classify all texts, tokenisation included, with its peak memory beyond the model's."""
    run = partial(injection.scores, work.decoder, work.texts)
    run()
    with peak_memory(work.decoder.device) as peak:
        taken = seconds(run, work.decoder.device)
    detail = {"seconds": taken, "peak_memory_bytes": peak.bytes, "added_memory_bytes": peak.added}
    return Measure("predict", len(work.texts) / taken, "queries/s", detail)


def predict_over_forward(
    work: Workload, injection: Injection, pairs: int, *, same_products: bool = False
) -> Measure:
    """Throughput of predict against the base model's own forward of the same tokens without padding.

    That forward multiplies matrices as PyTorch does, or, if wanted, as predict does (`i2cl.models.onednn`).
    """
    groups = [list(group) for _, group in groupby(sorted(work.queries, key=len), key=len)]
    plain = partial(_base_forward, work, groups, same_products=same_products)
    whole = partial(injection.scores, work.decoder, work.texts)
    pair = paired(whole, plain, work.decoder.device, pairs)
    like = ", same products" if same_products else ""
    return Measure.of(f"predict / plain forward{like}, throughput", pair, queries=len(work.texts))


def injected_over_plain(work: Workload, injection: Injection, pairs: int) -> Measure:
    """Time of an injected forward pass over that of a plain one, for the same batch."""
    batch = make_batch(_middle(work.queries), work.decoder.device)
    with work.decoder.frozen(), torch.no_grad():
        plain = partial(work.decoder.forward, batch)
        pair = paired(plain, partial(plain, edit=injection.edit()), work.decoder.device, pairs)
    return Measure.of("injected / plain forward, time", pair, rows=len(batch.rows))


def labels_over_repeated_queries(work: Workload, pairs: int, labels: int = 12) -> Measure:
    """Throughput of full label sequences: one row for each query against one for each query and label."""
    decoder = work.decoder
    words = LabelTokens(tuple((1, 2 + label, 3) for label in range(labels)), full=True)

    def run(once: bool) -> None:
        kept, decoder.can_fork = decoder.can_fork, decoder.can_fork and once
        try:
            score(decoder, work.queries[:ROWS], words)
        finally:
            decoder.can_fork = kept

    pair = paired(partial(run, once=True), partial(run, once=False), decoder.device, pairs, warm=False)
    name = f"{labels} whole labels behind a query run once / once a label, throughput"
    return Measure.of(name, pair, queries=len(work.queries[:ROWS]), label_tokens=3)


def mixed_over_one(work: Workload, pairs: int, loaded: int = ROWS) -> Measure:
    """Throughput of a batch whose rows belong to 64 tasks against that of one task."""
    pool = InjectionPool(work.decoder)
    base = work.injection()
    device = work.decoder.device
    names = [f"task {number}" for number in range(loaded)]
    with peak_memory(device) as peak:
        took = seconds(partial(_load, pool, names, base), device)
    texts = sorted(work.texts, key=len)[:ROWS]  # short ones: 64 long rows measure the allocator of a CPU
    chosen = names[:: max(1, loaded // len(texts))][: len(texts)]
    mixed = partial(pool.scores, texts, chosen)
    with _one_batch(work):
        pair = paired(mixed, partial(base.scores, work.decoder, texts), device, pairs)
    return Measure.of(
        f"{len(texts)} tasks in a batch / one task, throughput, {loaded} loaded",
        pair,
        load_seconds_each=took / loaded,
        bytes_each=4 * 2 * work.decoder.layers * work.decoder.d_model,
        measured_bytes_each=peak.added / loaded,
    )


S = TypeVar("S", str, Ids)


def _middle(items: Sequence[S]) -> list[S]:
    """Up to 64 of about the same length, so that they make one batch with little padding."""
    start = max(0, (len(items) - ROWS) // 2)
    return sorted(items, key=len)[start : start + ROWS]


def together_over_alone(work: Workload, runs: int, epochs: int, pairs: int) -> Measure:
    """Throughput of calibrating several seeds of the task together against one after another."""
    config = CalibrationConfig(epochs=epochs)
    context = extract(work.decoder, work.task, work.demonstrations)
    together = partial(
        calibrate_many,
        work.decoder,
        [work.task] * runs,
        [work.demonstrations] * runs,
        [context] * runs,
        config,
        seeds=range(runs),
    )

    def alone() -> None:
        for seed in range(runs):
            calibrate(work.decoder, work.task, work.demonstrations, context, config, seed=seed)

    pair = paired(together, alone, work.decoder.device, pairs)
    return Measure.of(f"{runs} calibrations together / one after another, throughput", pair, epochs=epochs)


@contextmanager
def _one_batch(work: Workload) -> Iterator[None]:
    """Room for all compared rows in a batch."""
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
    """What a model costs, as it is measured: fit with both recipes, predict, comparisons.

    Args:
        work: of the model.
        pairs: of each comparison.
        changes: of the recipes.
    """
    paper, injection = fit(work, "paper", **changes)
    yield paper
    yield fit(work, "fast", **changes)[0]
    yield predict(work, injection)
    yield injected_over_plain(work, injection, pairs)
    yield predict_over_forward(work, injection, pairs)
    yield mixed_over_one(work, pairs)
    yield together_over_alone(work, runs=8, epochs=1, pairs=pairs)
    yield labels_over_repeated_queries(work, pairs)


def _base_forward(work: Workload, groups: Sequence[Sequence[Ids]], *, same_products: bool) -> None:
    model: Any = work.decoder.model.base_model
    with work.decoder.frozen() if same_products else nullcontext(), torch.no_grad():
        for group in groups:
            size = max(1, work.decoder.token_budget // len(group[0]))
            for start in range(0, len(group), size):
                ids = torch.tensor(group[start : start + size], device=work.decoder.device)
                model(input_ids=ids, use_cache=False)


@dataclass(frozen=True)
class Prefixed:
    """I2CL against few-shot with a cached prefix, for some number of tasks served in turns.

    Attributes:
        demonstration_tokens: in front of a query, for few-shot.
        tasks: the queries are spread over.
        i2cl_queries_per_second: all tasks in common batches.
        few_shot_queries_per_second: a batch holds queries of one task.
        i2cl_bytes: cached for all tasks.
        few_shot_bytes: cached for all tasks.
        few_shot_first_use_seconds: to fill one task's cache.
    """

    demonstration_tokens: int
    tasks: int
    i2cl_queries_per_second: float
    few_shot_queries_per_second: float
    i2cl_bytes: int
    few_shot_bytes: int
    few_shot_first_use_seconds: float


def against_prefix(
    work: Workload, tokens: Sequence[int], tasks: Sequence[int], tell: Callable[[str], None] = lambda _: None
) -> Iterator[Prefixed]:
    """Serve the workload's texts both ways. All tasks share one cache's numbers, and count their own."""
    base = work.injection()
    pool = InjectionPool(work.decoder, {f"task {number}": base for number in range(max(tasks))})
    device = work.decoder.device
    ids = [token for row in work.queries for token in row]
    injected = {}
    for count in tasks:
        names = [f"task {row % count}" for row in range(len(work.texts))]
        pool.scores(work.texts[:8], names[:8])
        injected[count] = len(work.texts) / seconds(partial(pool.scores, work.texts, names), device)
    for length in tokens:
        tell(f"{length} demonstration tokens")
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
