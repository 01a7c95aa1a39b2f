"""`i2cl verify --url` against a small server in a thread that answers as vLLM's classification API."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from commands import run
from export.cases import drawn
from fitting import raises
from i2cl.export import Golden, export_classifier, verify_server


@contextmanager
def serving(probabilities, *, raw=None, status=200, listed="folded"):
    """Answer every request with these probabilities; yields the URL and the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send({"data": [{"id": listed}] if listed else []}, 200)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(body | {"path": self.path, "key": self.headers["Authorization"]})
            data = [{"index": row, "probs": probs} for row, probs in enumerate(probabilities)]
            self.send({"data": data[::-1]}, status)

        def send(self, reply, code):
            content = raw if raw is not None else json.dumps(reply).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def classifier(tmp_path):
    export_classifier(*drawn("llama"), tmp_path / "classifier")
    return tmp_path / "classifier"


@pytest.fixture
def golden(classifier):
    return Golden.from_export(classifier)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/classify"])
def test_a_server_with_the_same_answers_passes(classifier, golden, stdout, end):
    with serving(golden.probabilities) as (url, requests):
        assert "Passed: 2 of 2 labels" in stdout("verify", classifier, "--url", url + end)
    (request,) = requests
    assert (request["path"], request["model"], request["input"]) == ("/classify", "folded", golden.texts)


def test_a_server_with_other_answers_fails(classifier, golden, stdout):
    with serving([probs[::-1] for probs in golden.probabilities]) as (url, _):
        assert "Failed: 0 of 2 labels" in stdout("verify", classifier, "--url", url, code=1)


def test_a_task_of_the_vllm_plugin_is_asked_by_its_name(exported, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "mine")
    with serving(Golden.from_export(exported).probabilities) as (url, requests):
        assert run("verify", exported, "--url", url, "--task", "mood") == 0
    (request,) = requests
    assert (request["path"], request["model"]) == ("/v1/i2cl/classify", "mood")
    assert request["key"] == "Bearer mine"


def test_a_language_model_on_a_server_is_refused(exported, refused):
    message = refused("verify", exported, "--url", "http://127.0.0.1:9")
    assert "export with --to classifier, or name a task" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"status": 404, "raw": b"no such model"}, r"answers 404 \(no such model\)"),
        ({"raw": b"<html>"}, "does not return JSON"),
        ({"probabilities": [[]]}, "does it run another model"),
        ({"probabilities": [None, None]}, "returns no probabilities"),
        ({"listed": None}, "returns no probabilities"),
    ],
)
def test_servers_that_do_not_classify_are_refused(golden, arguments, message):
    name = None if "listed" in arguments else "folded"
    with serving(**({"probabilities": golden.probabilities} | arguments)) as (url, _):
        raises(message, verify_server, golden, url, model=name)


def test_no_server_is_one_line(golden):
    raises("cannot reach", verify_server, golden, "http://127.0.0.1:9")
    raises("not a server's URL", verify_server, golden, "file:///etc/hosts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "mood"], "add --url"),
        (["--model-name", "x"], "add --url"),
        (["--url", "http://localhost:1", "--device", "cpu"], "leave out --url"),
        (["--url", "http://localhost:1", "--model", "base"], "leave out --url"),
    ],
)
def test_options_of_the_other_check_are_refused(exported, refused, options, message):
    assert message in refused("verify", exported, *options)
