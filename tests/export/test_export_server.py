"""`i2cl verify --url` against a small completions server in a thread."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from commands import run
from fitting import one_line
from i2cl.export import Golden, ask_server


def by_text(golden, values):
    """OpenAI's and vLLM's shape."""
    texts = dict(zip(golden.label_texts, values, strict=True))
    return {"top_logprobs": [texts | {" other": -0.5, " rare": -20.0}]}


def by_id(golden, values):
    """llama.cpp's shape."""
    value = [{"id": i, "logprob": v} for i, v in zip(golden.label_ids, values, strict=True)]
    return {"content": [{"top_logprobs": [*value, {"id": -1, "logprob": -20.0}]}]}


def expected(golden, prompt):
    """The text of the label that a faithful server says."""
    place = golden.labels.index(prompt.prediction)
    return golden.words[place] if golden.sequences else golden.label_texts[place]


@contextmanager
def serving(golden, *, values=lambda prompt: prompt.labels, shape=by_text, takes=(list, str), **more):
    """Answers every golden prompt of the types it takes; yields the address and the requests that came.

    ``says`` is what it completes. ``echo`` answers requests that ask for the prompt's own tokens; nothing
    from it refuses them. ``status`` and ``raw`` are the code and, for anything asked, the bytes of a reply.
    """
    seen, raw, status, says = [], more.get("raw"), more.get("status", 200), more.get("says", expected)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send({"data": [{"id": "folded"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body | {"key": self.headers["Authorization"]})
            if not isinstance(body["prompt"], takes):
                self._send({"error": "Input should be another type"}, 422)
                return
            if body.get("echo"):
                reply = more["echo"](body)
                self._send(reply or {"error": "Only no echo is supported"}, status if reply else 400)
                return
            (prompt,) = [one for one in golden.prompts if body["prompt"] in (one.ids, one.query)]
            record = {"text": says(golden, prompt), "logprobs": shape(golden, values(prompt))}
            self._send({"choices": [record]})

        def _send(self, reply, code=status):
            content = raw if raw is not None else json.dumps(reply).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def golden(exported):
    return Golden.from_export(exported)


@pytest.mark.parametrize("shape", [by_text, by_id])
@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/completions"])
def test_a_faithful_server_passes(exported, golden, said, shape, end):
    with serving(golden, shape=shape) as (url, seen):
        assert "holds" in said("verify", exported, "--url", url + end)
    assert {body["model"] for body in seen} == {"folded"}
    assert all(body["max_tokens"] == 1 and body["temperature"] == 0 for body in seen)


def test_a_server_with_the_vllm_plugin_is_asked_under_a_task(exported, golden, monkeypatch):
    with serving(golden) as (url, seen):
        assert run("verify", exported, "--url", url) == 0
        assert all("vllm_xargs" not in body and body["key"] is None for body in seen)
        seen.clear()
        monkeypatch.setenv("VLLM_API_KEY", "mine")
        assert run("verify", exported, "--url", url, "--task", "mood") == 0
    assert seen
    assert all(body["vllm_xargs"] == {"i2cl": "mood"} and body["key"] == "Bearer mine" for body in seen)
    assert run("verify", exported, "--task", "mood") == 2


def test_a_label_prior_is_told_as_what_the_server_has_to_be_sent(exported, golden, said):
    prior = [0.25, *[0.0 for _ in golden.labels[1:]]]
    golden.model_copy(update={"label_bias": prior}).write(exported)
    with serving(golden) as (url, _):
        reason = said("verify", exported, "--url", url)
        record = json.loads(said("verify", exported, "--url", url, "--json"))
    # on top of what makes it say a label
    assert f'the server adds with "logit_bias": {{"{golden.label_ids[0]}": 100.0000' in reason
    sent = {str(token): 99.75 + more for token, more in zip(golden.label_ids, prior, strict=True)}
    assert record["logit_bias"] == sent


def test_a_server_without_token_ids_gets_text_or_is_quoted_if_it_takes_none(exported, golden, said, refused):
    with serving(golden, takes=str) as (url, seen):
        assert "holds" in said("verify", exported, "--url", url)
    twice = [prompt.query for prompt in golden.prompts for _ in ("log-probabilities", "greedily")]
    assert [body["prompt"] for body in seen[1:]] == twice
    with serving(golden, takes=dict) as (url, _):
        assert "completions answers 422" in refused("verify", exported, "--url", url)


@pytest.mark.parametrize("writers", ["attention", "mlp", "attention and mlp"])
def test_a_server_that_drops_biases_is_found_out(exported, golden, said, writers):
    with serving(golden, values=lambda prompt: prompt.dropped[writers]) as (url, seen):
        reason = said("verify", exported, "--url", url, "--model-name", "mine", code=1)
    assert f"as if the biases of {writers} were dropped." in reason
    assert {body["model"] for body in seen} == {"mine"}


def test_other_errors_are_not_blamed_on_biases_and_labels_may_be_left_untold(exported, golden, said, refused):
    with serving(golden, values=lambda prompt: [-30.0 for _ in prompt.labels]) as (url, _):
        assert json.loads(said("verify", exported, "--url", url, "--json", code=1))["dropped"] is None

    def reason(golden, values):
        best = max(values)
        return {"top_logprobs": [{golden.label_texts[values.index(best)]: best}]}

    with serving(golden, shape=reason) as (url, _):
        assert run("verify", exported, "--url", url) == 0
    with serving(golden, shape=lambda *_: {"top_logprobs": [{" other": -0.1}]}) as (url, _):
        assert "told no label's probability" in refused("verify", exported, "--url", url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"status": 404, "raw": b"no such model"}, r"answers 404 \(no such model\)"),
        ({"raw": b"<html>"}, "does not answer JSON"),
        ({"shape": lambda *_: None}, "tells no log-probabilities"),
        ({"shape": lambda *_: {"top_logprobs": [{}]}}, "tells no log-probabilities"),
        ({"shape": lambda *_: {"content": [{"top_logprobs": []}]}}, "tells no log-probabilities"),
        ({"raw": b"{}"}, "lists no model"),
    ],
)
def test_servers_that_cannot_be_asked(golden, arguments, message):
    with serving(golden, **arguments) as (url, _):
        one_line(message, ask_server, golden, url)


def test_no_server(golden):
    one_line("cannot reach", ask_server, golden, "http://127.0.0.1:9")
    one_line("no address", ask_server, golden, "file:///etc/hosts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--logprobs", "5"], "add --url"),
        (["--model-name", "x"], "add --url"),
        (["--url", "http://localhost:1", "--device", "cpu"], "leave out --url"),
        (["--url", "http://localhost:1", "--model", "base"], "leave out --url"),
    ],
)
def test_options_of_the_other_check_are_refused(exported, refused, options, message):
    assert message in refused("verify", exported, *options)
