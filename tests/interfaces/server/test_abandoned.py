"""Requests whose client disconnects, or whose deadline passes, before the model has started on them."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")

from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.guard import Access

from .conftest import CLASSIFY_SCOPE, TEXTS, catch_refusal, make_injection


@pytest.fixture
def encodings(service, monkeypatch):
    """Texts that were encoded one request at a time, and an event that lets the first request go on."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    encode, encoded, release = service.tasks.queries, [], threading.Event()

    def slow(name, texts):
        encoded.append(texts)
        release.wait(20)
        return encode(name, texts)

    monkeypatch.setattr(service.tasks, "queries", slow)
    monkeypatch.setattr(service, "_encoding", ThreadPoolExecutor(1))
    return encoded, release


async def behind_another(service, encodings, make_second):
    """Run a request behind one that occupies the only thread, and return the answers of both."""
    encoded, release = encodings
    first = asyncio.create_task(service.classify("films", ["first"]))
    while not encoded:
        await asyncio.sleep(0.01)
    try:
        second = await make_second()
    finally:
        release.set()
    return await first, second


def post_and_disconnect(app):
    """Send a request whose client disconnects after its body, and return the status of the response."""
    body = b'{"model": "films", "input": "second"}'
    messages = [{"type": "http.request", "body": body, "more_body": False}, {"type": "http.disconnect"}]

    async def post():
        async def receive():
            await asyncio.sleep(0.05)
            return messages.pop(0)

        sent = []

        async def send(message):
            sent.append(message)

        await app(CLASSIFY_SCOPE.copy(), receive, send)
        return sent[0]["status"]

    return post


def test_texts_of_a_disconnected_client_are_not_encoded(service, encodings):
    app = make_app(service, Access())
    first, status = asyncio.run(behind_another(service, encodings, post_and_disconnect(app)))
    assert (len(first.probabilities), status) == (1, 499)
    assert encodings[0] == [["first"]]
    assert service.batcher.waiting == 0


def test_deadline_holds_while_texts_wait_to_be_encoded(service, encodings):
    def second():
        return service.classify("films", list(TEXTS), timeout=0.05)

    problem = catch_refusal("deadline", asyncio.run, behind_another(service, encodings, second))
    assert (problem.status, problem.code) == (504, "deadline")
    assert encodings[0] == [["first"]]
