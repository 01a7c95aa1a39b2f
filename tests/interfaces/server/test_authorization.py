"""Authorization and body limits, wherever the application is mounted."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.guard import Access, Guard

from .conftest import CLASSIFY_SCOPE, HOST, LINES, TAR, make_injection

ADMIN, READ = "admin-0123456789abc", "read-0123456789abcd"
ACCESS = Access({ADMIN: "admin", READ: "read"})


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def plain(app):
    return TestClient(app, base_url=HOST, raise_server_exceptions=False)


def under_root_path(app):
    """The way of a proxy that keeps the prefix, and of `uvicorn --root-path`."""
    return TestClient(app, base_url=f"{HOST}/x", root_path="/x", raise_server_exceptions=False)


def mounted(app):
    outer = Starlette(routes=[Mount("/x", app=app)])
    return TestClient(outer, base_url=f"{HOST}/x", raise_server_exceptions=False)


def mounted_twice(app):
    outer = Starlette(routes=[Mount("/v1/tasks", routes=[Mount("/y", app=app)])])
    return TestClient(outer, base_url=f"{HOST}/v1/tasks/y", raise_server_exceptions=False)


WAYS = {"params": [plain, under_root_path, mounted, mounted_twice], "ids": lambda make: make.__name__}


@pytest.fixture(**WAYS)
def client(request, service):
    service.tasks.put("films", make_injection(service.decoder, 0))
    return request.param(make_app(service, ACCESS))


@pytest.fixture(scope="module")
def shared_app(shared_service):
    return make_app(shared_service, ACCESS)


@pytest.fixture(**WAYS)
def shared_client(request, shared_app):
    return request.param(shared_app)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("DELETE", "v1/tasks/films", {}),
        ("PUT", "v1/tasks/films", TAR),
        ("POST", "v1/tasks", {"Content-Type": "application/json"}),
    ],
)
def test_read_token_cannot_change_tasks(shared_client, shared_service, method, path, headers):
    reply = shared_client.request(method, path, content=b"{}", headers=bearer(READ) | headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "read_token")
    assert [entry.name for entry in shared_service.tasks.entries()] == ["films"]


def test_admin_token_can_delete_a_task(client, service):
    assert client.delete("v1/tasks/films", headers=bearer(ADMIN)).status_code == 200
    assert service.tasks.entries() == []


def test_every_route_but_the_public_ones_needs_a_token(shared_client):
    public = {"/health", "/healthz", "/readyz"}
    described = shared_client.get("openapi.json").json()["paths"]
    assert described.keys() >= public
    for path, methods in described.items():
        for method in methods:
            reply = shared_client.request(
                method, path[1:].replace("{name}", "films").replace("{identity}", "job")
            )
            assert reply.status_code == (200 if path in public else 401), (method, path)


def test_body_limit_applies(shared_client):
    body = b'{"model": "films", "input": "' + b"a" * 9_000_000 + b'"}'
    headers = bearer(READ) | {"Content-Type": "application/json"}
    reply = shared_client.post("v1/classify", content=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_long")


def test_unauthorized_body_is_not_read(service):
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    asyncio.run(make_app(service, ACCESS)(CLASSIFY_SCOPE.copy(), receive, send))
    assert sent[0]["status"] == 401


def test_location_of_a_job_includes_the_prefix(shared_client):
    reply = shared_client.post(
        "v1/batches?model=films", content=b'{"input": "a"}', headers=bearer(READ) | LINES
    )
    prefix = shared_client.base_url.path.rstrip("/")
    assert reply.headers["Location"] == f"{prefix}/v1/jobs/{reply.json()['id']}"


def test_route_without_a_policy_needs_an_admin_token(service):
    guarded = make_app(service, ACCESS)
    assert isinstance(guarded, Guard)

    @guarded.app.get("/new")
    def new():
        return {}

    client = plain(guarded)
    assert client.get("/new", headers=bearer(READ)).status_code == 403
    assert client.get("/new", headers=bearer(ADMIN)).status_code == 200
