"""Fixtures of the server's tests: random injections, services of a tiny model, and HTTP clients."""

import io
import tarfile

import pytest

from fitting import ASKED, TASKS, random_injection
from i2cl import Decoder
from i2cl.interfaces.server.refusals import RefusalError
from tiny import tiny_model, tiny_tokenizer

TEXTS = ASKED
HOST = "http://127.0.0.1"
CLASSIFY_SCOPE = {
    "type": "http",
    "method": "POST",
    "path": "/v1/classify",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}
TAR, LINES = {"Content-Type": "application/x-tar"}, {"Content-Type": "application/jsonl"}


def make_injection(decoder, number, **fields):
    """Return a random injection of one of three tasks, a different one for each number."""
    task = TASKS[number % len(TASKS)]
    if number % 4 == 1:
        fields |= {"bias": tuple(0.5 * place for place in range(len(task.labels)))}
    return random_injection(decoder, task, number, fields=fields)


def catch_refusal(message, function, *args):
    """Return the RefusalError that a call raises; ``message``: pattern of its text."""
    with pytest.raises(RefusalError, match=message or None) as caught:
        function(*args)
    return caught.value


def error_of(reply):
    """Return status and code of an error response, after checks of its message."""
    outcome = reply.json()["error"]
    assert outcome["message"]
    assert outcome["hint"] is None or outcome["message"].endswith(outcome["hint"])
    assert "Traceback" not in reply.text
    assert "site-packages" not in reply.text
    return reply.status_code, outcome["code"]


@pytest.fixture
def open_service(decoder, tmp_path):
    """Function that opens a service of a folder. Services are closed after the test."""
    pytest.importorskip("prometheus_client")
    from i2cl.interfaces.server.service import Service

    services = []

    def open_folder(folder=tmp_path / "tasks", **options):
        services.append(Service(decoder, folder, **options))
        return services[-1]

    yield open_folder
    for service in services:
        service.close()


@pytest.fixture
def service(open_service):
    """A service without tasks."""
    return open_service()


def client_of(service, access=None, **options):
    """Return an HTTP client of a service's application."""
    from starlette.testclient import TestClient

    from i2cl.interfaces.server.app import make_app
    from i2cl.interfaces.server.guard import Access

    hosts = frozenset({"127.0.0.1", "localhost"})
    app = make_app(service, access or Access({}, hosts), **options)
    return TestClient(app, base_url=HOST, raise_server_exceptions=False)


@pytest.fixture
def make_client():
    """Function that makes an HTTP client of a service's application."""
    pytest.importorskip("fastapi")
    return client_of


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory):
    """A service with a task, for all tests of a module that do not change its tasks."""
    pytest.importorskip("prometheus_client")
    from i2cl.interfaces.server.service import Service

    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")
    service = Service(decoder, tmp_path_factory.mktemp("served") / "tasks")
    service.tasks.put("films", make_injection(decoder, 0))
    yield service
    service.close()


@pytest.fixture(scope="module")
def shared_client(shared_service):
    """HTTP client of the shared service: making an application takes a quarter of a second."""
    pytest.importorskip("fastapi")
    return client_of(shared_service)


@pytest.fixture
def client(service, make_client):
    """HTTP client of a service with a task."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    return make_client(service)


def tar_of(folder):
    """Return the files of an artefact as a tar file."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("injection.json", "injection.safetensors"):
            tar.add(folder / name, arcname=name)
    return archive.getvalue()
