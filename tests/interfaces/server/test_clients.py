"""Clients: OpenAI's against a running server, with and without a token, and the retries of our own."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fitting import raises
from i2cl import Decoder, Injection, load_task
from i2cl.interfaces.server.client import Client, FitOptions, ServerError, _retry_after

from .conftest import make_injection
from .test_serve import serving

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from i2cl.interfaces.server.routes import schemas

TOKEN = "0123456789abcdefR"
TASK = load_task("mood-colour-1")
TEXTS = [row.text for row in TASK.test[:3]]


@pytest.fixture(scope="module", params=[None, TOKEN], ids=["open", "token"])
def served(request, tmp_path_factory):
    """URL and token of a server with a task, and the task's probabilities for the texts."""
    folder = tmp_path_factory.mktemp("served")
    decoder = Decoder.from_pretrained("reference")
    make_injection(decoder, 0).save_pretrained(folder / "films")
    right = Injection.from_pretrained(folder / "films").log_probs(decoder, TEXTS).softmax(-1).tolist()
    (folder / "tokens").write_text(f"read {TOKEN}\nadmin 0123456789abcdefA\n")
    options = ("--token-file", folder / "tokens") if request.param else ()
    with serving(folder / "tasks", *options) as url:
        Client(url, token="0123456789abcdefA").upload("a/films", folder / "films")
        yield url, request.param, right


def test_openai(served):
    openai = pytest.importorskip("openai", reason="needs openai")
    from math import exp

    url, token, right = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token or "none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["reference", "a/films"]
    assert client.models.retrieve("a/films").owned_by == "i2cl"
    assert client.models.retrieve("reference").id == "reference"
    best = [("positive", "negative")[one[1] > one[0]] for one in right]
    for text, label, probs in zip(TEXTS, best, right, strict=True):
        reply = client.chat.completions.create(
            model="a/films", messages=[{"role": "user", "content": text}], logprobs=True, top_logprobs=2
        )
        assert reply.choices[0].message.content == label
        value = {one.token: exp(one.logprob) for one in reply.choices[0].logprobs.content[0].top_logprobs}
        assert [value["positive"], value["negative"]] == pytest.approx(probs, abs=1e-5)
        assert reply.usage.prompt_tokens > 0
    for wrong, options in (
        (openai.BadRequestError, {"n": 2}),
        (openai.NotFoundError, {"model": "none"}),
        (openai.UnprocessableEntityError, {"messages": []}),
    ):
        request = {"model": "a/films", "messages": [{"role": "user", "content": TEXTS[0]}]}
        with pytest.raises(wrong):
            client.chat.completions.create(**request | options)
    if token:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()


def wrapped_chat(text):
    """Return a request as chat wrappers send it: with a system message, content parts and options."""
    content = [{"type": "text", "text": text}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return {"model": "a/films", "messages": messages, "temperature": 0, "max_completion_tokens": 5}


def test_openai_stream_gives_the_same_label(served):
    openai = pytest.importorskip("openai", reason="needs openai")
    url, token, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token or "none", max_retries=0)
    for text in TEXTS:
        whole = client.chat.completions.create(**wrapped_chat(text))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**wrapped_chat(text), **options))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage


def test_client_reports_an_invalid_url_or_folder(tmp_path):
    raises("begin it with http://", Client, "localhost:8000")
    client = Client("http://127.0.0.1:1")
    raises("texts is one string", client.classify, "films", "abc")
    raises("give a folder that `i2cl fit` wrote", client.upload, "films", tmp_path / "none")


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
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
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
    raises("no response from http://.*check that the server runs", client.tasks)


@pytest.mark.parametrize(("given", "seconds"), [("5", 5), ("3600", 60), ("Wed, 21 Oct 2026 07:28:00 GMT", 1)])
def test_retry_after_is_at_most_a_minute(given, seconds):
    assert _retry_after(given) == seconds


def test_client_declares_every_option_of_a_fit():
    own_arguments = {"name", "template", "examples", "check"}
    assert set(FitOptions.__annotations__) == set(schemas.Fit.model_fields) - own_arguments


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a.xlsx", ".xlsx files cannot be sent as text: save the file as CSV"),
        ("a.txt", "unknown file format '.txt': set format to one of csv, tsv, jsonl, json"),
    ],
)
def test_file_that_cannot_be_sent_as_text_is_refused(name, problem):
    with pytest.raises(ValueError, match=problem):
        schemas.DataFile.model_validate({"name": name, "content": "text,label\n"})
