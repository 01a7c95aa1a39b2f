"""The process of `i2cl serve`: a listening socket, uvicorn, and a graceful shutdown."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from i2cl.errors import I2CLError

DRAIN_SECONDS = 30  # time limit for running requests after SIGTERM
BACKLOG = 2048  # connections that may wait to be accepted
IDLE_SECONDS = 75  # before an idle connection is closed; longer than the timeouts of proxies and clients
MAX_CONNECTIONS = 800  # open connections; requests on others are answered with a 503

_log = logging.getLogger("i2cl.server")


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 chooses a free one. Raises I2CLError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio only disables Nagle's algorithm (40 ms) if the protocol is given
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        hint = "choose another --host or --port"
        raise I2CLError(f"cannot listen on {host} port {port} ({error}): {hint}") from None
    return listener


def run_server(
    app: Any,
    listener: socket.socket,
    ready: Callable[[], None],
    ending: Callable[[], None],
    failed: Callable[[], bool] = lambda: False,
) -> bool:
    """Serve an ASGI application until SIGTERM or Ctrl-C, then finish running requests and return.

    Args:
        app: the application.
        listener: a listening socket.
        ready: called once requests are accepted.
        ending: called when the shutdown begins.
        failed: polled several times a second; True shuts the server down as well.

    Returns:
        Whether the server ended because it had failed; the process should then exit with an error.
    """

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Shut down on SIGTERM or Ctrl-C; the second one does not wait for running requests.

            Unlike uvicorn's own, it does not raise the signal again after the shutdown.
            """
            loop = asyncio.get_running_loop()
            signals = (signal.SIGINT, signal.SIGTERM)
            for number in signals:
                loop.add_signal_handler(number, self.shut_down, number)
            try:
                yield
            finally:
                for number in signals:
                    loop.remove_signal_handler(number)

        def shut_down(self, number: int) -> None:
            ending()
            self.handle_exit(number, None)

        async def on_tick(self, counter: int) -> bool:
            if failed() and not self.should_exit:
                _log.critical("shutting down because the model thread has died: restart the server")
                self.should_exit = True
            return await super().on_tick(counter)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if self.started:
                ready()

    config = uvicorn.Config(
        app,
        ws="none",
        log_level="error",
        access_log=False,  # `Guard` has its own
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )
    Server(config).run(sockets=[listener])
    return failed()
