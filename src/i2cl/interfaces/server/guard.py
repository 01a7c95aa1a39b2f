"""What stands before every route: who asks, from where, how much, and what is told when something fails."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Scope

from i2cl.errors import I2CLError
from i2cl.interfaces.server.metrics import Metrics
from i2cl.interfaces.server.refusals import RefusalError, busy

Role = Literal["read", "admin"]

# What needs no token: nothing there is a task's.
OPEN = ("/", "/healthz", "/readyz", "/openapi.json", "/page.css", "/page.js", "/example.csv")

SHORTEST_TOKEN = 16
BODY_SECONDS = 30.0  # for which a body may come in, and longer by `BODY_RATE`
BODY_RATE = 2**18  # bytes that give a body another second once they are there
IN_MEMORY = 2**20  # bytes of a body beyond which it lies on the disk
MOST_HELD = 2**29  # bytes of all bodies at once; those of up to `SMALL` are taken in any case
SMALL = 2**16
MOST_RUNNING = 512  # requests at once, those aside that need no token

# In a scope: the body as a file that closes with the request; whose reading token it was.
BODY, READER = "i2cl.body", "i2cl.reader"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

_log = logging.getLogger("i2cl.server")


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    # of each role; none at all means that everybody may do everything
    tokens: Mapping[str, Role] = field(default_factory=dict)
    hosts: frozenset[str] = frozenset()  # names under which this server is asked for; empty for any

    def require_host(self, host: str) -> None:
        """Refuse (421) a name that is not ours: a page elsewhere may have bound it to this address."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if self.hosts and name.lower() not in self.hosts:
            message = "this server is not asked for by that Host: add --allowed-host"
            raise RefusalError(421, "unknown_host", message)

    def role(self, header: str) -> Role | None:
        """That of a bearer token, in a time that does not depend on it."""
        kind, _, given = header.partition(" ")
        match: Role | None = None
        for token, role in self.tokens.items():
            if hmac.compare_digest(token.encode(), given.strip().encode()) and kind.lower() == "bearer":
                match = role
        return match

    def reader(self, header: str) -> str:
        """What stands for a token where it is not to be told."""
        return hashlib.sha256(header.partition(" ")[2].strip().encode()).hexdigest()[:16]


def read_tokens(path: Path) -> dict[str, Role]:
    """Tokens of a file, a role and a token a line. Raises I2CLError, naming the line and never a token."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise I2CLError(f"--token-file {str(path)!r} cannot be read ({error}): check the path") from None
    roles: dict[str, Role] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in {"read", "admin"} or len(words[1]) < SHORTEST_TOKEN:
            cure = f"write 'admin TOKEN' or 'read TOKEN', with at least {SHORTEST_TOKEN} characters"
            raise I2CLError(f"--token-file {str(path)!r} line {number} is no role and token: {cure}")
        roles[words[1]] = "admin" if words[0] == "admin" else "read"
    if not roles:
        raise I2CLError(f"--token-file {str(path)!r} holds no token: write a line 'admin TOKEN'")
    return roles


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(eq=False)
class Guard:
    """An ASGI program around another one, which sees only what may come in, with its whole body."""

    app: Any  # the program inside
    access: Access  # who may ask
    # content types that a method and a path take, none where a body is not read; the longest body in bytes
    bodies: Callable[[str, str], tuple[Sequence[str], int]]
    metrics: Metrics  # counts requests and refusals
    held: int = 0  # bytes of bodies that are here now
    running: int = 0  # requests that are here now

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one connection; see https://asgi.readthedocs.io."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = False, 500

        async def sent(message: Message) -> None:
            nonlocal began, status
            if message["type"] == "http.response.start":
                began, status = True, message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        self.running += 1
        ends = ExitStack()
        try:
            received = await self._admitted(scope, receive, ends)
            await self.app(scope, received, sent)
        except Exception as error:  # noqa: BLE001 - the process lives on, and the client is told
            if not isinstance(error, RefusalError):
                frames = traceback.extract_tb(error.__traceback__)[:-4:-1]
                places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
                _log.error("%s at %s", type(error).__name__, places)  # not its words, which may hold a text
            if not began:
                refusal = RefusalError.of(error)
                self.metrics.refusals.labels(refusal.code).inc()
                await JSONResponse(refusal.body(), refusal.status, refusal.headers)(scope, receive, sent)
        finally:
            ends.close()
            self.running -= 1
            self.metrics.requests.labels(getattr(scope.get("route"), "path", "other"), status).inc()

    async def _admitted(self, scope: Scope, receive: Any, ends: ExitStack) -> Any:
        """The request's body, to be received once more by the program inside."""
        headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
        self.access.require_host(headers.get("host", ""))
        if self.running > MOST_RUNNING and path not in OPEN:
            raise busy(503, f"{MOST_RUNNING} requests are here already")
        if self.access.tokens and path not in OPEN:
            header = headers.get("authorization", "")
            role = self.access.role(header)
            if role is None:
                message = "no token that is known: send Authorization: Bearer TOKEN"
                raise RefusalError(401, "no_token", message, headers={"WWW-Authenticate": "Bearer"})
            if role == "read":
                if method not in {"GET", "HEAD", "OPTIONS"} and path.startswith("/v1/tasks"):
                    raise RefusalError(403, "read_token", "this token only reads: take an admin's")
                scope[READER] = self.access.reader(header)
        allowed, limit = self.bodies(method, path)
        if not allowed:
            return receive
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in allowed:
            message = f"the body is no {' or '.join(allowed)}: say so in Content-Type"
            raise RefusalError(415, "content_type", message)
        body = ends.enter_context(SpooledTemporaryFile(IN_MEMORY))  # noqa: SIM115 - closes with ends
        await self._fill(body, Request(scope, receive), limit, ends)
        body.seek(0)
        scope[BODY] = body
        whole = [body]

        async def received() -> Message:
            if not whole:
                return await receive()  # type: ignore[no-any-return]
            return {"type": "http.request", "body": whole.pop().read(), "more_body": False}

        return received

    async def _fill(self, body: IO[bytes], request: Request, limit: int, ends: ExitStack) -> None:
        """Write what comes in, in a time that grows with it."""
        length = request.headers.get("content-length", "")
        long = RefusalError(413, "body_too_long", f"the body exceeds {limit} bytes: send less at a time")
        if length.isdecimal() and int(length[:18]) > limit:
            raise long
        began = asyncio.get_running_loop().time()
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS) as time:
                async for part in request.stream():
                    size += len(part)
                    self.held += len(part)
                    ends.callback(self._let_go, len(part))
                    if size > limit:
                        raise long
                    if size > SMALL and self.held > MOST_HELD:
                        raise busy(429, f"bodies of {MOST_HELD} bytes are here already")
                    body.write(part)
                    time.reschedule(began + BODY_SECONDS + size / BODY_RATE)
        except ClientDisconnect:
            raise RefusalError(400, "gone", "the client went away: send the whole body") from None
        except TimeoutError:
            allowed = f"{BODY_SECONDS:.0f} s, and one for each {BODY_RATE} bytes"
            message = f"the body did not come in time ({allowed}): send it faster"
            raise RefusalError(408, "slow_body", message) from None

    def _let_go(self, size: int) -> None:
        self.held -= size
