"""Batches of whatever waits when the model becomes free; one thread that the model belongs to.

There is no timer: a batch holds what came while the one before it ran. Requests go by deadline. Large ones,
and the rows of files, go in slices between them. At each of a fit's pauses what waits has as much time as the
fit had. Nothing here knows of HTTP.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jaxtyping import Float
from torch import Tensor

from i2cl.errors import I2CLError, is_out_of_memory
from i2cl.injections.pool import InjectionPool, TaskQuery
from i2cl.interfaces.server.refusals import RefusalError, busy, stopping
from i2cl.models.scoring import NotFiniteError

SLICES = 32  # slices of a large job that are as long as a full batch: what a request may have to wait for
LARGE = 4  # a request of more than so many parts of a full batch is a large job
PATIENCE = 60.0  # seconds after which rows without a deadline go before requests that have to begin later
QUIET = 60.0  # seconds without a request after which large jobs run in full batches


class FitStoppedError(Exception):
    """Ends a fit that was cancelled, or that is in the way of the server's end."""


Outcome = Float[Tensor, " labels"] | RefusalError  # of one row


@dataclass(eq=False)
class Ticket:
    """Rows that are answered together."""

    rows: Sequence[TaskQuery]  # what is asked
    deadline: float  # on `time.monotonic`, before which they have to begin
    large: bool  # whether they run in slices
    since: float = field(default_factory=time.monotonic)
    # log-probabilities of each row's labels, in the rows' order; of a row of a file that cannot run, why
    done: "Future[list[Outcome]]" = field(default_factory=Future)
    begun: int = 0
    outcomes: "list[Outcome]" = field(default_factory=list)

    @property
    def counted(self) -> bool:
        """Whether it is a request, and no part of a file, which waits for nobody and is not waited for."""
        return self.deadline < float("inf")

    @property
    def tokens(self) -> int:
        """Tokens that are still to run."""
        return sum(row.tokens for row in self.rows[len(self.outcomes) :])


