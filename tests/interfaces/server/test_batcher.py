"""Batching of requests to many tasks while tasks are replaced, requests cancelled and fits run."""

import os
import random
import threading
import time
from collections import defaultdict
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from i2cl import InjectionPool, Template
from i2cl.errors import I2CLError, MemoryLimitError
from i2cl.interfaces.server.batcher import Batcher, FitStoppedError
from i2cl.interfaces.server.fits import SharedDecoder
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.methods.anchored import Anchored
from i2cl.methods.i2cl import I2CL
from i2cl.models.scoring import LabelScorer
from processes import until

from .conftest import TEXTS, catch_refusal, make_injection

TIMEOUT_SECONDS = 30.0


class Observer:
    def __init__(self):
        self.batches = []

    def batch(self, *, rows, tasks, seconds, waited):
        self.batches.append((rows, tasks))


@pytest.fixture
def batcher_and_store(decoder, tmp_path):
    """A batcher, and a task store that keeps at most two tasks on the device."""
    pool = InjectionPool(decoder)
    store = TaskStore(tmp_path / "tasks", pool, max_resident_tasks=2, read_only=False)
    batcher = Batcher(pool, 10**9, Observer())
    yield batcher, store
    if batcher.alive:
        batcher.close()


@pytest.fixture
def batcher_with_task(batcher_and_store, decoder):
    """The same with a task named "a"."""
    batcher_and_store[1].put("a", make_injection(decoder, 0))
    return batcher_and_store


def far_deadline():
    return time.monotonic() + TIMEOUT_SECONDS


@pytest.fixture
def busy_model(batcher_and_store):
    """Event that releases the model. Until then it is busy, and requests queue up."""
    batcher, _ = batcher_and_store
    go, begun = threading.Event(), threading.Event()
    batcher.run(lambda: (begun.set(), go.wait(TIMEOUT_SECONDS)))
    begun.wait(TIMEOUT_SECONDS)
    yield go
    go.set()


@pytest.mark.parametrize("seed", range(int(os.environ.get("I2CL_SERVER_MIXES", "3"))))
def test_answers_belong_to_the_requested_version(batcher_and_store, decoder, seed):
    """Random mixes of task versions, replacements, deletions, cancelled requests and request sizes."""
    batcher, store = batcher_and_store
    decoder.token_budget = 48
    draw = random.Random(seed)
    versions, requests, dropped = {}, [], 0
    for turn in range(30):
        kind = draw.random()
        names = [entry.name for entry in store.entries()]
        if kind < 0.25 or not names:
            injection = make_injection(decoder, draw.randrange(40))
            versions[store.put(draw.choice("abcde"), injection).digest] = injection
        elif kind < 0.3 and len(names) > 1:
            store.delete(draw.choice(names))
        else:
            texts = [draw.choice(TEXTS) + " so" * draw.randrange(4) for _ in range(draw.choice((1, 1, 2, 9)))]
            entry, rows = store.queries(draw.choice(names), texts)
            ticket = batcher.submit_slices(rows) if turn % 5 == 0 else batcher.submit(rows, far_deadline())
            if draw.random() < 0.15:
                batcher.cancel(ticket)
            requests.append((entry.digest, texts, ticket))
    wait([ticket.done for _, _, ticket in requests if not ticket.done.cancelled()], TIMEOUT_SECONDS)
    decoder.token_budget = 1024
    answered = defaultdict(list)
    for digest, texts, ticket in requests:
        dropped += ticket.done.cancelled()
        if not ticket.done.cancelled():
            answered[digest] += zip(texts, ticket.done.result(), strict=True)
    for digest, pairs in answered.items():
        right = versions[digest].log_probs(decoder, [text for text, _ in pairs])
        torch.testing.assert_close(
            torch.stack([row.log_probs for _, row in pairs]), right, rtol=1e-5, atol=1e-5
        )
    assert batcher.waiting == 0
    assert dropped < len(requests)
    assert len(batcher.pool) <= 2


