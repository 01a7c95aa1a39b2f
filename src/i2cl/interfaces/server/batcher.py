"""Continuous batching of requests to many tasks, on one thread that owns the model.

There is no timer: a batch holds what arrived while the previous one ran, earliest deadline first. Large
requests and the rows of files run in slices between other requests. At each pause of a fit, queued requests
get as much time as the fit had. Nothing here depends on HTTP.

If the thread dies, every pending and later request fails with a 503; see `Batcher.failure`.
"""

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError, is_out_of_memory
from i2cl.injections.pool import InjectionPool, TaskQuery
from i2cl.interfaces.server.refusals import RefusalError, busy, deadline_passed, model_failed, stopping
from i2cl.models.scoring import NotFiniteError

SLICES = 32  # slices per full batch; a slice bounds how long a request waits for a large job
LARGE = 4  # a request of more than 1 / LARGE of a full batch is a large job
PATIENCE = 60.0  # seconds after which rows without a deadline run before requests with a later one
QUIET = 60.0  # seconds without a small request after which large jobs run in full batches

_log = logging.getLogger("i2cl.server")


class FitStoppedError(Exception):
    """Raised in a fit that was cancelled, or when the server shuts down."""


Outcome = Float[Tensor, " labels"] | RefusalError  # of one row: log-probabilities of the labels, or an error


@dataclass(eq=False)
class Ticket:
    """Rows of one request, or of one part of a file."""

    rows: Sequence[TaskQuery]
    deadline: float  # on the clock of `time.monotonic`, for the start of the last row
    large: bool  # whether the rows run in slices
    since: float = field(default_factory=time.monotonic)
    # an outcome for each row; errors of single rows are for files only, a request fails as a whole
    done: "Future[list[Outcome]]" = field(default_factory=Future)
    begun: int = 0
    outcomes: "list[Outcome]" = field(default_factory=list)

    @property
    def counted(self) -> bool:
        """True for requests, which count towards the queue limit; parts of files do not."""
        return self.deadline < float("inf")

    @property
    def tokens(self) -> int:
        """Tokens of the rows without an outcome."""
        return sum(row.tokens for row in self.rows[len(self.outcomes) :])


