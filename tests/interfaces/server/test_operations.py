"""Request ids, the access log, limits on bodies and on requests in flight, and the client's connections."""

import asyncio
import json
import logging
import re

import pytest

pytest.importorskip("fastapi")

from fitting import raises
from i2cl.interfaces.server import guard
from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.client import AsyncClient, Client
from i2cl.interfaces.server.guard import Access, Guard, Metrics, Policy
from i2cl.interfaces.server.refusals import RefusalError

from .test_app import CLASSIFY, CLASSIFY_BODY


def test_request_id_is_returned_and_logged(shared_client, caplog):
    with caplog.at_level(logging.INFO, "i2cl.server.access"):
        reply = shared_client.post(CLASSIFY, json=CLASSIFY_BODY, headers={"X-Request-Id": "order-7.b"})
    assert reply.headers["X-Request-Id"] == "order-7.b"
    assert re.search(r'"POST /v1/classify" 200 [\d.]+ ms id=order-7\.b', caplog.text)


@pytest.mark.parametrize("given", ["", "a b", "a\nb", "x" * 65, "ü", "id=1"])
def test_unsafe_request_id_is_replaced(shared_client, given):
    reply = shared_client.get("/healthz", headers={"X-Request-Id": given.encode()})
    assert re.fullmatch("[0-9a-f]{16}", reply.headers["X-Request-Id"])


def test_access_log_has_no_texts_and_no_line_breaks(shared_client, caplog):
    with caplog.at_level(logging.INFO, "i2cl.server.access"):
        shared_client.get("/v1/tasks/a%0Ab?text=secret")
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("access")]
    assert "GET /v1/tasks/a%0Ab" in line
    assert "secret" not in line


def test_requests_and_event_streams_are_bounded_separately(service, monkeypatch):
    monkeypatch.setattr(guard, "MAX_REQUESTS", 1)
    monkeypatch.setattr(guard, "MAX_STREAMS", 2)
    app = make_app(service, Access())

    def enter(policy):
        return app.admitted(policy, {"type": "http", "method": "GET", "headers": []}, None)

    async def open_streams():
        stream, request = Policy("read", stream=True), Policy("read")
        async with enter(stream), enter(stream), enter(request):
            for policy in (stream, request):
                with pytest.raises(RefusalError) as refused:
                    await enter(policy).__aenter__()
                assert refused.value.status == 503

    asyncio.run(open_streams())
    assert app.in_flight.total() == 0


def test_clients_close_their_connections():
    async def use():
        async with AsyncClient("http://127.0.0.1:1") as client:
            return client

    with Client("http://127.0.0.1:1") as client:
        pass
    for closed in (client._client, asyncio.run(use())):
        assert closed._http.is_closed
        assert closed._once.is_closed


def test_client_without_httpx_says_what_to_install(monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda _: None)
    raises(r"the client needs the package httpx2: pip install 'i2cl\[serve\]'", Client, "http://127.0.0.1")


def test_both_clients_have_the_same_methods():
    def methods(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert methods(Client) - {"close"} == methods(AsyncClient) - {"aclose"}


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
