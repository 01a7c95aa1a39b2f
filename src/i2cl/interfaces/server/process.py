"""The process of `i2cl serve`: a socket, uvicorn on it, and an end that loses no answer."""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from i2cl.errors import I2CLError

DRAIN_SECONDS = 30  # for which what runs may still be answered after SIGTERM
BACKLOG = 2048  # connections that may wait to be taken
# For which a connection stays open that brings no whole header, or that takes nothing of its answer: longer
# than proxies and clients keep one.
IDLE_SECONDS = 75
MOST_CONNECTIONS = 800  # at once; of more, those go that were without a request for longest


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one. Raises I2CLError if that address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's delay of 40 ms off where it is told that this is TCP
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        cure = "choose another --host or --port"
        raise I2CLError(f"cannot listen on {host} port {port} ({error}): {cure}") from None
    return listener


def run_server(
    app: Any, listener: socket.socket, ready: Callable[[], None], ending: Callable[[], None]
) -> None:
    """Serve an ASGI program until SIGTERM or Ctrl-C; then take no new work, answer what runs, and return.
    ``ready`` is called when requests are taken, ``ending`` when the end begins.
    """
    config = uvicorn.Config(
        app,
        http="h11",  # whatever else is installed: `_Server.sweep` looks into it
        ws="none",
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    _Server(config, ready, ending).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends with exit code 0: uvicorn itself raises the signal that ended it once more."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready, self._ending = ready, ending
        self._seen: dict[Any, tuple[Any, int, float]] = {}

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C begin the end; a second one does not wait."""
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGINT, signal.SIGTERM)
        for number in wanted:
            loop.add_signal_handler(number, self._end, number)
        try:
            yield
        finally:
            for number in wanted:
                loop.remove_signal_handler(number)

    def _end(self, number: int) -> None:
        self._ending()
        self.handle_exit(number, None)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; True ends it."""
        self.sweep(time.monotonic())
        return await super().on_tick(counter)

    def sweep(self, now: float) -> None:
        """Close connections that have done nothing for too long, or that are too many.

        uvicorn has a time for those that had a request, and only until their next byte.
        """
        seen, still = {}, []
        connection: Any
        for connection in self.server_state.connections:
            cycle = connection.cycle  # of a request and its answer
            unsent = connection.transport.get_write_buffer_size()
            last, held, since = self._seen.get(connection, (None, -1, now))
            since = since if last is cycle and held == unsent else now
            seen[connection] = (cycle, unsent, since)
            if cycle is None or cycle.response_complete or unsent:
                still.append((since, connection.transport))
        self._seen = seen
        still.sort(key=lambda one: one[0])
        over = len(seen) - MOST_CONNECTIONS
        for place, (since, transport) in enumerate(still):
            if place < over or now - since > IDLE_SECONDS:
                transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._ready()