def test_queued_requests_share_a_batch(batcher_and_store, decoder, busy_model):
    batcher, store = batcher_and_store
    for number in range(2):
        store.put(str(number), make_injection(decoder, number))
    tickets = [
        batcher.submit(store.queries(str(number % 2), [TEXTS[0]])[1], far_deadline()) for number in range(8)
    ]
    busy_model.set()
    wait([ticket.done for ticket in tickets], TIMEOUT_SECONDS)
    assert (8, 2) in batcher._observer.batches


def test_large_job_runs_in_slices_between_requests(batcher_with_task, decoder, busy_model):
    batcher, store = batcher_with_task
    decoder.token_budget = 128
    large = batcher.submit_slices(store.queries("a", TEXTS * 10)[1])
    small = [batcher.submit(store.queries("a", [TEXTS[0]])[1], far_deadline()) for _ in range(3)]
    busy_model.set()
    wait([ticket.done for ticket in small], TIMEOUT_SECONDS)
    assert not large.done.done()
    assert len(large.done.result(TIMEOUT_SECONDS)) == 10 * len(TEXTS)


def test_pause_runs_requests_for_as_long_as_the_fit_ran(batcher_with_task, decoder):
    batcher, store = batcher_with_task
    decoder.token_budget = 128
    tickets = []

    def work():
        for seconds in (0.0, TIMEOUT_SECONDS):
            tickets.append(batcher.submit_slices(store.queries("a", TEXTS * 3)[1]))
            batcher._work_resumed_at = time.monotonic() - seconds
            batcher.pause()
            tickets[-1] = (tickets[-1], tickets[-1].done.done())

    batcher.run(work).result(TIMEOUT_SECONDS)
    assert [done for _, done in tickets] == [False, True]


def test_earliest_deadline_runs_first(batcher_with_task, decoder, busy_model):
    batcher, store = batcher_with_task
    decoder.token_budget = 4  # one row per batch
    rows = store.queries("a", [TEXTS[4]])[1]
    ended = []
    for name, seconds in (("late", 20), ("soon", 10)):
        ticket = batcher.submit(rows, time.monotonic() + seconds)
        ticket.large = False
        ticket.done.add_done_callback(lambda _, name=name: ended.append(name))
    busy_model.set()
    until(lambda: len(ended) == 2)
    assert ended == ["soon", "late"]


def test_late_and_cancelled_requests_do_not_run(batcher_with_task, busy_model):
    batcher, store = batcher_with_task
    rows = store.queries("a", [TEXTS[0]])[1]
    late, gone, kept = (
        batcher.submit(rows, time.monotonic()),
        *(batcher.submit(rows, far_deadline()) for _ in "ab"),
    )
    batcher.cancel(gone)
    busy_model.set()
    assert len(kept.done.result(TIMEOUT_SECONDS)) == 1
    assert (catch_refusal("", late.done.result, TIMEOUT_SECONDS).status, gone.done.cancelled()) == (504, True)
    assert batcher.waiting == 0
    assert batcher._observer.batches == [(1, 1)]


