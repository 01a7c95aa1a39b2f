"""The server without HTTP: one model with its tasks and jobs."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from i2cl import encoders as sentence_encoders
from i2cl.injections.pool import InjectionPool, RowScores, TaskQuery
from i2cl.interfaces.server import files, fits, labelling
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.guard import Metrics
from i2cl.interfaces.server.jobs import Job, Jobs, Kind
from i2cl.interfaces.server.labelling_store import LabellingStore
from i2cl.interfaces.server.refusals import RefusalError, deadline_passed
from i2cl.interfaces.server.routes.schemas import require_text_count
from i2cl.interfaces.server.task_store import STATE, Entry, TaskStore
from i2cl.interfaces.server.uploads import unpack, unusable_artefact
from i2cl.models.decoder import Decoder
from i2cl.storage.journal import exclusive_lock

QUEUED_BATCHES = 16  # default size of the queue, in full batches
MAX_RESIDENT_TASKS = 1000  # default maximum number of tasks on the model's device
TIMEOUT_SECONDS = 60.0  # default time within which the model has to start on a request
MAX_TIMEOUT_SECONDS = 1e9  # finite, because an infinite deadline marks rows of files
PARSING_THREADS = 2
ENCODING_THREADS = 32  # most of them wait if many requests name a task that is being loaded

LARGE_ANSWER = 4096  # probabilities above which an answer is serialized on a worker thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class Answer:
    """Answer for the texts of one request."""

    entry: Entry  # the version of the task that answered
    probabilities: list[list[float]]  # axes [text, label]
    tokens: list[int]  # of each text with its prompt


class Service:
    """One model with its tasks and jobs."""

    def __init__(
        self,
        decoder: Decoder,
        folder: Path,
        *,
        read_only: bool = False,
        max_queued_tokens: int | None = None,
        max_resident_tasks: int = MAX_RESIDENT_TASKS,
        encoders: Sequence[str] | None = None,
        learned_only: bool = False,
    ) -> None:
        """Open a folder of tasks, and resume its unfinished jobs.

        Args:
            decoder: the model.
            folder: see `i2cl.interfaces.server.task_store`; created if missing.
            read_only: never write, and run no jobs.
            max_queued_tokens: maximum number of tokens of queued requests.
            max_resident_tasks: maximum number of tasks on the device.
            encoders: sentence encoders that tasks may use; default: the one that is available offline.
            learned_only: refuse decisions that no task answers, instead of asking the base model.

        Raises:
            I2CLError: if an encoder is missing, the folder cannot be used, or another process writes to it.
        """
        if encoders is None:
            enabled = [name for name in [sentence_encoders.local_encoder()] if name]
        else:
            enabled = [sentence_encoders.absolute(name) for name in encoders]
            sentence_encoders.require_encoders(enabled, str(decoder.device))
        self.decoder, self.base, self.learned_only = decoder, decoder.name, learned_only
        self.metrics = Metrics()
        self._resources = ExitStack()
        if not read_only:
            (folder / STATE).mkdir(parents=True, exist_ok=True)
            hint = "stop it, choose another folder, or add --read-only"
            lock = exclusive_lock(folder / STATE / "lock", f"another process serves {str(folder)!r}: {hint}")
            self._resources.enter_context(lock)
        pool = InjectionPool(decoder)
        self.tasks = TaskStore(
            folder,
            pool,
            max_resident_tasks=max_resident_tasks,
            read_only=read_only,
            encoders=enabled,
            reserved=[self.base],
        )
        _ = decoder.base, decoder.residual_identity  # warm the caches before the first request
        max_tokens = max_queued_tokens or QUEUED_BATCHES * decoder.token_budget
        self.batcher = Batcher(pool, max_tokens, self.metrics)  # runs the model
        self._parsing = ThreadPoolExecutor(PARSING_THREADS, "parsing")
        self._encoding = ThreadPoolExecutor(ENCODING_THREADS, "encoding")
        self.jobs: Jobs | None = None  # None if read-only
        self.labelling: LabellingStore | None = None  # None if read-only
        if not read_only:
            self._start_jobs(folder / STATE, next(iter(enabled), None))
        self.metrics.watch(
            "i2cl_waiting_tokens", "Tokens in queued and running requests", lambda: self.batcher.waiting
        )
        self.metrics.watch("i2cl_resident_tasks", "Tasks on the device", lambda: len(pool))

    def _start_jobs(self, state: Path, encoder: str | None) -> None:
        """Open the labelling projects, and resume the jobs."""
        self.labelling = LabellingStore(state / "labelling.sqlite3")
        self._resources.callback(self.labelling.close)
        workers: dict[Kind, Callable[[Job], dict[str, Any]]] = {
            "fit": partial(fits.run, batcher=self.batcher, tasks=self.tasks),
            "batch": partial(files.run, batcher=self.batcher, tasks=self.tasks),
            "labelling": partial(labelling.run, batcher=self.batcher, store=self.labelling, encoder=encoder),
        }
        follow_up = partial(labelling.queue_next_round, store=self.labelling)
        self.jobs = Jobs(state / "jobs", workers, follow_up)
        self.jobs.start()

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self.batcher.alive and not self.batcher.is_stopping

    async def classify(self, name: str, texts: Sequence[str], timeout: float | None = None) -> Answer:
        """Classify texts with one version of a task, even if it is replaced in the meantime.

        If the coroutine is cancelled, texts that are not yet encoded are skipped, and rows that have not
        started do not run.

        Args:
            name: the task.
            texts: one or more.
            timeout: seconds within which the model has to start on them; default: `TIMEOUT_SECONDS`.

        Raises:
            RefusalError: 400 for the name of the base model, 413 on too many texts, 504 if the deadline
                passes; see also `TaskStore.queries` and `Batcher.submit`.
            I2CLError: on an empty text.
        """
        if name == self.base:
            message = f"{name!r} is the base model, which has no labels"
            raise RefusalError(400, "base_model", message, "use a task of GET /v1/models")
        require_text_count(texts, "send fewer, or a file to /v1/batches")
        deadline = deadline_of(timeout)
        entry, rows = await self.encode(lambda: self.tasks.queries(name, texts), deadline)
        scores = await self.score(rows, deadline)

        def finish() -> Answer:
            probabilities = [
                row.task.head.probabilities(row_scores.log_probs).tolist()
                for row, row_scores in zip(rows, scores, strict=True)
            ]
            return Answer(entry, probabilities, [len(row.ids) for row in rows])

        return await off_loop(len(rows) * len(entry.labels), finish)

    async def encode(self, work: Callable[[], T], deadline: float) -> T:
        """Look up and load tasks and encode their texts, on a worker thread.

        Args:
            work: calls `TaskStore.queries`.
            deadline: by `time.monotonic`, see `deadline_of`.

        Raises:
            RefusalError: 504 if the deadline passes; see also `Batcher.require_room`.
        """
        self.batcher.require_room()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await asyncio.get_running_loop().run_in_executor(self._encoding, work)
        except TimeoutError:
            raise deadline_passed() from None

    async def score(self, rows: Sequence[TaskQuery], deadline: float) -> list[RowScores]:
        """Score rows of any tasks as one request. Raises RefusalError, see `Batcher.submit`."""
        ticket = self.batcher.submit(rows, deadline)
        try:
            done: asyncio.Future[Any] = asyncio.wrap_future(ticket.done)  # of RowScores, or an error
            return list(await asyncio.shield(done))
        finally:
            self.batcher.cancel(ticket)

    async def run_blocking(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run long work, such as parsing, on a worker thread. Raises RefusalError (503) during shutdown."""
        self.batcher.require_running()
        return await asyncio.get_running_loop().run_in_executor(self._parsing, work, *args)

    async def upload(self, name: str, body: bytes) -> Entry:
        """Add an artefact in a tar file as a task, after a test that it can answer. Raises RefusalError (422)
        if it cannot be used; see also `TaskStore.put`.
        """
        injection = await self.run_blocking(unpack, body)
        rows = await self.run_blocking(lambda: self.tasks.prepare(injection).queries(["a"], cut=False))
        if rows[0].tokens > self.batcher.max_tokens:
            tokens, limit = rows[0].tokens, self.batcher.max_tokens
            message = f"a text takes {tokens} tokens with all labels, but the limit is {limit}"
            raise RefusalError(422, "bad_artefact", message, "use fewer or shorter labels")
        scored = asyncio.wrap_future(self.batcher.submit_slices(rows, large=False).done)
        await asyncio.wait([scored])
        (outcome,) = scored.result()
        if isinstance(outcome, RefusalError):
            if outcome.code == "internal":
                raise unusable_artefact("scoring a text fails")
            raise unusable_artefact() if outcome.code == "not_finite" else outcome
        return await self.run_blocking(self.tasks.put, name, injection)

    def close(self) -> None:
        """Stop accepting work, finish queued requests, and keep unfinished jobs for the next start."""
        self.batcher.close()
        if self.jobs is not None:
            self.jobs.close()
        self._parsing.shutdown()
        self._encoding.shutdown()
        self._resources.close()


def deadline_of(timeout: float | None) -> float:
    """Return a deadline by `time.monotonic`, ``timeout`` seconds from now (None: `TIMEOUT_SECONDS`)."""
    return time.monotonic() + min(TIMEOUT_SECONDS if timeout is None else timeout, MAX_TIMEOUT_SECONDS)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run work on ``size`` numbers, on a worker thread if it would block the event loop for milliseconds."""
    return await asyncio.to_thread(work) if size > LARGE_ANSWER else work()
