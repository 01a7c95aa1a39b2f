"""`i2cl serve`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from i2cl.errors import I2CLError, needs
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt


@dataclass(frozen=True)
class AccessOptions:
    """Where the server listens, and who may do what."""

    PANEL: ClassVar[str] = "Access"

    host: str = opt("127.0.0.1", "Address to listen on.")
    port: int = opt(8000, "0: any that is free.", min=0, max=65535)
    token_file: Path | None = opt(
        None, "Lines 'admin TOKEN' and 'read TOKEN'; needed unless only this machine can connect."
    )
    allowed_host: list[str] | None = opt(
        None,
        "Name that requests may be addressed to, repeatable; default: this machine's own on "
        "loopback, else any.",
    )
    allow_origin: list[str] | None = opt(
        None, "Site whose pages may ask, such as https://example.org, repeatable."
    )
    read_only: bool = opt(False, "Fit, upload and remove nothing.", "--read-only")
    page: bool = opt(True, "Show a page for people at /.", "--page/--no-page")


@dataclass(frozen=True)
class LimitOptions:
    """What may wait, and what may be loaded."""

    PANEL: ClassVar[str] = "Limits"

    max_waiting_tokens: int | None = opt(
        None, "Tokens of requests that may wait; more are refused. Default: 16 full batches.", min=1
    )
    max_resident_tasks: int = opt(1000, "Tasks on the model's device at once.", min=1)
    encoder: list[str] | None = opt(
        None,
        "Sentence encoder that tasks may take (`fit --method anchored+sentence_embeddings`), repeatable; "
        "default: minilm or its hub id, where it is here without a download.",
    )


@options.expanded
def serve(
    model: options.Model,
    *,
    tasks: Annotated[Path, Option(help="Folder of tasks, made if it is not there.")],
    access: AccessOptions,
    limits: LimitOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Serve one model with thousands of tasks over HTTP, with a page for people.

    SIGTERM ends it: what runs is answered, fits and files go on next time.
    """
    needs("i2cl serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    load.require_model(model)
    from i2cl.interfaces.server.guard import Access, is_loopback, read_tokens

    host = access.host
    local = is_loopback(host)
    tokens = read_tokens(access.token_file) if access.token_file is not None else {}
    if not (local or tokens):
        cure = "give a --token-file, or listen on 127.0.0.1"
        raise I2CLError(f"--host {host} can be reached from other machines: {cure}")
    names = {"localhost", "127.0.0.1", "[::1]", host} if local else set()
    hosts = frozenset(name.lower() for name in (*(access.allowed_host or ()), *names))
    load.libraries()
    from i2cl.interfaces.server.app import make_app
    from i2cl.interfaces.server.process import listen, run_server
    from i2cl.interfaces.server.service import Service

    listener = listen(host, access.port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    decoder = load.decoder(model, loading)
    with console.waiting(f"opening {tasks}"):
        service = Service(
            decoder,
            tasks,
            read_only=access.read_only,
            most_waiting=limits.max_waiting_tokens,
            most_resident=limits.max_resident_tasks,
            encoders=limits.encoder,
        )
    app = make_app(service, Access(tokens, hosts), page=access.page, origins=access.allow_origin or ())

    def ready() -> None:
        record = {"address": address, "model": model, "tasks": len(service.tasks.entries())}
        console.answer(record, f"Serving {model} at {address}", as_json=json)

    run_server(app, listener, ready, service.batcher.stop)
