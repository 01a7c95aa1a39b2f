"""Request ids, the access log, event streams, and the client's connections."""

import asyncio
import logging
import re

import pytest

pytest.importorskip("fastapi")

from fitting import one_line
from i2cl.interfaces.server import guard
from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.client import AsyncClient, Client
from i2cl.interfaces.server.guard import Access, Policy
from i2cl.interfaces.server.refusals import RefusalError

from .test_app import CLASSIFY, CLASSIFY_BODY


def test_request_id_is_returned_and_logged(client, caplog):
    with caplog.at_level(logging.INFO, "i2cl.server.access"):
        reply = client.post(CLASSIFY, json=CLASSIFY_BODY, headers={"X-Request-Id": "order-7.b"})
    assert reply.headers["X-Request-Id"] == "order-7.b"
    assert re.search(r'"POST /v1/classify" 200 [\d.]+ ms id=order-7\.b', caplog.text)


@pytest.mark.parametrize("given", ["", "a b", "a\nb", "x" * 65, "ü", "id=1"])
def test_unsafe_request_id_is_replaced(client, given):
    reply = client.get("/healthz", headers={"X-Request-Id": given.encode()})
    assert re.fullmatch("[0-9a-f]{16}", reply.headers["X-Request-Id"])


def test_access_log_has_no_texts_and_no_line_breaks(client, caplog):
    with caplog.at_level(logging.INFO, "i2cl.server.access"):
        client.get("/v1/tasks/a%0Ab?text=secret")
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("access")]
    assert "GET /v1/tasks/a%0Ab" in line
    assert "secret" not in line


def test_requests_and_event_streams_are_bounded_separately(service, monkeypatch):
    monkeypatch.setattr(guard, "MAX_REQUESTS", 1)
    monkeypatch.setattr(guard, "MAX_STREAMS", 2)
    app = make_app(service, Access())

    def enter(policy):
        return app.admitted(policy, {"type": "http", "method": "GET", "headers": []}, None)

    async def open_streams():
        stream, request = Policy("read", stream=True), Policy("read")
        async with enter(stream), enter(stream), enter(request):
            for policy in (stream, request):
                with pytest.raises(RefusalError) as refused:
                    await enter(policy).__aenter__()
                assert refused.value.status == 503

    asyncio.run(open_streams())
    assert app.in_flight.total() == 0


def test_clients_close_their_connections():
    async def use():
        async with AsyncClient("http://127.0.0.1:1") as client:
            return client

    with Client("http://127.0.0.1:1") as client:
        pass
    for closed in (client._client, asyncio.run(use())):
        assert closed._http.is_closed
        assert closed._once.is_closed


def test_client_without_httpx_says_what_to_install(monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda _: None)
    one_line(r"the client needs the package httpx2: pip install 'i2cl\[serve\]'", Client, "http://127.0.0.1")


def test_both_clients_have_the_same_methods():
    def methods(kind):
        return {name for name in vars(kind) if not name.startswith("_")}

    assert methods(Client) - {"close"} == methods(AsyncClient) - {"aclose"}
