"""Checks around and inside the application: host names, tokens, body limits, request ids, the access log.

`Guard` is the outermost ASGI application: it checks the Host header, gives every request an id, adds security
headers, and logs. `GuardedRoute` enforces a route's `Policy` once the router has chosen it, so that
authorization never depends on how the path is spelled or which prefix the application is mounted under.
"""

import asyncio
import collections
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from i2cl.errors import I2CLError
from i2cl.interfaces.server.refusals import RefusalError, busy

Role = Literal["read", "admin"]

MIN_TOKEN_LENGTH = 16
BODY_SECONDS = 30.0  # time limit for receiving a body, plus one second per `BODY_RATE` bytes
BODY_RATE = 2**18
MAX_IN_MEMORY = 2**20  # bytes of a body beyond which it is spooled to disk
MAX_BODY_BYTES = 2**29  # of all bodies in flight; up to `SMALL_BODY` bytes are always accepted
SMALL_BODY = 2**16  # bytes
MAX_REQUESTS = 512  # concurrent requests, not counting public routes and event streams
MAX_STREAMS = 256  # concurrent event streams

# Keys of the ASGI scope: the body as a file that is closed with the request; the id of the read token.
BODY, READER = "i2cl.body", "i2cl.reader"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # other ids are replaced: they would end up in the log

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

_log = logging.getLogger("i2cl.server")
_access_log = logging.getLogger("i2cl.server.access")

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class Policy:
    """Requirements of a route, checked after routing and before the body is read."""

    role: Role | None = "admin"  # lowest role that may use it; None: public
    content_types: tuple[str, ...] = ()  # accepted types of the body; empty: no body is read
    max_body: int = 0  # bytes
    stream: bool = False  # whether the response stays open, and is counted as an event stream


def policy(
    role: Role | None, *content_types: str, max_body: int = 0, stream: bool = False
) -> Callable[[Endpoint], Endpoint]:
    """Declare the `Policy` of an endpoint. Endpoints without one need an admin token."""

    def declare(endpoint: Endpoint) -> Endpoint:
        endpoint.policy = Policy(role, content_types, max_body, stream)  # type: ignore[attr-defined]
        return endpoint

    return declare


class GuardedRoute(APIRoute):
    """Route that enforces the policy of its endpoint, by the guard in ``app.state.guard``."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that was routed here."""
        if scope["method"] not in (self.methods or ()):  # answered with a 405, whatever the token
            await super().handle(scope, receive, send)
            return
        guard: Guard = scope["app"].state.guard
        required = getattr(self.endpoint, "policy", Policy())
        async with guard.admitted(required, scope, receive) as receive_body:
            if required.content_types:
                handle = partial(super().handle, scope, receive_body)
                await _cancel_on_disconnect(handle, receive, send)
            else:
                await super().handle(scope, receive_body, send)


async def _cancel_on_disconnect(
    handle: Callable[[Send], Coroutine[Any, Any, None]], receive: Receive, send: Send
) -> None:
    """Run a handler, and cancel it if the client disconnects before the response begins.

    The body has been received already. Raises RefusalError (499) if the handler was cancelled.
    """

    async def disconnection() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def send_response(message: Message) -> None:
        watching.cancel()
        await send(message)

    watching = asyncio.ensure_future(disconnection())
    handling = asyncio.ensure_future(handle(send_response))
    watching.add_done_callback(lambda done: done.cancelled() or handling.cancel())
    try:
        await handling
    except asyncio.CancelledError:
        if watching.done() and not watching.cancelled():
            message = "the client disconnected, and the request was cancelled"
            raise RefusalError(499, "gone", message, "retry") from None
        raise
    finally:
        watching.cancel()


