"""The parts of a server put together, without HTTP: texts in, answers out, tasks that come and go."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from starlette.responses import Response

from i2cl.core import encoder_bias
from i2cl.injections.pool import InjectionPool
from i2cl.interfaces.server import files, fits
from i2cl.interfaces.server.batcher import Batcher
from i2cl.interfaces.server.jobs import Jobs, Kind
from i2cl.interfaces.server.metrics import Metrics
from i2cl.interfaces.server.refusals import RefusalError, stopping
from i2cl.interfaces.server.routes.schemas import require_number
from i2cl.interfaces.server.task_store import Entry, TaskStore
from i2cl.interfaces.server.uploads import unpack, unusable
from i2cl.models.decoder import Decoder
from i2cl.storage.journal import only_writer

WAITING_BATCHES = 16  # full batches that may wait where nobody says how many tokens
RESIDENT = 1000  # tasks on the model's device where nobody says how many
TIMEOUT = 60.0  # seconds before which a request has to begin to run, where it does not say
LONGEST = 1e9  # seconds that any request waits: a deadline that never comes is a file's
READERS = 2  # bodies that are parsed at once

DIGEST_HEADER = "X-I2CL-Digest"
LARGE_ANSWER = 4096  # probabilities above which an answer is serialized on a worker thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class Answer:
    """What is known of some texts."""

    entry: Entry  # the task's name, and the version that answered
    probabilities: list[list[float]]  # of each text, of each label
    tokens: list[int]  # that each text took with its prompt


class Service:
    """One model with its tasks and jobs."""

    def __init__(
        self,
        decoder: Decoder,
        folder: Path,
        *,
        read_only: bool = False,
        most_waiting: int | None = None,
        most_resident: int = RESIDENT,
        encoders: Sequence[str] | None = None,
    ) -> None:
        """Open a folder of tasks for a model, and take up the jobs that are there.

        ``folder``: see `i2cl.interfaces.server.task_store` and `i2cl.interfaces.server.jobs`; ``read_only``:
        write and fit nothing; ``most_waiting``: tokens of requests that may wait; ``most_resident``: tasks on
        the device at once; ``encoders``: sentence encoders that tasks may take, by default the
        one that is here. Raises I2CLError if one is not here, the folder cannot be used, or another process
        writes to it.
        """
        here = [name for name in [encoder_bias.local_encoder()] if name]
        if encoders is not None:
            here = [encoder_bias.absolute(name) for name in encoders]
            encoder_bias.require_encoders(here, str(decoder.device))
        self.decoder, self.base = decoder, decoder.name
        self.metrics = Metrics()  # figures of all of it
        self._held = ExitStack()
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
            cure = "stop it, choose another folder, or add --read-only"
            held = only_writer(folder / ".lock", f"another process serves {str(folder)!r}: {cure}")
            self._held.enter_context(held)
        pool = InjectionPool(decoder)
        # the folder of tasks
        limits: Any = {"most_resident": most_resident, "read_only": read_only, "encoders": here}
        self.tasks = TaskStore(folder, pool, **limits)
        _ = decoder.base, decoder.residual_identity  # read now, and not while the first request waits
        bound = most_waiting or WAITING_BATCHES * decoder.token_budget
        self.batcher = Batcher(pool, bound, self.metrics)  # runs the model
        self._parsing = ThreadPoolExecutor(READERS, "parsing")
        self.jobs: Jobs | None = None  # fits and files; None where nothing is written
        if not read_only:
            runs: dict[Kind, Callable[..., dict[str, Any]]] = {"fit": fits.run, "batch": files.run}
            parts: dict[str, Any] = {"batcher": self.batcher, "tasks": self.tasks}
            workers = {kind: partial(run, **parts) for kind, run in runs.items()}
            self.jobs = jobs = Jobs(folder / "jobs", workers)
            self.tasks.needed = lambda: set().union(
                *(job.request.get("digests", {}).values() for job in jobs.all() if not job.ended)
            )
            self.tasks.keeps_all |= not jobs.whole
            self.tasks.sweep()
            jobs.start()
        self.metrics.watch("i2cl_waiting_tokens", "Tokens that wait or run", lambda: self.batcher.waiting)
        self.metrics.watch("i2cl_resident_tasks", "Tasks on the device", lambda: len(pool))

    @property
    def ready(self) -> bool:
        """Whether it answers."""
        return self.batcher.alive and not self.batcher.stops

    async def classify(
        self,
        name: str,
        texts: Sequence[str],
        *,
        timeout: float = TIMEOUT,
        gone: Callable[[], Awaitable[Any]] | None = None,
    ) -> Answer | None:
        """Classify texts, all by one version of a task, whatever is loaded and replaced meanwhile.

        ``timeout``: seconds before which the first text has to begin; ``gone``: returns when nobody waits for
        the answer any more: then what has not run does not, and the answer is None. Raises RefusalError: 413
        on too many texts, see `TaskStore.queries` and `Batcher.submit`; I2CLError on an empty text.
        """
        require_number(texts, "send fewer, or a file to /v1/batches")
        deadline = time.monotonic() + min(timeout, LONGEST)
        self.batcher.require_room()
        entry, rows = await asyncio.to_thread(self.tasks.queries, name, texts)
        ticket = self.batcher.submit(rows, deadline)
        waits: asyncio.Future[Any] = asyncio.wrap_future(ticket.done)
        watches = [asyncio.ensure_future(gone())] if gone is not None else []
        try:
            await asyncio.wait([waits, *watches], return_when=asyncio.FIRST_COMPLETED)
            if not waits.done():
                return None
            scores = waits.result()
        finally:
            self.batcher.cancel(ticket)
            for watch in watches:
                watch.cancel()

        def finish() -> Answer:
            probabilities = [row.softmax(-1).tolist() for row in scores]
            return Answer(entry, probabilities, [len(row.ids) for row in rows])

        return await off_loop(len(rows) * len(entry.labels), finish)

    async def json_response(self, answer: Answer, serialize: Callable[[], str]) -> Response:
        """Return serialized JSON, with the digest of the task's version in a header."""
        size = len(answer.probabilities) * len(answer.entry.labels)
        content = await off_loop(size, serialize)
        headers = {DIGEST_HEADER: answer.entry.digest}
        return Response(content, media_type="application/json", headers=headers)

    async def parsed(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Do something long with a body, on a thread of its own; 503 if nothing new is taken."""
        if self.batcher.stops:
            raise stopping()
        return await asyncio.get_running_loop().run_in_executor(self._parsing, work, *args)

    async def upload(self, name: str, body: bytes) -> Entry:
        """Name a tar file's artefact once it has answered a text; 422 on a bad one; see `TaskStore.put`."""
        injection = await self.parsed(unpack, body)
        rows = await self.parsed(lambda: self.tasks.loaded(injection).queries(["a"], cut=False))
        if rows[0].tokens > self.batcher.bound:
            message = f"a text takes {rows[0].tokens} tokens with all labels, {self.batcher.bound} may run"
            raise RefusalError(422, "bad_artefact", f"{message}: use fewer or shorter labels")
        waits = asyncio.wrap_future(self.batcher.submit_slices(rows, large=False).done)
        await asyncio.wait([waits])
        (outcome,) = waits.result()
        if isinstance(outcome, RefusalError):
            reasons = {"not_finite": unusable(), "internal": unusable("a text makes it fail")}
            raise reasons.get(outcome.code, outcome)
        return await self.parsed(self.tasks.put, name, injection)

    def close(self) -> None:
        """Take nothing new, answer what waits, leave jobs to the next start, and wait for the end."""
        self.batcher.close()
        if self.jobs is not None:
            self.jobs.close()
        self._parsing.shutdown()
        self._held.close()


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run work on ``size`` numbers: on a worker thread if it would block the event loop for milliseconds."""
    return await asyncio.to_thread(work) if size > LARGE_ANSWER else work()


async def answer_request(
    service: Service, request: Any, name: str, texts: str | list[str], timeout: float | None
) -> Answer:
    """Run `Service.classify` for a Starlette request, until its client disconnects.

    Raises RefusalError as `Service.classify`, and 400 for the name of the base model.
    """
    if name == service.base:
        message = f"{name!r} is the base model, which has no labels: use a task of GET /v1/models"
        raise RefusalError(400, "base_model", message)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    texts = [texts] if isinstance(texts, str) else texts
    answer = await service.classify(name, texts, timeout=timeout or TIMEOUT, gone=gone)
    if answer is None:
        raise RefusalError(499, "gone", "the client disconnected, and the request was cancelled: retry")
    return answer
