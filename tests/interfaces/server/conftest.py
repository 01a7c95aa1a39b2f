"""What tests of the server share: a tiny model, injections made at random, a service, a client of its app."""

import io
import tarfile
from dataclasses import replace

import pytest
import torch

from i2cl.core.context import ContextVector
from i2cl.core.injection import Injection
from i2cl.tasks import Task, Template

TASKS = (
    Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}")),
    Task("topics", ("world", "sports", "company"), Template("News: {text} ->{label}")),
    Task("flags", ("no", "yes"), Template("{text}?{label}")),
)
TEXTS = ("a warm film", "dull " * 7, "one of the best", "the match was lost", "warm", "a cold and long night")
HOST = "http://127.0.0.1"
TAR, LINES = {"Content-Type": "application/x-tar"}, {"Content-Type": "application/jsonl"}


def made(decoder, number, **fields):
    """An injection as good as fitted: of one of three tasks, another for every number."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(decoder.layers, 2, decoder.d_model, generator=generator)
    coefficients = torch.randn(decoder.layers, 2, 2, generator=generator) * 0.2 + torch.tensor([0.1, 1.0])
    task = TASKS[number % len(TASKS)]
    found = Injection(ContextVector(values, demonstrations=7), coefficients, task, decoder.base, **fields)
    if number % 4 == 1:
        return replace(found, label_bias=tuple(0.5 * place for place in range(len(task.labels))))
    return found


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


def packed(folder, names=("injection.json", "injection.safetensors")):
    """A tar file of an artefact."""

    told = io.BytesIO()
    with tarfile.open(fileobj=told, mode="w") as tar:
        for name in names:
            tar.add(folder / name, arcname=name)
    return told.getvalue()
