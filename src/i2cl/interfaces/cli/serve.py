"""`i2cl serve`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Exit, Option

from i2cl.errors import I2CLError, require_packages
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt
from i2cl.storage.layout import DESCRIPTION


@dataclass(frozen=True)
class AccessOptions:
    """Address, tokens and hosts."""

    PANEL: ClassVar[str] = "Access"

    host: str = opt("127.0.0.1", "Address to listen on.")
    port: int = opt(8000, "Port to listen on; 0 chooses a free one.", min=0, max=65535)
    token_file: Path | None = opt(
        None, "File of lines 'admin TOKEN' and 'read TOKEN'; required unless --host is a loopback address."
    )
    allowed_host: list[str] | None = opt(
        None, "Allowed Host header, repeatable; default: localhost on a loopback address, else any."
    )
    allow_origin: list[str] | None = opt(
        None, "Allowed CORS origin, such as https://example.org, repeatable."
    )
    read_only: bool = opt(False, "Do not fit, upload or delete tasks.", "--read-only")
    learned_only: bool = opt(
        False, "Refuse decisions that no task answers, instead of asking the base model.", "--learned-only"
    )
    page: bool = opt(True, "Serve a web page at /.", "--page/--no-page")
    access_log: bool = opt(True, "Log every request on stderr.", "--access-log/--no-access-log")


@dataclass(frozen=True)
class LimitOptions:
    """Limits of the queue and of the device."""

    PANEL: ClassVar[str] = "Limits"

    max_waiting_tokens: int | None = opt(
        None, "Maximum number of queued tokens; default: 16 full batches.", min=1
    )
    max_resident_tasks: int = opt(1000, "Maximum number of tasks on the model's device.", min=1)
    encoder: list[str] | None = opt(
        None,
        "Sentence encoder that tasks may use (`fit --experts`), repeatable; "
        "default: minilm, if it is available without a download.",
    )


@options.expanded
def serve(
    model: options.Model,
    *,
    tasks: Annotated[
        Path, Option(help="Folder of tasks (`i2cl fit ... -o FOLDER/NAME`); created if missing.")
    ],
    access: AccessOptions,
    limits: LimitOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Serve one model with thousands of tasks over HTTP, with a web page.

    SIGTERM shuts it down: running requests are finished, and jobs continue at the next start.
    """
    require_packages("i2cl serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    load.require_model(model)
    if (tasks / DESCRIPTION).is_file():
        raise I2CLError(f"--tasks {tasks} is a task: give the folder that holds it")
    from i2cl.interfaces.server.guard import Access, is_loopback, read_tokens

    host = access.host
    local = is_loopback(host)
    tokens = read_tokens(access.token_file) if access.token_file is not None else {}
    if not (local or tokens):
        hint = "give a --token-file, or listen on 127.0.0.1"
        raise I2CLError(f"--host {host} can be reached from other machines: {hint}")
    names = {"localhost", "127.0.0.1", "[::1]", host} if local else set()
    hosts = frozenset(name.lower() for name in (*(access.allowed_host or ()), *names))
    load.libraries()
    from i2cl.interfaces.server.app import make_app
    from i2cl.interfaces.server.process import listen, run_server
    from i2cl.interfaces.server.service import Service

    listener = listen(host, access.port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    decoder = load.decoder(model, load.with_default_dtype(loading))
    _log_to_stderr(access_log=access.access_log)
    with console.waiting(f"opening {tasks}"):
        service = Service(
            decoder,
            tasks,
            read_only=access.read_only,
            max_queued_tokens=limits.max_waiting_tokens,
            max_resident_tasks=limits.max_resident_tasks,
            encoders=limits.encoder,
            learned_only=access.learned_only,
        )
    app = make_app(service, Access(tokens, hosts), page=access.page, origins=access.allow_origin or ())

    def ready() -> None:
        count = len(service.tasks.entries())
        record = {"address": address, "model": model, "tasks": count}
        what = "1 task" if count == 1 else f"{count} tasks"
        console.answer(record, f"Serving {model} with {what} at {address}", as_json=json)

    if run_server(app, listener, ready, service.batcher.stop, lambda: service.batcher.failure is not None):
        raise Exit(1)


def _log_to_stderr(*, access_log: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("i2cl.server")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    logging.getLogger("i2cl.server.access").disabled = not access_log
