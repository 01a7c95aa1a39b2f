"""Batches of many tasks and versions, whoever comes and goes meanwhile."""

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
from i2cl.interfaces.server.batcher import Batcher, FitStoppedError
from i2cl.interfaces.server.fits import SharedDecoder
from i2cl.interfaces.server.task_store import TaskStore
from i2cl.methods.anchored import Anchored
from i2cl.methods.i2cl import I2CL
from i2cl.models.scoring import Questions
from processes import until

from .conftest import TEXTS, made, refusal

SOON = 30.0


class Watch:
    def __init__(self):
        self.batches = []

    def batch(self, *, rows, tasks, seconds, waited):
        self.batches.append((rows, tasks))


@pytest.fixture
def running(decoder, tmp_path):
    """A batcher, and a folder of tasks that holds two of them on the device at a time."""
    pool = InjectionPool(decoder)
    folder = TaskStore(tmp_path / "tasks", pool, most_resident=2, read_only=False)
    batcher = Batcher(pool, 10**9, Watch())
    yield batcher, folder
    if batcher.alive:
        batcher.close()


@pytest.fixture
def filled(running, decoder):
    """The same, with a task."""
    running[1].put("a", made(decoder, 0))
    return running


def later():
    return time.monotonic() + SOON


@pytest.fixture
def held(running):
    """Keeps the model busy until the block ends, so that what comes meanwhile waits."""
    batcher, _ = running
    go, begun = threading.Event(), threading.Event()
    batcher.run(lambda: (begun.set(), go.wait(SOON)))
    begun.wait(SOON)
    yield go
    go.set()


@pytest.mark.parametrize("seed", range(int(os.environ.get("I2CL_SERVER_MIXES", "6"))))
def test_every_answer_is_of_the_version_that_was_asked(running, decoder, seed):
    """Mixes of tasks, versions, loads, drops, replacements, cancelled requests and sizes."""
    batcher, folder = running
    decoder.token_budget = 48
    draw = random.Random(seed)
    versions, asked, dropped = {}, [], 0
    for turn in range(30):
        kind = draw.random()
        names = [entry.name for entry in folder.entries()]
        if kind < 0.25 or not names:
            injection = made(decoder, draw.randrange(40))
            versions[folder.put(draw.choice("abcde"), injection).digest] = injection
        elif kind < 0.3 and len(names) > 1:
            folder.delete(draw.choice(names))
        else:
            texts = [draw.choice(TEXTS) + " so" * draw.randrange(4) for _ in range(draw.choice((1, 1, 2, 9)))]
            entry, rows = folder.queries(draw.choice(names), texts)
            ticket = batcher.submit_slices(rows) if turn % 5 == 0 else batcher.submit(rows, later())
            if draw.random() < 0.15:
                batcher.cancel(ticket)
            asked.append((entry.digest, texts, ticket))
    wait([ticket.done for _, _, ticket in asked if not ticket.done.cancelled()], SOON)
    decoder.token_budget = 1024
    answered = defaultdict(list)
    for digest, texts, ticket in asked:
        dropped += ticket.done.cancelled()
        if not ticket.done.cancelled():
            answered[digest] += zip(texts, ticket.done.result(), strict=True)
    for digest, pairs in answered.items():
        right = versions[digest].scores(decoder, [text for text, _ in pairs])
        torch.testing.assert_close(torch.stack([row for _, row in pairs]), right, rtol=1e-5, atol=1e-5)
    assert batcher.waiting == 0
    assert dropped < len(asked)
    assert len(batcher.pool) <= 2


def test_what_waits_is_one_batch_of_many_tasks(running, decoder, held):
    batcher, folder = running
    for number in range(2):
        folder.put(str(number), made(decoder, number))
    tickets = [batcher.submit(folder.queries(str(number % 2), [TEXTS[0]])[1], later()) for number in range(8)]
    held.set()
    wait([ticket.done for ticket in tickets], SOON)
    assert (8, 2) in batcher._observer.batches


