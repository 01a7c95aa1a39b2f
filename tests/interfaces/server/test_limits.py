"""Bodies and connections that are slow, too many, or never become a request."""

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


def asked(inside, parts, expected=None):
    """What a guard answers to a body that comes in parts, each when its time has come; and how it is left."""
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

    asyncio.run(inside(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.fixture
def around():
    """Makes guards around a program that answers how long its body is."""

    def make(limit=10**6):
        async def app(scope, receive, send):
            async with one.admitted(required, scope, receive) as receive_body:
                whole = await receive_body()
                seen = [len(whole["body"]), scope[guard.BODY].seek(0, 2), one.held, one.running]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(seen).encode()})

        required = Policy("read", ("application/jsonl",), limit)
        one = Guard(app, Access(), Metrics())
        return one

    return make


def test_a_body_has_a_time_that_grows_with_it(around, monkeypatch):
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(guard, "BODY_RATE", 10)
    one = around()
    assert asked(one, [(0, b"a" * 1000), (0.4, b"b")]) == (200, [1001, 1001, 1001, 1])
    status, expected = asked(one, [(0, b"a"), (3600, b"b")], expected=2)
    assert (status, expected["error"]["code"]) == (408, "slow_body")
    assert (one.held, one.running) == (0, 0)


def test_bodies_are_bounded_alone_and_together(around, monkeypatch):
    monkeypatch.setattr(guard, "SMALL", 10)
    monkeypatch.setattr(guard, "MAX_HELD", 100)
    one = around(limit=150)
    for parts, expected in (([(0, b"a" * 151)], None), ([(0, b"a")], 151)):
        assert asked(one, parts, expected)[1]["error"]["code"] == "body_too_long"
    one.held = 60
    status, expected = asked(one, [(0, b"a" * 50)])
    assert (status, expected["error"]["code"]) == (429, "busy")
    assert asked(one, [(0, b"a" * 40)])[0] == asked(one, [(0, b"a" * 9)])[0] == 200
    one.held = 1000
    assert asked(one, [(0, b"a" * 9)])[0] == 200  # a text gets in beside files
    assert one.held == 1000


def test_a_long_body_lies_on_the_disk_and_requests_at_once_are_bounded(around, monkeypatch):
    monkeypatch.setattr(guard, "MAX_IN_MEMORY", 10)
    rolled = []
    rollover = guard.SpooledTemporaryFile.rollover
    monkeypatch.setattr(guard.SpooledTemporaryFile, "rollover", lambda self: rolled.append(rollover(self)))
    assert asked(around(), [(0, b"a" * 6)] * 3) == (200, [18, 18, 18, 1])
    assert len(rolled) == 1
    monkeypatch.setattr(guard, "MAX_REQUESTS", 3)
    one = around()
    one.running = 3
    status, expected = asked(one, [(0, b"a")])
    assert (status, expected["error"]["code"], one.running) == (503, "busy", 3)


def connected(url, first=b""):
    host, port = re.fullmatch(r"http://(.*):(\d+)", url).groups()
    result = socket.create_connection((host, int(port)), timeout=SECONDS)
    result.sendall(first)
    return result


def ended(connection):
    """Wait for the other side's end; what came before it."""
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
    """What uvicorn has of one, as far as it is looked at."""

    def __init__(self, *, runs=False, unsent=0):
        self.cycle = SimpleNamespace(response_complete=not runs)
        self.unsent, self.ended = unsent, False
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.unsent, abort=self.end)

    def end(self):
        self.ended = True


def test_a_connection_ends_that_takes_nothing_and_not_one_that_waits_for_its_answer():
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


def test_connections_that_never_become_a_request_end(tmp_path):
    with serving(tmp_path / "tasks", code=SERVED.format(idle=1, most=800)) as url:
        silent, half, second, refused = (connected(url, one) for one in (b"", GET[:-2], GET + GET[:9], POST))
        drip = connected(url, GET[:-2])
        start = time.monotonic()
        while time.monotonic() - start < SECONDS:  # a byte at a time is no request either
            try:
                drip.sendall(b"x")
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.05)
        else:
            pytest.fail("it is still open")
        assert ended(silent) == ended(half) == b""
        assert ended(second).startswith(b"HTTP/1.1 200")
        assert ended(refused).startswith(b"HTTP/1.1 415")
        assert ended(connected(url, GET)).startswith(b"HTTP/1.1 200")


def test_of_too_many_connections_the_idle_ones_end(tmp_path):
    with serving(tmp_path / "tasks", code=SERVED.format(idle=3600, most=5)) as url:
        idle = [connected(url) for _ in range(6)]
        (first, *_), _, _ = select.select(idle, [], [], SECONDS)
        assert ended(first) == b""
        last = connected(url, GET)
        assert last.recv(100).startswith(b"HTTP/1.1 200")
        (second, *_), _, _ = select.select({*idle} - {first}, [], [], SECONDS)
        assert ended(second) == b""
