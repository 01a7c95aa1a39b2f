"""Limits on request bodies and on requests in flight."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi")

from i2cl.interfaces.server import guard
from i2cl.interfaces.server.guard import Access, Guard, Metrics, Policy


def send_through(app, parts, expected=None):
    """Send a body in parts of (delay, bytes) through a guard. Return the status and JSON of the response."""
    headers = [(b"content-type", b"application/jsonl")]
    headers += [] if expected is None else [(b"content-length", b"%d" % expected)]
    scope = {"type": "http", "method": "POST", "path": "/v1/batches", "headers": headers}
    waiting, sent = list(parts), []

    async def receive():
        seconds, body = waiting.pop(0) if waiting else (3600, b"")
        await asyncio.sleep(seconds)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture
def make_guard():
    """Function that makes a guard around an application that returns the size of its body."""

    def make(limit=10**6):
        async def app(scope, receive, send):
            async with one.admitted(required, scope, receive) as receive_body:
                whole = await receive_body()
                seen = [
                    len(whole["body"]),
                    scope[guard.BODY].seek(0, 2),
                    one.in_flight["body bytes"],
                    one.in_flight["requests"],
                ]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(seen).encode()})

        required = Policy("read", ("application/jsonl",), limit)
        one = Guard(app, Access(), Metrics())
        return one

    return make


def test_time_limit_of_a_body_grows_with_its_size(make_guard, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(guard, "BODY_RATE", 10)
    one = make_guard()
    assert send_through(one, [(0, b"a" * 1000), (0.4, b"b")]) == (200, [1001, 1001, 1001, 1])
    status, expected = send_through(one, [(0, b"a"), (3600, b"b")], expected=2)
    assert (status, expected["error"]["code"]) == (408, "slow_body")
    assert one.in_flight.total() == 0


def test_bodies_are_bounded_individually_and_in_total(make_guard, monkeypatch):
    monkeypatch.setattr(guard, "SMALL_BODY", 10)
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 100)
    one = make_guard(limit=150)
    for parts, expected in (([(0, b"a" * 151)], None), ([(0, b"a")], 151)):
        assert send_through(one, parts, expected)[1]["error"]["code"] == "body_too_long"
    one.in_flight["body bytes"] = 60
    status, expected = send_through(one, [(0, b"a" * 50)])
    assert (status, expected["error"]["code"]) == (429, "busy")
    assert send_through(one, [(0, b"a" * 40)])[0] == send_through(one, [(0, b"a" * 9)])[0] == 200
    one.in_flight["body bytes"] = 1000
    assert send_through(one, [(0, b"a" * 9)])[0] == 200  # small bodies are accepted anyway
    assert one.in_flight["body bytes"] == 1000


def test_large_body_is_spooled_to_disk_and_requests_are_bounded(make_guard, monkeypatch):
    monkeypatch.setattr(guard, "MAX_IN_MEMORY", 10)
    rolled = []
    rollover = guard.SpooledTemporaryFile.rollover
    monkeypatch.setattr(guard.SpooledTemporaryFile, "rollover", lambda self: rolled.append(rollover(self)))
    assert send_through(make_guard(), [(0, b"a" * 6)] * 3) == (200, [18, 18, 18, 1])
    assert len(rolled) == 1
    monkeypatch.setattr(guard, "MAX_REQUESTS", 3)
    one = make_guard()
    one.in_flight["requests"] = 3
    status, expected = send_through(one, [(0, b"a")])
    assert (status, expected["error"]["code"]) == (503, "busy")