def test_a_large_job_goes_in_slices_between_requests(filled, decoder, held):
    batcher, folder = filled
    decoder.token_budget = 128
    large = batcher.submit_slices(folder.queries("a", TEXTS * 10)[1])
    small = [batcher.submit(folder.queries("a", [TEXTS[0]])[1], later()) for _ in range(3)]
    held.set()
    wait([ticket.done for ticket in small], SOON)
    assert not large.done.done()
    assert len(large.done.result(SOON)) == 10 * len(TEXTS)


def test_a_fit_keeps_no_large_request_from_its_turn(filled, decoder):
    """At each of its pauses a small request waits as well, and one batch has time."""
    batcher, folder = filled
    decoder.token_budget = 128
    small, begun = folder.queries("a", [TEXTS[0]])[1], []
    file, large = batcher.submit_slices, batcher.submit
    rows = folder.queries("a", TEXTS * 10)[1]

    def work():
        for submit in (file, lambda rows: large(rows, later())):
            ticket = submit(rows)
            for _ in range(10):
                batcher._resumed = time.monotonic()
                batcher.submit(small, later())
                batcher.pause()
            begun.append(ticket.begun)

    batcher.run(work).result(SOON)
    assert min(begun) >= 2


def test_large_requests_keep_no_file_from_its_turn_for_long(filled, decoder, held, monkeypatch):
    batcher, folder = filled
    decoder.token_budget = 128
    rows, order = folder.queries("a", TEXTS * 10)[1], []
    monkeypatch.setattr("i2cl.interfaces.server.batcher.PATIENCE", SOON / 2)
    first = batcher.submit(rows, time.monotonic() + 1)
    file, last = batcher.submit_slices(rows), batcher.submit(rows, later())
    for name, ticket in (("first", first), ("file", file), ("last", last)):
        ticket.deadline = float("inf")  # however long this takes
        ticket.done.add_done_callback(lambda _, name=name: order.append(name))
    held.set()
    wait([last.done], 2 * SOON)
    assert order == ["first", "file", "last"]


def test_at_a_pause_others_have_as_much_time_as_the_fit_had(filled, decoder):
    batcher, folder = filled
    decoder.token_budget = 128
    tickets = []

    def work():
        for seconds in (0.0, SOON):
            tickets.append(batcher.submit_slices(folder.queries("a", TEXTS * 3)[1]))
            batcher._resumed = time.monotonic() - seconds
            batcher.pause()
            tickets[-1] = (tickets[-1], tickets[-1].done.done())

    batcher.run(work).result(SOON)
    assert [done for _, done in tickets] == [False, True]


def test_the_earliest_deadline_goes_first(filled, decoder, held):
    batcher, folder = filled
    decoder.token_budget = 4  # one row a batch
    rows = folder.queries("a", [TEXTS[4]])[1]
    ended = []
    for name, seconds in (("late", 20), ("soon", 10)):
        ticket = batcher.submit(rows, time.monotonic() + seconds)
        ticket.large = False
        ticket.done.add_done_callback(lambda _, name=name: ended.append(name))
    held.set()
    until(lambda: len(ended) == 2)
    assert ended == ["soon", "late"]


def test_what_is_late_or_cancelled_does_not_run(filled, held):
    batcher, folder = filled
    rows = folder.queries("a", [TEXTS[0]])[1]
    late, gone, kept = batcher.submit(rows, time.monotonic()), *(batcher.submit(rows, later()) for _ in "ab")
    batcher.cancel(gone)
    held.set()
    assert len(kept.done.result(SOON)) == 1
    assert (refusal("", late.done.result, SOON).status, gone.done.cancelled()) == (504, True)
    assert batcher.waiting == 0
    assert batcher._observer.batches == [(1, 1)]


