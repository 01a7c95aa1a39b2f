"""Limits on request bodies and connections."""

import asyncio
import json
import re
import select
import socket
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn")

from i2cl.interfaces.server import guard, process
from i2cl.interfaces.server.guard import Access, Guard, Policy
from i2cl.interfaces.server.metrics import Metrics

from .test_serve import serving

SECONDS = 120.0

SERVED = """
from i2cl.interfaces.server import process
process.IDLE_SECONDS, process.MAX_CONNECTIONS = {idle}, {most}
from i2cl.interfaces.cli import main
main()
"""


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
                seen = [len(whole["body"]), scope[guard.BODY].seek(0, 2), one.body_bytes, one.running]
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
    assert (one.body_bytes, one.running) == (0, 0)


def test_bodies_are_bounded_individually_and_in_total(make_guard, monkeypatch):
    monkeypatch.setattr(guard, "SMALL_BODY", 10)
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 100)
    one = make_guard(limit=150)
    for parts, expected in (([(0, b"a" * 151)], None), ([(0, b"a")], 151)):
        assert send_through(one, parts, expected)[1]["error"]["code"] == "body_too_long"
    one.body_bytes = 60
    status, expected = send_through(one, [(0, b"a" * 50)])
    assert (status, expected["error"]["code"]) == (429, "busy")
    assert send_through(one, [(0, b"a" * 40)])[0] == send_through(one, [(0, b"a" * 9)])[0] == 200
    one.body_bytes = 1000
    assert send_through(one, [(0, b"a" * 9)])[0] == 200  # small bodies are accepted anyway
    assert one.body_bytes == 1000


def test_large_body_is_spooled_to_disk_and_requests_are_bounded(make_guard, monkeypatch):
    monkeypatch.setattr(guard, "MAX_IN_MEMORY", 10)
    rolled = []
    rollover = guard.SpooledTemporaryFile.rollover
    monkeypatch.setattr(guard.SpooledTemporaryFile, "rollover", lambda self: rolled.append(rollover(self)))
    assert send_through(make_guard(), [(0, b"a" * 6)] * 3) == (200, [18, 18, 18, 1])
    assert len(rolled) == 1
    monkeypatch.setattr(guard, "MAX_REQUESTS", 3)
    one = make_guard()
    one.running = 3
    status, expected = send_through(one, [(0, b"a")])
    assert (status, expected["error"]["code"], one.running) == (503, "busy", 3)


def connect(url, first=b""):
    host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()
    result = socket.create_connection((host, int(port)), timeout=SECONDS)
    result.sendall(first)
    return result


def read_to_end(connection):
    """Read until the server closes the connection."""
    expected = b""
    try:
        while part := connection.recv(2**16):
            expected += part
    except ConnectionResetError:
        pass
    return expected


GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
POST = GET[:-2].replace(b"GET /healthz", b"POST /v1/classify")
POST += b"Content-Length: 9\r\nContent-Type: text/plain\r\n\r\n"


class Connection:
    """Stand-in for a connection of uvicorn."""

    def __init__(self, *, runs=False, unsent=0):
        self.cycle = SimpleNamespace(response_complete=not runs)
        self.unsent, self.ended = unsent, False
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unsent, abort=self.end)

    def end(self):
        self.ended = True


def test_sweep_closes_idle_connections_but_not_waiting_ones():
    import uvicorn

    server = process._Server(uvicorn.Config(None), lambda: None, lambda: None)
    idle, runs, takes_nothing = Connection(), Connection(runs=True), Connection(runs=True, unsent=9)
    slow, often = Connection(runs=True, unsent=9), Connection()
    server.server_state.connections = {idle, runs, takes_nothing, slow, often}
    for second in range(0, 200, 10):
        slow.unsent += 1
        often.cycle = SimpleNamespace(response_complete=True)  # another request has been answered
        server.sweep(second)
        assert idle.ended == takes_nothing.ended == (second > process.IDLE_SECONDS)
    assert not any(one.ended for one in (runs, slow, often))


def test_connections_without_a_request_are_closed(tmp_path):
    with serving(tmp_path / "tasks", code=SERVED.format(idle=1, most=800)) as url:
        silent, half, second, refused = (connect(url, one) for one in (b"", GET[:-2], GET + GET[:9], POST))
        drip = connect(url, GET[:-2])
        start = time.monotonic()
        while time.monotonic() - start < SECONDS:  # sending a byte at a time does not help
            try:
                drip.sendall(b"x")
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.05)
        else:
            pytest.fail("the connection is still open")
        assert read_to_end(silent) == read_to_end(half) == b""
        assert read_to_end(second).startswith(b"HTTP/1.1 200")
        assert read_to_end(refused).startswith(b"HTTP/1.1 415")
        assert read_to_end(connect(url, GET)).startswith(b"HTTP/1.1 200")


def test_longest_idle_connections_are_closed_beyond_the_maximum(tmp_path):
    with serving(tmp_path / "tasks", code=SERVED.format(idle=3600, most=5)) as url:
        idle = [connect(url) for _ in range(6)]
        (first, *_), _, _ = select.select(idle, [], [], SECONDS)
        assert read_to_end(first) == b""
        last = connect(url, GET)
        assert last.recv(100).startswith(b"HTTP/1.1 200")
        (second, *_), _, _ = select.select({*idle} - {first}, [], [], SECONDS)
        assert read_to_end(second) == b""
