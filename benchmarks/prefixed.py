"""I2CL against few-shot with its demonstrations cached, for tasks served in turns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from i2cl.injections.pool import InjectionPool
from i2cl.models.batching import Ids
from i2cl.models.prefix import Prefix
from i2cl.models.scoring import score
from timing import seconds
from workload import Workload


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