@dataclass(frozen=True)
class Access:
    """Tokens and host names that are accepted."""

    tokens: Mapping[str, Role] = field(default_factory=dict)  # empty: everything is allowed without a token
    hosts: frozenset[str] = frozenset()  # accepted Host headers, without port; empty: any

    def require_host(self, host: str) -> None:
        """Raise RefusalError (421) on a foreign Host header, which protects from DNS rebinding."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self.hosts and name.lower() not in self.hosts:
            message = f"host {name[:100]!a} is not allowed"
            raise RefusalError(421, "unknown_host", message, "add it with --allowed-host")

    def authorize(self, required: Role, header: str) -> str | None:
        """Check an Authorization header, comparing tokens in constant time.

        Returns a stable, non-reversible id of a read token; None for an admin, or if the server has no
        tokens. Raises RefusalError: 401 without a valid token, 403 for an insufficient role.
        """
        if not self.tokens:
            return None
        scheme, _, token = header.partition(" ")
        given = token.strip().encode()
        roles = [role for known, role in self.tokens.items() if hmac.compare_digest(known.encode(), given)]
        if not roles or scheme.lower() != "bearer":
            hint, headers = "send Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
            raise RefusalError(401, "no_token", "missing or invalid token", hint, headers=headers)
        if "admin" in roles:
            return None
        if required == "admin":
            raise RefusalError(403, "read_token", "this token is read-only", "use an admin token")
        return hashlib.sha256(given).hexdigest()[:16]


def read_tokens(path: Path) -> dict[str, Role]:
    """Read a token file of lines "<role> <token>". Raises I2CLError with the line number, never the token."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise I2CLError(f"--token-file {str(path)!r} cannot be read ({error}): check the path") from None
    roles: dict[str, Role] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in {"read", "admin"} or len(words[1]) < MIN_TOKEN_LENGTH:
            expected = f"'admin TOKEN' or 'read TOKEN' with a token of at least {MIN_TOKEN_LENGTH} characters"
            raise I2CLError(f"--token-file {str(path)!r} line {number} is invalid: write {expected}")
        roles[words[1]] = "admin" if words[0] == "admin" else "read"
    if not roles:
        raise I2CLError(f"--token-file {str(path)!r} has no tokens: write a line 'admin TOKEN'")
    return roles


