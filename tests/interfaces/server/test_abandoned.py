"""Requests whose client leaves, or whose deadline passes, while their texts wait to be encoded."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from .conftest import TEXTS, catch_refusal, make_injection


@pytest.fixture
def encodings(service, monkeypatch):
    """Texts that were encoded, in requests that wait for `release`."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    encode, encoded, release = service.tasks.queries, [], threading.Event()

    def slow(name, texts):
        encoded.append(texts)
        release.wait(20)
        return encode(name, texts)

    monkeypatch.setattr(service.tasks, "queries", slow)
    return encoded, release


async def behind_another(service, encodings, **options):
    """Classify behind a request that occupies the only thread, and return the answers of both."""
    encoded, release = encodings
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    first = asyncio.create_task(service.classify("films", ["first"]))
    while not encoded:
        await asyncio.sleep(0.01)
    try:
        second = await service.classify("films", list(TEXTS), **options)
    finally:
        release.set()
    return await first, second


def test_texts_of_a_client_that_left_are_not_encoded(service, encodings):
    first, second = asyncio.run(behind_another(service, encodings, disconnected=lambda: asyncio.sleep(0.05)))
    assert len(first.probabilities) == 1
    assert second is None
    assert encodings[0] == [["first"]]
    assert service.batcher.waiting == 0


def test_the_deadline_holds_while_texts_wait_to_be_encoded(service, encodings):
    problem = catch_refusal("deadline", asyncio.run, behind_another(service, encodings, timeout=0.05))
    assert (problem.status, problem.code) == (504, "deadline")
    assert encodings[0] == [["first"]]