class Batcher:
    """Answers rows of many tasks, in batches that mix them."""

    def __init__(self, pool: InjectionPool, bound: int, observer: Any) -> None:
        """Start; ``observer`` has `i2cl.interfaces.server.metrics.Metrics.batch`."""
        self.pool = pool  # scores them
        self.bound = bound  # tokens of requests that may wait or run at once
        self.waiting = 0  # tokens of requests that wait or run now
        self._observer = observer
        self._changed = threading.Condition()
        self._single: list[tuple[float, int, Ticket]] = []
        self._large: list[tuple[float, int, Ticket]] = []
        self._numbers = count()
        self._work: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._owed = False  # a slice is next
        self.stops = False  # whether nothing new is taken
        self._seen = float("-inf")  # when the last small request came
        self._fits = False
        self._resumed = 0.0  # when a fit began, or went on behind its last pause
        self._rate = 0.0  # tokens a second, as of late
        self._thread = threading.Thread(target=self._loop, name="model", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the model's thread runs."""
        return self._thread.is_alive()

    def require_room(self, tokens: int = 0) -> None:
        """Refuse what never has room (413), has none now (429), or comes when nothing new is taken (503)."""
        if self.stops:
            raise stopping()
        if tokens > self.bound:
            what = f"the request takes {tokens} tokens and {self.bound} may wait at once"
            cure = "send fewer texts at a time, or a file to /v1/batches"
            raise RefusalError(413, "request_too_long", f"{what}: {cure}")
        if self.waiting and self.waiting + tokens >= self.bound:
            seconds = max(1, round(self.waiting / self._rate)) if self._rate else 1
            raise busy(429, f"{self.waiting} tokens wait already", seconds)

    def submit(self, rows: Sequence[TaskQuery], deadline: float) -> Ticket:
        """Queue at least one row, to begin before ``deadline`` of `time.monotonic`; see `require_room`."""
        with self._changed:
            tokens = sum(row.tokens for row in rows)
            self.require_room(tokens)
            ticket = Ticket(rows, deadline, large=tokens > self.pool.decoder.token_budget // LARGE)
            self._seen = self._seen if ticket.large else ticket.since
            self.waiting += tokens
            return self._put(ticket)

    def submit_slices(self, rows: Sequence[TaskQuery], *, large: bool = True) -> Ticket:
        """Let at least one row of a file run between requests, beside the bound; with ``large=False`` few
        that a person waits for, not in slices. Raises RefusalError: 503 if nothing new is taken.
        """
        with self._changed:
            if self.stops:
                raise stopping()
            return self._put(Ticket(rows, deadline=float("inf"), large=large))

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request: its rows that have not begun do not run."""
        with self._changed:
            self._end(ticket)
            ticket.done.cancel()

    def run(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run something long on the model's thread, which calls `pause` as often as it can."""
        future: Future[Any] = Future()
        with self._changed:
            if self.stops:
                raise stopping()
            self._work.append((work, future))
            self._changed.notify()
        return future

    def pause(self) -> None:
        """Answer what waits, for as long as `run`'s work ran since; raises FitStoppedError at a stop."""
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
        """Take nothing new, answer what waits, and end then; files and fits stop where they are."""
        with self._changed:
            self.stops = True
            for _, _, ticket in self._large:
                if not ticket.counted:
                    ticket.done.cancel()
            self._changed.notify()

    def close(self) -> None:
        """`stop`, and wait for the end."""
        self.stop()
        self._thread.join()

    @property
    def slice(self) -> int:
        """Tokens of a slice, and of what a fit runs at a time."""
        return max(1, self.pool.decoder.token_budget // SLICES)

    def _put(self, ticket: Ticket) -> Ticket:
        heap = self._large if ticket.large else self._single
        before = min(ticket.deadline, ticket.since + PATIENCE)
        heapq.heappush(heap, (before, next(self._numbers), ticket))
        self._changed.notify()
        return ticket

    def _loop(self) -> None:
        while True:
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
        """Run a batch of small requests or, in turn, a slice of a large one, if any waits."""
        large = bool(self._large and (self._owed or not self._single))
        self._owed = not large
        with self._changed:
            chosen = self._taken(self._large if large else self._single)
        if not chosen:
            return
        started = time.monotonic()
        rows = [row for _, part in chosen for row in part]
        outcomes = iter(self._answered(rows))
        seconds = time.monotonic() - started
        with self._changed:
            tokens = sum(row.tokens for row in rows)
            self._rate = tokens / seconds if not self._rate else 0.8 * self._rate + 0.2 * tokens / seconds
            for ticket, part in chosen:
                self._keep(ticket, [next(outcomes) for _ in part])
        tasks = len({id(row.task) for row in rows})
        waited = [started - ticket.since for ticket, part in chosen if ticket.begun == len(part)]
        self._observer.batch(rows=len(rows), tasks=tasks, seconds=seconds, waited=waited)

    def _do(self, work: Callable[[], Any], future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._fits, self._resumed = True, time.monotonic()
        try:
            future.set_result(work())
        except Exception as error:  # noqa: BLE001 - who waits for it is told
            future.set_exception(error)
        finally:
            self._fits = False

    def _taken(self, heap: list[tuple[float, int, Ticket]]) -> list[tuple[Ticket, Sequence[TaskQuery]]]:
        """Rows of a batch, by deadline; what is late or cancelled goes."""
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
                    message = "the time of this request was over before it ran: send it again later"
                    self._fail(ticket, RefusalError(504, "deadline", message))
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
        """Scores of each row, or why there are none: rows that cannot run do not take others with them."""
        try:
            return list(self.pool.answers(rows))
        except Exception as error:  # noqa: BLE001 - the process lives on, whatever it is
            if len(rows) > 1:
                half = len(rows) // 2
                return self._answered(rows[:half]) + self._answered(rows[half:])
            if isinstance(error, NotFiniteError):
                return [RefusalError(500, "not_finite", str(error))]
            full = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if not (full or isinstance(error, I2CLError)):
                return [RefusalError.of(error)]
            why = "the model is out of memory: send it again later" if full else str(error)
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
            ticket.done.set_result(ticket.outcomes)

    def _fail(self, ticket: Ticket, refusal: RefusalError) -> None:
        self._end(ticket)
        ticket.done.set_exception(refusal)

    def _end(self, ticket: Ticket) -> None:
        """What a request that is not to go on holds of the bound."""
        if not ticket.done.done() and ticket.counted:
            self.waiting -= ticket.tokens