def test_requests_beyond_the_queue_bound_are_refused(batcher_with_task, busy_model):
    batcher, store = batcher_with_task
    rows = store.queries("a", [TEXTS[0]])[1]
    batcher.max_tokens = 3 * rows[0].tokens
    tickets = [batcher.submit(rows, far_deadline()) for _ in range(2)]
    busy = catch_refusal("queue is full", batcher.submit, rows, far_deadline())
    assert (busy.status, busy.headers["Retry-After"]) == (429, "1")
    assert catch_refusal("", batcher.submit, rows * 4, far_deadline()).status == 413
    busy_model.set()
    wait([ticket.done for ticket in tickets], TIMEOUT_SECONDS)
    assert batcher.waiting == 0
    assert len(batcher.submit(rows, far_deadline()).done.result(TIMEOUT_SECONDS)) == 1


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (torch.OutOfMemoryError("no room"), 503, "out_of_memory"),
        (MemoryLimitError("a query of 9 tokens does not fit into memory"), 503, "out_of_memory"),
        (I2CLError("encoder '/secret/folder' does not exist"), 500, "unusable"),
        (KeyError("secret text"), 500, "internal"),
    ],
)
def test_failing_row_does_not_affect_others(batcher_with_task, busy_model, monkeypatch, error, status, code):
    batcher, store = batcher_with_task
    answers = batcher.pool.score_rows

    def fails(rows):
        if any(len(row.ids) > 20 for row in rows):
            raise error
        return answers(rows)

    monkeypatch.setattr(batcher.pool, "score_rows", fails)
    long, short = ("so " * 30).strip(), TEXTS[0]
    tickets = [batcher.submit(store.queries("a", [text])[1], far_deadline()) for text in (short, long, short)]
    busy_model.set()
    assert [len(ticket.done.result(TIMEOUT_SECONDS)) for ticket in (tickets[0], tickets[2])] == [1, 1]
    refused = catch_refusal("", tickets[1].done.result, TIMEOUT_SECONDS)
    assert (refused.status, refused.code, "secret" in str(refused)) == (status, code, False)
    assert batcher.waiting == 0


@pytest.mark.parametrize("method", [Anchored.from_options({"steps": 1}), I2CL.from_options({"epochs": 2})])
@pytest.mark.parametrize("whole", [True, False])
def test_requests_during_a_fit_do_not_change_its_result(
    batcher_with_task, decoder, task, busy_model, method, whole
):
    """Every answer triggers the next request, so one is queued at each pause of the fit."""
    batcher, store = batcher_with_task
    right = store.injection(store.entry("a").digest).log_probs(decoder, [TEXTS[0]])[0]
    hooks = []

    def record_hooks():
        for module in decoder.model.modules():
            hooks.extend([*module._forward_hooks.values(), *module._forward_pre_hooks.values()])

    shared = SharedDecoder(batcher, SimpleNamespace(raise_if_cancelled=record_hooks))
    task = task if whole else replace(task, template=Template("{text} ->{label}"))
    assert (
        LabelScorer(shared, task).labels.full_sequences == whole
    )  # otherwise this tests the wrong kind of scoring
    shown = task.sample(1)
    alone, fit = (batcher.run(lambda: method.fit_injection(shared, task, shown)) for _ in range(2))
    rows, tickets = store.queries("a", [TEXTS[0]])[1], []

    def send_next(_=None):
        if not fit.done():
            tickets.append(batcher.submit(rows, far_deadline()))
            tickets[-1].done.add_done_callback(send_next)

    alone.add_done_callback(send_next)
    busy_model.set()
    wait([fit], TIMEOUT_SECONDS)
    assert len(tickets) > 3
    assert not hooks  # hooks of the fit would affect the requests
    for ticket in tickets:
        torch.testing.assert_close(
            ticket.done.result(TIMEOUT_SECONDS)[0].log_probs, right, rtol=1e-5, atol=1e-5
        )
    alone, outcome = alone.result(), fit.result()
    assert torch.equal(outcome.coefficients, alone.coefficients)
    assert torch.equal(outcome.context, alone.context)


def test_shutdown_finishes_requests_and_interrupts_jobs(batcher_with_task, task, busy_model):
    batcher, store = batcher_with_task
    shared = SharedDecoder(batcher, SimpleNamespace(raise_if_cancelled=lambda: None))
    fit = batcher.run(shared.pause)
    file = batcher.submit_slices(store.queries("a", TEXTS)[1])
    single = batcher.submit(store.queries("a", [TEXTS[0]])[1], far_deadline())
    threading.Timer(0.1, busy_model.set).start()
    batcher.close()
    assert len(single.done.result(0)) == 1
    with pytest.raises((CancelledError, FitStoppedError)):
        fit.result(0)
    with pytest.raises(CancelledError):
        file.done.result(0)
    catch_refusal("shutting down", batcher.submit, store.queries("a", [TEXTS[0]])[1], far_deadline())