def is_loopback(host: str) -> bool:
    """Return whether an address is only reachable from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Metrics:
    """Prometheus metrics of a server. None is labelled by task: there may be thousands of tasks."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("i2cl_requests", "Requests", ["route", "status"], registry=registry)
        self.refusals = Counter("i2cl_refusals", "Refused requests by reason", ["reason"], registry=registry)
        self._rows = Histogram("i2cl_batch_rows", "Rows per batch", buckets=_SIZES, registry=registry)
        self._tasks = Histogram("i2cl_batch_tasks", "Tasks per batch", buckets=_SIZES, registry=registry)
        self._running = Histogram(
            "i2cl_running_seconds", "Duration of a batch", buckets=_SECONDS, registry=registry
        )
        queued = "Time of a request in the queue"
        self._waiting = Histogram("i2cl_waiting_seconds", queued, buckets=_SECONDS, registry=registry)

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge; ``read`` is called whenever the metrics are exported."""
        Gauge(name, help_text, registry=self._registry).set_function(read)

    def batch(self, *, rows: int, tasks: int, seconds: float, waited: Sequence[float]) -> None:
        """Record a batch; ``waited``: seconds that each of its requests was queued."""
        self._rows.observe(rows)
        self._tasks.observe(tasks)
        self._running.observe(seconds)
        for queued in waited:
            self._waiting.observe(queued)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


@dataclass(eq=False)
class Guard:
    """Outermost ASGI application. It also counts requests and bodies in flight, for `GuardedRoute`."""

    app: Any  # the application inside
    access: Access
    metrics: Metrics  # counts requests and errors
    # requests, event streams and body bytes
    in_flight: collections.Counter[str] = field(default_factory=collections.Counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; see https://asgi.readthedocs.io."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(8)
        response_started, status = False, 500
        started = time.perf_counter()
        method, path = scope["method"], scope["path"]

        async def send_with_headers(message: Message) -> None:
            nonlocal response_started, status
            if message["type"] == "http.response.start":
                response_started, status = True, message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            self.access.require_host(Headers(scope=scope).get("host", ""))
            await self.app(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 - an error of one request must not end the server
            if not isinstance(error, RefusalError):
                _log_error(error, request_id)
            if not response_started:
                refusal = RefusalError.of(error)
                self.metrics.refusals.labels(refusal.code).inc()
                await JSONResponse(refusal.body(), refusal.status, refusal.headers)(
                    scope, receive, send_with_headers
                )
        finally:
            self.metrics.requests.labels(getattr(scope.get("route"), "path", "other"), status).inc()
            milliseconds = 1000 * (time.perf_counter() - started)
            client = (scope.get("client") or ["-"])[0]
            log_format = '%s "%s %s" %d %.1f ms id=%s'
            _access_log.info(log_format, client, quote(method), quote(path), status, milliseconds, request_id)

    @asynccontextmanager
    async def admitted(self, required: Policy, scope: Scope, receive: Receive) -> AsyncIterator[Receive]:
        """Enforce a policy, then run the block with a ``receive`` that returns the whole body.

        Raises RefusalError: 401, 403, 408, 413, 415, 429 or 503.
        """
        with ExitStack() as cleanup:
            if required.role is not None:
                header = Headers(scope=scope).get("authorization", "")
                reader = self.access.authorize(required.role, header)
                if reader is not None:
                    scope[READER] = reader
                if required.stream:
                    kind, limit = "event streams", MAX_STREAMS
                else:
                    kind, limit = "requests", MAX_REQUESTS
                if self.in_flight[kind] >= limit:
                    raise busy(503, f"the server has {limit} {kind} open")
                self._count(kind, 1, cleanup)
            if required.content_types:
                receive = await self._body(required, scope, receive, cleanup)
            yield receive

    def _count(self, kind: str, amount: int, cleanup: ExitStack) -> None:
        """Add to `in_flight` until the cleanup."""
        self.in_flight[kind] += amount
        cleanup.callback(self.in_flight.subtract, {kind: amount})

    async def _body(self, required: Policy, scope: Scope, receive: Receive, cleanup: ExitStack) -> Receive:
        """Receive the body into a file, and return a ``receive`` that returns it in one message."""
        kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        if kind not in required.content_types:
            expected = " or ".join(required.content_types)
            actual = repr(kind[:60]) if kind else "missing"
            raise RefusalError(415, "content_type", f"Content-Type is {actual}", f"send {expected}")
        body = cleanup.enter_context(SpooledTemporaryFile(MAX_IN_MEMORY))  # noqa: SIM115 - closed by cleanup
        await self._fill(body, Request(scope, receive), required.max_body, cleanup)
        body.seek(0)
        scope[BODY] = body
        unread = [body]

        async def receive_body() -> Message:
            if not unread:
                return await receive()
            return {"type": "http.request", "body": unread.pop().read(), "more_body": False}

        return receive_body

    async def _fill(self, body: IO[bytes], request: Request, limit: int, cleanup: ExitStack) -> None:
        """Write the request's body to a file, within limits of size and time."""
        length = request.headers.get("content-length", "")
        too_long = RefusalError(413, "body_too_long", f"the body exceeds {limit} bytes", "split the request")
        if length.isdecimal() and int(length[:18]) > limit:
            raise too_long
        began = asyncio.get_running_loop().time()
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS) as timeout:
                async for part in request.stream():
                    size += len(part)
                    self._count("body bytes", len(part), cleanup)
                    if size > limit:
                        raise too_long
                    if size > SMALL_BODY and self.in_flight["body bytes"] > MAX_BODY_BYTES:
                        raise busy(429, f"request bodies of {MAX_BODY_BYTES} bytes are being received")
                    body.write(part)
                    timeout.reschedule(began + BODY_SECONDS + size / BODY_RATE)
        except ClientDisconnect:
            raise RefusalError(400, "gone", "the client disconnected", "send the whole body") from None
        except TimeoutError:
            allowed = f"{BODY_SECONDS:.0f} s plus one per {BODY_RATE} bytes"
            message = f"timed out receiving the request body (limit: {allowed})"
            raise RefusalError(408, "slow_body", message, "send it faster") from None


def _log_error(error: Exception, request_id: str) -> None:
    """Log where an unexpected error was raised, without its message, which may quote a user's text."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    _log.error("%s at %s id=%s", type(error).__name__, places, request_id)
