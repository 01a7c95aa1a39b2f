"""Continuous batching of requests to many tasks, on one thread that owns the model.

A batch consists of the requests that arrived while the previous batch ran, earliest deadline first; there is
no timer. Large requests and the rows of files run in slices between other requests. Whenever a fit pauses,
queued requests get as much time as the fit had before. Nothing here depends on HTTP.

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

from i2cl.errors import I2CLError, is_out_of_memory
from i2cl.injections.pool import InjectionPool, RowScores, TaskQuery
from i2cl.interfaces.server.refusals import RefusalError, busy, deadline_passed, model_failed, stopping
from i2cl.models.scoring import NotFiniteError

SLICES_PER_BATCH = 32  # slices per full batch; a slice bounds how long a request waits for a large job
LARGE_SHARE = 4  # a request of more than a quarter of a full batch runs in slices
MAX_FILE_WAIT_SECONDS = 60.0  # after this, rows of files run before requests whose deadline is later
QUIET_SECONDS = 60.0  # after this long without a small request, large jobs run in full batches

_log = logging.getLogger("i2cl.server")


class FitStoppedError(Exception):
    """Raised in a fit that was cancelled, or when the server shuts down."""


Outcome = RowScores | RefusalError  # of one row


@dataclass(eq=False)
class Ticket:
    """Rows of one request, or of one part of a file."""

    rows: Sequence[TaskQuery]
    deadline: float  # by `time.monotonic`; rows that have not started by then do not run
    large: bool  # whether the rows run in slices
    queued_at: float = field(default_factory=time.monotonic)
    # An outcome for each row. Only files have errors of single rows: a request fails as a whole.
    done: "Future[list[Outcome]]" = field(default_factory=Future)
    started_rows: int = 0  # number of rows that have started
    outcomes: "list[Outcome]" = field(default_factory=list)

    @property
    def is_request(self) -> bool:
        """True for requests, which count towards the queue limit; parts of files do not."""
        return self.deadline < float("inf")

    @property
    def tokens(self) -> int:
        """Tokens of the rows without an outcome."""
        return sum(row.tokens for row in self.rows[len(self.outcomes) :])


class Batcher:
    """Runs rows of many tasks in mixed batches."""

    def __init__(self, pool: InjectionPool, max_tokens: int, observer: Any) -> None:
        """Start the thread.

        Args:
            pool: scores the rows.
            max_tokens: maximum number of tokens in queued and running requests.
            observer: an `i2cl.interfaces.server.guard.Metrics`; its ``batch`` is called after every batch.
        """
        self.pool, self.max_tokens = pool, max_tokens
        self.waiting = 0  # tokens in queued and running requests
        # The error that ended the model thread. Set before the pending requests fail.
        self.failure: BaseException | None = None
        self._observer = observer
        self._changed = threading.Condition()
        self._small: list[tuple[float, int, Ticket]] = []
        self._large: list[tuple[float, int, Ticket]] = []
        self._sequence = count()
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._batch: Sequence[Ticket] = ()  # tickets with rows in the running batch
        self._future: Future[Any] | None = None  # of the running work
        self._slice_is_next = False  # large tickets take turns with small ones
        self.is_stopping = False  # whether new work is refused
        self._last_small_request = float("-inf")  # time of the last small request
        self._work_is_running = False
        self._work_resumed_at = 0.0  # when the running work began, or ended its last pause
        self._rate = 0.0  # tokens per second, moving average
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the model thread runs."""
        return self._thread.is_alive() and self.failure is None

    def require_room(self, tokens: int = 0) -> None:
        """Raise RefusalError if a request cannot be queued: 413 if it exceeds the limit, 429 if the queue is
        full, 503 during shutdown or if the model thread has died.
        """
        self.require_running()
        if tokens > self.max_tokens:
            message = f"the request takes {tokens} tokens, but the queue holds {self.max_tokens}"
            hint = "send fewer texts at a time, or a file to /v1/batches"
            raise RefusalError(413, "request_too_long", message, hint)
        if self.waiting and self.waiting + tokens >= self.max_tokens:
            seconds = max(1, round(self.waiting / self._rate)) if self._rate else 1
            raise busy(429, f"the queue is full ({self.waiting} tokens)", seconds)

    def require_running(self) -> None:
        """Raise RefusalError (503) during shutdown, or if the model thread has died."""
        if self.failure is not None:
            raise model_failed()
        if self.is_stopping:
            raise stopping()

    def submit(self, rows: Sequence[TaskQuery], deadline: float) -> Ticket:
        """Queue a request of at least one row, to start before ``deadline`` (`time.monotonic`). Raises
        RefusalError, see `require_room`.
        """
        with self._changed:
            tokens = sum(row.tokens for row in rows)
            self.require_room(tokens)
            ticket = Ticket(rows, deadline, large=tokens > self.pool.decoder.token_budget // LARGE_SHARE)
            self._last_small_request = self._last_small_request if ticket.large else ticket.queued_at
            self.waiting += tokens
            return self._enqueue(ticket)

    def submit_slices(self, rows: Sequence[TaskQuery], *, large: bool = True) -> Ticket:
        """Queue rows of a file, without a deadline; they do not count towards the limit.

        ``large=False`` runs them like a small request. Raises RefusalError (503), see `require_room`.
        """
        with self._changed:
            self.require_running()
            return self._enqueue(Ticket(rows, deadline=float("inf"), large=large))

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request: rows that have not started do not run."""
        with self._changed:
            self._end(ticket)
            ticket.done.cancel()

    def run(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run long work, such as a fit, on the model thread. The work has to call `pause` often.

        Raises RefusalError (503), see `require_room`.
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
        ran = began - self._work_resumed_at
        while not self.is_stopping and (self._small or self._large):
            self._run_next_batch()
            if time.monotonic() - began >= ran:
                break
        if self.is_stopping:
            raise FitStoppedError
        self._work_resumed_at = time.monotonic()

    def stop(self) -> None:
        """Refuse new work, finish queued requests, then end the thread. Files and fits are interrupted."""
        with self._changed:
            self.is_stopping = True
            for _, _, ticket in self._large:
                if not ticket.is_request:
                    ticket.done.cancel()
            self._changed.notify()

    def close(self) -> None:
        """Call `stop` and wait for the thread to end."""
        self.stop()
        self._thread.join()

    @property
    def slice(self) -> int:
        """Number of tokens in a slice, and in a forward pass of a fit."""
        return max(1, self.pool.decoder.token_budget // SLICES_PER_BATCH)

    def _enqueue(self, ticket: Ticket) -> Ticket:
        heap = self._large if ticket.large else self._small
        priority = min(ticket.deadline, ticket.queued_at + MAX_FILE_WAIT_SECONDS)
        heapq.heappush(heap, (priority, next(self._sequence), ticket))
        self._changed.notify()
        return ticket

    def _run(self) -> None:
        """Body of the thread."""
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - fails all requests, and ends the process
            self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        """Refuse new work, and fail all that is running or queued."""
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            queued = [ticket for _, _, ticket in (*self._small, *self._large)]
            futures = [ticket.done for ticket in (*self._batch, *queued)]
            futures += [future for _, future in self._work]
            futures += [self._future] if self._future is not None else []
            self._small, self._large, self._batch, self.waiting = [], [], (), 0
            self._work.clear()
        name = type(error).__name__  # its message may quote a user's text
        _log.critical("the model thread has died (%s): failing all requests", name)
        for future in futures:
            with suppress(InvalidStateError):  # done or cancelled
                future.set_exception(model_failed())

    def _loop(self) -> None:
        while self.failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._small or self._large or self._work or self.is_stopping)
                work = self._work.popleft() if self._work and not self.is_stopping else None
                if self.is_stopping and not (self._small or self._large):
                    for _, future in self._work:
                        future.cancel()
                    return
            if work is not None:
                self._run_work(*work)
            else:
                self._run_next_batch()

    def _run_next_batch(self) -> None:
        """Run one batch: small requests and slices of large ones take turns.

        `_score` handles errors of the model. Any other error is a bug in this class, after which its state
        cannot be trusted; it must not be mistaken for an error of the fit that called `pause`.
        """
        try:
            self._run_batch()
        except BaseException as error:
            self._fail_all(error)
            raise

    def _run_batch(self) -> None:
        large = bool(self._large and (self._slice_is_next or not self._small))
        self._slice_is_next = not large
        with self._changed:
            chosen = self._take_batch(self._large if large else self._small)
            self._batch = [ticket for ticket, _ in chosen]
        if not chosen:
            return
        started = time.monotonic()
        rows = [row for _, part in chosen for row in part]
        outcomes = iter(self._score(rows))
        seconds = max(time.monotonic() - started, 1e-6)  # some clocks are coarse
        with self._changed:
            tokens = sum(row.tokens for row in rows)
            self._rate = tokens / seconds if not self._rate else 0.8 * self._rate + 0.2 * tokens / seconds
            for ticket, part in chosen:
                self._store_outcomes(ticket, [next(outcomes) for _ in part])
            self._batch = ()
        tasks = len({id(row.task) for row in rows})
        waited = [started - ticket.queued_at for ticket, part in chosen if ticket.started_rows == len(part)]
        self._observer.batch(rows=len(rows), tasks=tasks, seconds=seconds, waited=waited)

    def _run_work(self, work: Callable[[], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._work_is_running, self._work_resumed_at, self._future = True, time.monotonic(), future
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 - raised again by the future
            with suppress(InvalidStateError):  # the model thread has died in a pause of the work
                future.set_exception(error)
        else:
            with suppress(InvalidStateError):
                future.set_result(outcome)
        self._work_is_running, self._future = False, None

    def _take_batch(self, heap: list[tuple[float, int, Ticket]]) -> list[tuple[Ticket, Sequence[TaskQuery]]]:
        """Take the rows of a batch, by deadline. Late and cancelled tickets are dropped."""
        now = time.monotonic()
        use_full_batch = heap is self._small or not (
            self._work_is_running or now - self._last_small_request < QUIET_SECONDS
        )
        budget = self.pool.decoder.token_budget if use_full_batch else self.slice
        chosen: list[tuple[Ticket, Sequence[TaskQuery]]] = []
        longest = rows = 0
        while heap:
            ticket = heap[0][2]
            if ticket.done.done() or (not ticket.started_rows and ticket.deadline < now):
                heapq.heappop(heap)
                if not ticket.done.done():
                    self._fail(ticket, deadline_passed())
                continue
            taken = 0
            for row in ticket.rows[ticket.started_rows :]:
                width = max(longest, row.tokens)
                if rows and width * (rows + 1) > budget:
                    break
                longest, rows, taken = width, rows + 1, taken + 1
            if taken:
                chosen.append((ticket, ticket.rows[ticket.started_rows : ticket.started_rows + taken]))
                ticket.started_rows += taken
            if ticket.started_rows < len(ticket.rows):
                break
            heapq.heappop(heap)
        return chosen

    def _score(self, rows: Sequence[TaskQuery]) -> list[Outcome]:
        """Score rows. An error of one row does not affect the others."""
        try:
            return list(self.pool.score_rows(rows))
        except Exception as error:  # noqa: BLE001 - becomes the error of one row
            if len(rows) > 1:
                half = len(rows) // 2
                return self._score(rows[:half]) + self._score(rows[half:])
            if isinstance(error, NotFiniteError):
                return [RefusalError(500, "not_finite", error.message, error.hint)]
            if is_out_of_memory(error):
                message, hint = "the model is out of memory", "retry later"
                if isinstance(error, I2CLError):
                    message, hint = error.message, error.hint or hint
                return [RefusalError(503, "out_of_memory", message, hint, headers={"Retry-After": "5"})]
            if isinstance(error, I2CLError):  # such as a sentence encoder that is no longer installed
                _log.warning("a task cannot be used: %s", error)
                message = "the task cannot be used by this server"
                return [RefusalError(500, "unusable", message, "fit it again, or contact its operator")]
            return [RefusalError.of(error)]

    def _store_outcomes(self, ticket: Ticket, answers: Sequence[Outcome]) -> None:
        if ticket.done.done():
            return
        if ticket.is_request:
            if refusal := next((answer for answer in answers if isinstance(answer, RefusalError)), None):
                self._fail(ticket, refusal)
                return
            self.waiting -= sum(row.tokens for row in ticket.rows[len(ticket.outcomes) :][: len(answers)])
        ticket.outcomes += answers
        if len(ticket.outcomes) == len(ticket.rows):
            with suppress(InvalidStateError):  # a cancelled coroutine may cancel it at this moment
                ticket.done.set_result(ticket.outcomes)

    def _fail(self, ticket: Ticket, refusal: RefusalError) -> None:
        self._end(ticket)
        with suppress(InvalidStateError):
            ticket.done.set_exception(refusal)

    def _end(self, ticket: Ticket) -> None:
        """Release the tokens that an abandoned request has reserved."""
        if not ticket.done.done() and ticket.is_request:
            self.waiting -= ticket.tokens