class Batcher:
    """Runs rows of many tasks in mixed batches."""

    def __init__(self, pool: InjectionPool, bound: int, observer: Any) -> None:
        """Start the thread.

        ``pool``: scores the rows; ``bound``: maximum number of tokens of requests that wait or run;
        ``observer``: has `i2cl.interfaces.server.metrics.Metrics.batch`.
        """
        self.pool, self.bound = pool, bound
        self.waiting = 0  # tokens of requests that wait or run
        # what ended the model thread, if it died; set before anything fails because of it
        self.failure: BaseException | None = None
        self._observer = observer
        self._changed = threading.Condition()
        self._single: list[tuple[float, int, Ticket]] = []
        self._large: list[tuple[float, int, Ticket]] = []
        self._numbers = count()
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._batch: Sequence[Ticket] = ()  # tickets with rows in the running batch
        self._future: Future[Any] | None = None  # of the running work
        self._owed = False  # whether a slice is next
        self.stops = False  # whether new work is refused
        self._seen = float("-inf")  # time of the last small request
        self._fits = False
        self._resumed = 0.0  # when the running fit began, or ended its last pause
        self._rate = 0.0  # tokens per second, moving average
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the model thread runs."""
        return self._thread.is_alive() and self.failure is None

    def require_room(self, tokens: int = 0) -> None:
        """Raise RefusalError if a request cannot be queued: 413 if it exceeds the bound, 429 if the queue is
        full, 503 during shutdown or if the model thread has died.
        """
        self.require_running()
        if tokens > self.bound:
            what = f"the request takes {tokens} tokens, and the queue holds {self.bound}"
            hint = "send fewer texts at a time, or a file to /v1/batches"
            raise RefusalError(413, "request_too_long", f"{what}: {hint}")
        if self.waiting and self.waiting + tokens >= self.bound:
            seconds = max(1, round(self.waiting / self._rate)) if self._rate else 1
            raise busy(429, f"the queue is full ({self.waiting} tokens)", seconds)

    def require_running(self) -> None:
        """Raise RefusalError (503) during shutdown, or if the model thread has died."""
        if self.failure is not None:
            raise model_failed()
        if self.stops:
            raise stopping()

    def submit(self, rows: Sequence[TaskQuery], deadline: float) -> Ticket:
        """Queue a request of at least one row, to start before ``deadline`` (`time.monotonic`). Raises
        RefusalError, see `require_room`.
        """
        with self._changed:
            tokens = sum(row.tokens for row in rows)
            self.require_room(tokens)
            ticket = Ticket(rows, deadline, large=tokens > self.pool.decoder.token_budget // LARGE)
            self._seen = self._seen if ticket.large else ticket.since
            self.waiting += tokens
            return self._put(ticket)

    def submit_slices(self, rows: Sequence[TaskQuery], *, large: bool = True) -> Ticket:
        """Queue rows of a file, without deadline and outside the bound. ``large=False``: for a few rows that
        should not wait for their turn among slices. Raises RefusalError (503), see `require_room`.
        """
        with self._changed:
            self.require_running()
            return self._put(Ticket(rows, deadline=float("inf"), large=large))

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request: rows that have not started do not run."""
        with self._changed:
            self._end(ticket)
            ticket.done.cancel()

    def run(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run long work, such as a fit, on the model thread. It has to call `pause` often. Raises
        RefusalError (503), see `require_room`.
        """
        future: Future[Any] = Future()
        with self._changed:
            self.require_running()
            self._work.append((work, future))
            self._changed.notify()
        return future

    def pause(self) -> None:
        """Run queued requests for as long as the work of `run` ran since its last pause.

        Raises FitStoppedError when the server shuts down.
        """
        began = time.monotonic()
        ran = began - self._resumed
        while not self.stops and (self._single or self._large):
            self._turn()
            if time.monotonic() - began >= ran:
                break
        if self.stops:
            raise FitStoppedError
        self._resumed = time.monotonic()

    def stop(self) -> None:
        """Refuse new work, finish queued requests, then end. Files and fits stop where they are."""
        with self._changed:
            self.stops = True
            for _, _, ticket in self._large:
                if not ticket.counted:
                    ticket.done.cancel()
            self._changed.notify()

    def close(self) -> None:
        """Call `stop` and wait for the thread to end."""
        self.stop()
        self._thread.join()

    @property
    def slice(self) -> int:
        """Tokens of a slice, and of a forward pass of a fit."""
        return max(1, self.pool.decoder.token_budget // SLICES)

    def _put(self, ticket: Ticket) -> Ticket:
        heap = self._large if ticket.large else self._single
        before = min(ticket.deadline, ticket.since + PATIENCE)
        heapq.heappush(heap, (before, next(self._numbers), ticket))
        self._changed.notify()
        return ticket

    def _run(self) -> None:
        """Body of the thread."""
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - reported to all who wait, and ends the process
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """Refuse new work, and fail all that is running or queued."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            queued = [ticket for _, _, ticket in (*self._single, *self._large)]
            futures = [ticket.done for ticket in (*self._batch, *queued)]
            futures += [future for _, future in self._work]
            futures += [self._future] if self._future is not None else []
            self._single, self._large, self._batch, self.waiting = [], [], (), 0
            self._work.clear()
        name = type(error).__name__  # its message may quote a user's text
        _log.critical("the model thread has died (%s): failing all requests", name)
        for future in futures:
            with suppress(InvalidStateError):  # done or cancelled
                future.set_exception(model_failed())

    def _loop(self) -> None:
        while self.failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._single or self._large or self._work or self.stops)
                work = self._work.popleft() if self._work and not self.stops else None
                if self.stops and not (self._single or self._large):
                    for _, future in self._work:
                        future.cancel()
                    return
            if work is not None:
                self._do(*work)
            else:
                self._turn()

    def _turn(self) -> None:
        """Run a batch of small requests or, in turn, a slice of a large one, if there is any.

        An error outside the model's own is a fault in this class, after which its state cannot be trusted.
        It must not be mistaken for an error of the fit that called `pause`.
        """
        try:
            self._run_batch()
        except BaseException as error:
            self._fail_all(error)
            raise

    def _run_batch(self) -> None:
        large = bool(self._large and (self._owed or not self._single))
        self._owed = not large
        with self._changed:
            chosen = self._taken(self._large if large else self._single)
            self._batch = [ticket for ticket, _ in chosen]
        if not chosen:
            return
        started = time.monotonic()
        rows = [row for _, part in chosen for row in part]
        outcomes = iter(self._answered(rows))
        seconds = max(time.monotonic() - started, 1e-6)  # some clocks are coarse
        with self._changed:
            tokens = sum(row.tokens for row in rows)
            self._rate = tokens / seconds if not self._rate else 0.8 * self._rate + 0.2 * tokens / seconds
            for ticket, part in chosen:
                self._keep(ticket, [next(outcomes) for _ in part])
            self._batch = ()
        tasks = len({id(row.task) for row in rows})
        waited = [started - ticket.since for ticket, part in chosen if ticket.begun == len(part)]
        self._observer.batch(rows=len(rows), tasks=tasks, seconds=seconds, waited=waited)

    def _do(self, work: Callable[[], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._fits, self._resumed, self._future = True, time.monotonic(), future
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 - raised again by the future
            with suppress(InvalidStateError):  # the model thread has died in a pause of the work
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                future.set_result(outcome)
        self._fits, self._future = False, None

    def _taken(self, heap: list[tuple[float, int, Ticket]]) -> list[tuple[Ticket, Sequence[TaskQuery]]]:
        """Take the rows of a batch, by deadline. Late and cancelled tickets are dropped."""
        now = time.monotonic()
        full = heap is self._single or not (self._fits or now - self._seen < QUIET)
        budget = self.pool.decoder.token_budget if full else self.slice
        chosen: list[tuple[Ticket, Sequence[TaskQuery]]] = []
        longest = rows = 0
        while heap:
            ticket = heap[0][2]
            if ticket.done.done() or (not ticket.begun and ticket.deadline < now):
                heapq.heappop(heap)
                if not ticket.done.done():
                    self._fail(ticket, deadline_passed())
                continue
            taken = 0
            for row in ticket.rows[ticket.begun :]:
                wide = max(longest, row.tokens)
                if rows and wide * (rows + 1) > budget:
                    break
                longest, rows, taken = wide, rows + 1, taken + 1
            if taken:
                chosen.append((ticket, ticket.rows[ticket.begun : ticket.begun + taken]))
                ticket.begun += taken
            if ticket.begun < len(ticket.rows):
                break
            heapq.heappop(heap)
        return chosen

    def _answered(self, rows: Sequence[TaskQuery]) -> list[Outcome]:
        """Score rows. An error of one row does not affect the others."""
        try:
            return list(self.pool.score_queries(rows))
        except Exception as error:  # noqa: BLE001 - becomes the error of one row
            if len(rows) > 1:
                half = len(rows) // 2
                return self._answered(rows[:half]) + self._answered(rows[half:])
            if isinstance(error, NotFiniteError):
                return [RefusalError(500, "not_finite", str(error))]
            full = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if not (full or isinstance(error, I2CLError)):
                return [RefusalError.of(error)]
            why = "the model is out of memory: retry later" if full else str(error)
            return [RefusalError(503, "out_of_memory", why, headers={"Retry-After": "5"})]

    def _keep(self, ticket: Ticket, answers: Sequence[Outcome]) -> None:
        if ticket.done.done():
            return
        if ticket.counted:
            if refusal := next((one for one in answers if isinstance(one, RefusalError)), None):
                self._fail(ticket, refusal)
                return
            self.waiting -= sum(row.tokens for row in ticket.rows[len(ticket.outcomes) :][: len(answers)])
        ticket.outcomes += answers
        if len(ticket.outcomes) == len(ticket.rows):
            with suppress(InvalidStateError):  # cancelled this moment, by a cancelled coroutine
                ticket.done.set_result(ticket.outcomes)

    def _fail(self, ticket: Ticket, refusal: RefusalError) -> None:
        self._end(ticket)
        with suppress(InvalidStateError):
            ticket.done.set_exception(refusal)

    def _end(self, ticket: Ticket) -> None:
        """Release the tokens reserved by a request that will not go on."""
        if not ticket.done.done() and ticket.counted:
            self.waiting -= ticket.tokens
