"""Labels for a stream of texts, chunk by chunk and in order: here, or by the workers of a Ray cluster.

Source: https://docs.ray.io/en/latest/data/batch_inference.html. Both score the same chunks, so both give the
same numbers.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.experiments.workers.cluster import joined, quiet_core
from i2cl.interfaces.batch_prediction.tables import NUMBER, Table
from i2cl.models.decoder import Decoder
from i2cl.tasks.files import RowError
from i2cl.tasks.formats import RowFormat
from i2cl.tasks.rows import Query, read_queries


class WorkerWarning(UserWarning):
    """What a worker of a cluster warned of, in its words."""


@dataclass(frozen=True)
class Texts:
    """Chunks of a file's texts, see `i2cl.tasks.rows.read_queries`."""

    source: str  # path, or ``-`` for stdin
    kind: RowFormat | None = None  # the file's format
    column: str = "text"  # which column or key holds the text
    chunk: int = 512  # texts at a time
    skip: int = 0  # texts left out at the start; they are read and checked all the same
    kept: tuple[str, ...] = ()  # columns that come back with the answers
    numbered: bool = False  # whether the number of the row does too, before them: from 1, without the header

    def __post_init__(self) -> None:
        if self.numbered and NUMBER in self.kept:
            cure = "leave one out"
            raise I2CLError(f"--keep {NUMBER} and --row-number would both be called {NUMBER!r}: {cure}")

    @property
    def names(self) -> tuple[str, ...]:
        """Of what comes back."""
        return (NUMBER, *self.kept) if self.numbered else self.kept

    def __iter__(self) -> Iterator[list[Query]]:
        rows = enumerate(read_queries(self.source, self.kind, self.column, self.kept), start=1)
        queries = (Query(text, (number, *kept) if self.numbered else kept) for number, (text, kept) in rows)
        waiting = islice(queries, self.skip, None)
        while chunk := list(islice(waiting, self.chunk)):
            yield chunk


@dataclass(frozen=True)
class Scorer:
    """Turns texts into finished lines."""

    injection: Injection  # the task
    decoder: Decoder  # its model
    table: Table  # how the lines are written
    force: bool = False  # accept other weights of the same sizes

    def __call__(self, queries: list[Query]) -> str:
        """One line per text."""
        texts = [query.text for query in queries]
        probabilities = self.injection.scores(self.decoder, texts, force=self.force).softmax(-1).tolist()
        return self.table.lines(probabilities, [query.kept for query in queries])


# Makes a scorer; must be picklable to run on Ray, such as a partial of a function.
ScorerSource = Callable[[], Callable[[list[Query]], str]]


# Finished lines of each chunk as it is done, and how many texts they are of; to be closed by who stops early,
# which ends the cluster.
ScoredStream = Generator[tuple[str, int], None, None]


def digest(injection: Injection) -> str:
    """SHA-256 of all that an injection's answers depend on."""
    said: list[object] = [injection.task.to_dict(), asdict(injection.base), injection.positions]
    said += [injection.scoring, injection.context.config.site, injection.seed, injection.label_bias]
    said += [injection.temperature] if injection.temperature != 1 else []  # other digests are as before
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for tensor in (injection.context.values, injection.coefficients):
        sha.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def predict_here(source: ScorerSource, texts: Iterable[list[Query]]) -> ScoredStream:
    """Score chunks here. Raises I2CLError on a model that cannot be loaded, or texts that cannot be used."""
    score = source()
    for chunk in texts:
        yield score(chunk), len(chunk)


def predict_on_ray(
    source: ScorerSource, texts: Texts, address: str | None = None, workers: int | None = None
) -> ScoredStream:
    """Score chunks on a cluster: one task there reads the file ahead of workers that each hold a scorer.

    Memory stays bounded: Ray Data holds the reader back while chunks wait. A worker that dies is replaced.

    Args:
        source: makes the scorer, in every worker.
        texts: a file that all machines can read.
        address: see `i2cl.experiments.workers.cluster.joined`.
        workers: how many; default: one per GPU of the cluster, or per core without any.

    Raises:
        I2CLError: as `predict_here`, or if the package ray is lacking, or no cluster answers.
    """
    with joined(address) as cluster, quiet_core():
        import ray.data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True
        context.target_max_block_size = 1  # so that every chunk, which is one row, travels on its own
        start: Any = ray.data.from_items([{"texts": ""}])  # whose types leave no room for callable classes
        chunks = start.flat_map(_read, fn_args=(texts,), num_cpus=0)  # or it would wait for a worker's core
        actors = ray.data.ActorPoolStrategy(size=workers or cluster.workers)
        results = chunks.map(_Worker, fn_constructor_args=(source,), compute=actors, **cluster.share)
        yield from map(_received, results.iter_rows())


def _read(_row: dict[str, Any], texts: Texts) -> Iterator[dict[str, Any]]:
    """One chunk a row, as JSON, so that every block has the same plain columns."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for chunk in texts:
                yield {"texts": json.dumps(chunk), "error": "", "of_rows": False, "told": _ours(caught)}
                caught.clear()
        except I2CLError as error:
            of_rows = isinstance(error, RowError)
            yield {"texts": "[]", "error": str(error), "of_rows": of_rows, "told": _ours(caught)}


def _ours(caught: list[warnings.WarningMessage]) -> str:
    """What this package warned of, as JSON."""
    return json.dumps([str(one.message) for one in caught if one.category.__module__.startswith("i2cl")])


class _Worker:
    """Holds the scorer of one actor. Errors travel as values, since Ray would wrap and retry them."""

    def __init__(self, source: ScorerSource) -> None:
        self._source = source
        self._score: Callable[[list[Query]], str] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        texts = [Query(text, tuple(kept)) for text, kept in json.loads(row["texts"])]
        lines, error, of_rows = "", row["error"], row["of_rows"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if texts:
                    self._score = self._score or self._source()
                    lines = self._score(texts)
            except I2CLError as raised:
                error, of_rows = str(raised), isinstance(raised, RowError)
        messages = json.dumps(json.loads(row["told"]) + json.loads(_ours(caught)))
        told = {"warnings": messages, "error": error, "of_rows": of_rows}
        return {"lines": lines, "rows": len(texts), **told}


def _received(result: dict[str, Any]) -> tuple[str, int]:
    for message in json.loads(result["warnings"]):
        warnings.warn(message, WorkerWarning, stacklevel=3)
    if result["error"]:
        raise (RowError if result["of_rows"] else I2CLError)(result["error"])
    return result["lines"], result["rows"]
