"""`i2cl serve`."""

from pathlib import Path
from typing import Annotated

import typer

from i2cl.errors import I2CLError, needs
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions

LIMITS = "Limits"
ACCESS = "Access"


@options.expanded
def serve(
    model: options.Model,
    *,
    tasks: Annotated[Path, typer.Option(help="Folder of tasks, made if it is not there.")],
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=ACCESS)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: any that is free.", rich_help_panel=ACCESS)
    ] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="Lines 'admin TOKEN' and 'read TOKEN'; needed unless only this machine can connect.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name that requests may be addressed to, repeatable; default: this machine's own on "
            "loopback, else any.",
            rich_help_panel=ACCESS,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Site whose pages may ask, such as https://example.org, repeatable.", rich_help_panel=ACCESS
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Fit, upload and remove nothing.", rich_help_panel=ACCESS)
    ] = False,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Show a page for people at /.", rich_help_panel=ACCESS)
    ] = True,
    max_waiting_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of requests that may wait; more are refused. Default: 16 full batches.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_resident_tasks: Annotated[
        int, typer.Option(min=1, help="Tasks on the model's device at once.", rich_help_panel=LIMITS)
    ] = 1000,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Serve one model with thousands of tasks over HTTP, with a page for people.

    SIGTERM ends it: what runs is answered, fits and files go on next time.
    """
    needs("i2cl serve", "serve", "fastapi", "uvicorn", "prometheus_client")
    from i2cl.interfaces.server.guard import Access, is_loopback, read_tokens

    own = is_loopback(host)
    tokens = read_tokens(token_file) if token_file is not None else {}
    if not (own or tokens):
        raise I2CLError(
            f"--host {host} can be reached from other machines: give a --token-file, or listen on 127.0.0.1"
        )
    names = {"localhost", "127.0.0.1", "[::1]", host} if own else set()
    hosts = frozenset(name.lower() for name in (*(allowed_host or ()), *names))
    load.libraries()
    from i2cl.interfaces.server.app import make_app
    from i2cl.interfaces.server.process import listen, run_server
    from i2cl.interfaces.server.service import Service

    listener = listen(host, port)
    at = listener.getsockname()[1]
    address = f"http://{f'[{host}]' if ':' in host else host}:{at}"
    decoder = load.decoder(model, loading)
    with console.waiting(f"opening {tasks}"):
        service = Service(
            decoder,
            tasks,
            read_only=read_only,
            most_waiting=max_waiting_tokens,
            most_resident=max_resident_tasks,
        )
    app = make_app(service, Access(tokens, hosts), page=page, origins=allow_origin or ())

    def ready() -> None:
        if json:
            console.print_json({"address": address, "model": model, "tasks": len(service.tasks.entries())})
        else:
            console.say(f"Serving {model} at {address}")

    run_server(app, listener, ready, service.stop)
