"""What tests of the server share: a tiny model, injections made at random, a service, a client of its app."""

import io
import tarfile

import pytest

from fitting import ASKED, TASKS, random_injection
from i2cl.interfaces.server.refusals import RefusalError

TEXTS = ASKED
HOST = "http://127.0.0.1"
TAR, LINES = {"Content-Type": "application/x-tar"}, {"Content-Type": "application/jsonl"}


def made(decoder, number, **fields):
    """An injection as good as fitted: of one of three tasks, another for every number."""
    task = TASKS[number % len(TASKS)]
    if number % 4 == 1:
        fields |= {"label_bias": tuple(0.5 * place for place in range(len(task.labels)))}
    return random_injection(decoder, task, number, fields=fields)


def refusal(message, work, *given):
    """What a call is refused with, with this pattern in its words."""
    with pytest.raises(RefusalError, match=message or None) as refused:
        work(*given)
    return refused.value


@pytest.fixture
def opened(decoder, tmp_path):
    """Opens services of a folder, and closes them."""
    pytest.importorskip("prometheus_client")
    from i2cl.interfaces.server.service import Service

    services = []

    def open_one(folder=tmp_path / "tasks", **options):
        services.append(Service(decoder, folder, **options))
        return services[-1]

    yield open_one
    for service in services:
        service.close()


@pytest.fixture
def service(opened):
    """A service without tasks."""
    return opened()


@pytest.fixture
def asking():
    """Makes clients of a service's app, as `httpx` has them."""
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from i2cl.interfaces.server.app import make_app
    from i2cl.interfaces.server.guard import Access

    def make(service, access=None, **options):
        hosts = frozenset({"127.0.0.1", "localhost"})
        app = make_app(service, access or Access({}, hosts), **options)
        return TestClient(app, base_url=HOST, raise_server_exceptions=False)

    return make


@pytest.fixture
def client(service, asking):
    """One of a service that has a task."""
    service.tasks.put("films", made(service.decoder, 0))
    return asking(service)


def packed(folder):
    """A tar file of an artefact."""
    value = io.BytesIO()
    with tarfile.open(fileobj=value, mode="w") as tar:
        for name in ("injection.json", "injection.safetensors"):
            tar.add(folder / name, arcname=name)
    return value.getvalue()
