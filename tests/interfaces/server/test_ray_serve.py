"""Replicas without Ray, and retries of the client. `scripts/fuzz_ray.py` kills one of two replicas."""

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("fastapi")

from starlette.requests import Request
from starlette.testclient import TestClient

from fitting import one_line
from i2cl.interfaces.server.client import Client, ServerError, _retry_after
from i2cl.interfaces.server.ray_serve import Replica

from .conftest import HOST, TEXTS, make_injection


@pytest.fixture
def replica(service, monkeypatch, tmp_path):
    """A replica of a folder that a service has written."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    monkeypatch.setattr("i2cl.models.decoder.Decoder.from_pretrained", lambda *_, **__: service.decoder)
    return Replica("tiny-llama", str(tmp_path / "tasks"), {})


def test_replica_answers_like_the_server(replica, service, make_client):
    async def app(scope, receive, send):  # as Ray does: call the replica and send its response
        await (await replica(Request(scope, receive)))(scope, receive, send)

    plain, ray = make_client(service), TestClient(app, base_url=HOST)
    for path, body, status in (
        ("/v1/classify", {"model": "films", "input": list(TEXTS)}, 200),
        ("/v1/classify", {"model": "none", "input": "a"}, 404),
        ("/v1/tasks", {"name": "new"}, 403),
    ):
        result = ray.post(path, json=body)
        assert result.status_code == status
        if status == 200:
            right = plain.post(path, json=body)
            assert result.headers["x-i2cl-digest"] == right.headers["x-i2cl-digest"]
            assert result.json()["data"] == right.json()["data"]


def test_replica_checks_tokens(replica, service, tmp_path):
    file = tmp_path / "tokens"
    file.write_text("read 0123456789abcdefR\n")
    client = TestClient(Replica("tiny-llama", str(tmp_path / "tasks"), {}, str(file))._app, base_url=HOST)
    body = {"model": "films", "input": "a"}
    assert client.post("/v1/classify", json=body).status_code == 401
    header = {"Authorization": "Bearer 0123456789abcdefR"}
    assert client.post("/v1/classify", json=body, headers=header).status_code == 200
    file.write_text("none")
    one_line("--token-file", Replica, "tiny-llama", str(tmp_path / "tasks"), {}, str(file))


def test_replica_answers_a_handle_and_reports_its_health(replica):
    result = asyncio.run(replica.classify("films", list(TEXTS)))
    assert (result["labels"], len(result["probabilities"])) == (["positive", "negative"], len(TEXTS))
    one_line("there is no task 'none'", asyncio.run, replica.classify("none", ["a"]))
    asyncio.run(replica.classify("films", list(TEXTS), timeout=float("inf")))
    assert replica._service.batcher.waiting == 0  # a request without a deadline is counted as well
    replica.check_health()
    replica._service.close()
    with pytest.raises(RuntimeError, match="model thread has ended"):
        replica.check_health()


def test_ray_serve_can_be_imported_without_the_server_extra():
    """In a new interpreter without these modules."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'prometheus_client', 'starlette']))\n"
        "from i2cl.interfaces.server import ray_serve"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.fixture
def proxy():
    """URL of a fake proxy, its responses to come (status 0 drops the connection), and the paths requested."""
    responses, requests = [], []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = responses.pop(0)
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/json")
                self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(body)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", responses, requests
        server.shutdown()


def test_client_retries_errors_of_a_proxy(proxy):
    url, expected, _ = proxy
    expected += [(500, b"Internal Server Error"), (502, b"<html>"), (200, b'{"data": [{"id": "films"}]}')]
    expected += [(500, b'{"error": {"code": "internal", "message": "the server failed: please report it"}}')]
    expected += [(504, b"<html>")]
    client = Client(url)
    assert client.tasks() == [{"id": "films"}]
    with pytest.raises(ServerError, match="please report it"):
        client.tasks()
    with pytest.raises(ServerError, match="status 504"):  # once: the fit may have begun
        client.fit("films", [{"text": "a", "label": "b"}], "{text} {label}")
    assert not expected


def test_lost_connection_does_not_start_a_fit_twice(proxy):
    url, expected, requests = proxy
    expected += [(0, b"")] * 3
    client = Client(url, retries=1)
    with pytest.raises(ServerError, match="and whether the request took effect"):
        client.fit("films", [{"text": "a", "label": "b"}], "{text} {label}")
    with pytest.raises(ServerError, match=r"check that the server runs$"):
        client.classify("films", ["a"])
    assert requests == ["/v1/tasks", "/v1/classify", "/v1/classify"]
    client = Client("http://[fe80::beef]", retries=0)
    one_line("no response from http://.*check that the server runs", client.tasks)


@pytest.mark.parametrize(("given", "seconds"), [("5", 5), ("3600", 60), ("Wed, 21 Oct 2026 07:28:00 GMT", 1)])
def test_retry_after_is_at_most_a_minute(given, seconds):
    assert _retry_after(given) == seconds