def test_more_than_the_bound_is_refused_at_once(filled, held):
    batcher, folder = filled
    rows = folder.queries("a", [TEXTS[0]])[1]
    batcher.bound = 3 * rows[0].tokens
    tickets = [batcher.submit(rows, later()) for _ in range(2)]
    busy = refusal("queue is full", batcher.submit, rows, later())
    assert (busy.status, busy.headers["Retry-After"]) == (429, "1")
    assert refusal("", batcher.submit, rows * 4, later()).status == 413
    held.set()
    wait([ticket.done for ticket in tickets], SOON)
    assert batcher.waiting == 0
    assert len(batcher.submit(rows, later()).done.result(SOON)) == 1


@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("no room"), 503), (KeyError("secret text"), 500)]
)
def test_rows_that_cannot_run_take_no_others_with_them(filled, held, monkeypatch, error, status):
    batcher, folder = filled
    answers = batcher.pool.answers

    def fails(rows):
        if any(len(row.ids) > 20 for row in rows):
            raise error
        return answers(rows)

    monkeypatch.setattr(batcher.pool, "answers", fails)
    long, short = ("so " * 30).strip(), TEXTS[0]
    tickets = [batcher.submit(folder.queries("a", [text])[1], later()) for text in (short, long, short)]
    held.set()
    assert [len(ticket.done.result(SOON)) for ticket in (tickets[0], tickets[2])] == [1, 1]
    refused = refusal("", tickets[1].done.result, SOON)
    assert (refused.status, "secret" in str(refused)) == (status, False)
    assert batcher.waiting == 0


@pytest.mark.parametrize("method", [Anchored.configured({"steps": 1}), I2CL.configured({"epochs": 2})])
@pytest.mark.parametrize("whole", [True, False])
def test_a_fit_lets_requests_in_and_comes_to_the_same_bits(filled, decoder, task, held, method, whole):
    """Every answer brings the next request, so that one waits at each of the fit's pauses."""
    batcher, folder = filled
    right = folder.injection(folder.entry("a").digest).scores(decoder, [TEXTS[0]])[0]
    hooks = []

    def looked():
        for module in decoder.model.modules():
            hooks.extend([*module._forward_hooks.values(), *module._forward_pre_hooks.values()])

    shared = SharedDecoder(batcher, SimpleNamespace(raise_if_cancelled=looked))
    task = task if whole else replace(task, template=Template("{text} ->{label}"))
    assert Questions(shared, task).labels.full == whole  # else the fit ends with a vector that says a label
    shown = task.sample(1)
    alone, fit = (batcher.run(lambda: method.injection(shared, task, shown)) for _ in range(2))
    rows, tickets = folder.queries("a", [TEXTS[0]])[1], []

    def ask(_=None):
        if not fit.done():
            tickets.append(batcher.submit(rows, later()))
            tickets[-1].done.add_done_callback(ask)

    alone.add_done_callback(ask)
    held.set()
    wait([fit], SOON)
    assert len(tickets) > 3
    assert not hooks  # at a pause: they would work on others' requests as well
    for ticket in tickets:
        torch.testing.assert_close(ticket.done.result(SOON)[0], right, rtol=1e-5, atol=1e-5)
    alone, outcome = alone.result(), fit.result()
    assert torch.equal(outcome.coefficients, alone.coefficients)
    assert torch.equal(outcome.context.values, alone.context.values)


def test_the_end_answers_what_waits_and_stops_what_is_long(filled, task, held):
    batcher, folder = filled
    shared = SharedDecoder(batcher, SimpleNamespace(raise_if_cancelled=lambda: None))
    fit = batcher.run(shared.pause)
    file = batcher.submit_slices(folder.queries("a", TEXTS)[1])
    single = batcher.submit(folder.queries("a", [TEXTS[0]])[1], later())
    threading.Timer(0.1, held.set).start()
    batcher.close()
    assert len(single.done.result(0)) == 1
    with pytest.raises((CancelledError, FitStoppedError)):
        fit.result(0)
    with pytest.raises(CancelledError):
        file.done.result(0)
    refusal("shutting down", batcher.submit, folder.queries("a", [TEXTS[0]])[1], later())
