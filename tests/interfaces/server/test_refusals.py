"""Invalid requests: statuses, codes, messages and hints."""

import json
import re

import pytest

pytest.importorskip("fastapi")
from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.guard import Access
from i2cl.interfaces.server.service import Service
from i2cl.models.decoder import Decoder
from tiny import tiny_model, tiny_tokenizer

from .conftest import HOST, error_of, make_injection
from .test_app import CHAT, CHAT_BODY, CLASSIFY, CLASSIFY_BODY, FIT_BODY, LINES, TEXT


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Client of a service that all tests share: invalid requests do not change it."""
    from starlette.testclient import TestClient

    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")
    service = Service(decoder, tmp_path_factory.mktemp("served") / "tasks")
    service.tasks.put("films", make_injection(decoder, 0))
    yield TestClient(make_app(service, Access()), base_url=HOST, raise_server_exceptions=False)
    service.close()


PARTS = [
    {"type": "text", "text": TEXT},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
]
REFUSED = [
    (CLASSIFY, {"model": "none", "input": TEXT}, 404, "unknown_task"),
    (CLASSIFY, {"model": "tiny-llama", "input": TEXT}, 400, "base_model"),
    (CLASSIFY, CLASSIFY_BODY | {"input": [TEXT, "  "]}, 422, "bad_input"),
    *((CLASSIFY, CLASSIFY_BODY | {"input": value}, 422, "bad_request") for value in ("", [], 3)),
    *(
        (CLASSIFY, CLASSIFY_BODY | {"min_confidence": value}, 422, "bad_request")
        for value in (0, 1.5, "high")
    ),
    *((CLASSIFY, body, 422, "bad_request") for body in (CLASSIFY_BODY | {"more": 1}, {"model": "films"})),
    (CLASSIFY, {"model": "films", "input": "long " * 3000}, 413, "text_too_long"),
    (CLASSIFY, {"model": "films", "input": ["so " * 100] * 500}, 413, "request_too_long"),
    (CLASSIFY, {"model": "films", "input": ["a"] * 2049}, 413, "too_many_texts"),
    (CHAT, {"model": "films", "messages": [], "stream": True}, 422, "bad_request"),
    (CHAT, CHAT_BODY | {"messages": [{"role": "user", "content": PARTS}]}, 400, "unsupported"),
    *((CHAT, CHAT_BODY | {"top_logprobs": value}, 422, "bad_request") for value in (21, 1.5, True)),
    *((CHAT, CHAT_BODY | more, 400, "unsupported") for more in ({"n": 2}, {"tools": [{}]})),
    (CHAT, CHAT_BODY | {"response_format": {"type": "json_object"}}, 400, "unsupported"),
    (CHAT, CHAT_BODY | {"modalities": ["text", "audio"]}, 400, "unsupported"),
    (CHAT, CHAT_BODY | {"messages": CHAT_BODY["messages"] * 2}, 400, "unsupported"),
    (CHAT, CHAT_BODY | {"messages": [{"role": "system", "content": "a"}]}, 400, "unsupported"),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_requests_are_refused(client, path, body, status, code):
    assert error_of(client.post(path, json=body)) == (status, code)
    assert client.post(CLASSIFY, json=CLASSIFY_BODY).status_code == 200


@pytest.mark.parametrize("name", ["a\x1b[31m.csv", "a\u2028.csv"])
def test_file_names_with_control_characters_are_refused(client, name):
    examples = {"name": name, "content": "text,label\na good film,good\na bad film,bad\n"}
    reply = client.post("/v1/tasks", json=FIT_BODY | {"examples": examples})
    message = reply.json()["error"]["message"]
    assert (reply.status_code, message.isprintable()) == (422, True)
    assert "has control characters: rename it" in message


def second_row(text, label="y"):
    """Return two examples, the second of which is given."""
    return {"examples": [{"text": "a", "label": "x"}, {"text": text, "label": label}]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (second_row(" "), "item 2: the text is empty"),
        (second_row(3), "item 2: the text is 3, not"),
        ({"examples": [1]}, "1 is not an object: write one with 'text', 'label'$"),
        (second_row("\ud800"), "item 2: .* surrogate"),
        (second_row("b", None), "item 2: the label is empty"),
        ({"labels": ["good", "bad"]}, "item 1: label 'x' is not one of good, bad"),
        ({"labels": ["x", "x"]}, "given twice"),
        ({"labels": ["x"]}, "at least two|not one of"),
        (second_row("b", "x"), "every label is 'x'.*pass the label words$"),
        ({"examples": []}, "examples"),
        ({"template": "no field"}, r"it needs \{text\}"),
        ({"name": " "}, "invalid task name"),
        ({"name": "a/../films"}, "invalid task name"),
        ({"name": "tiny-llama"}, "name of the base model"),
        ({"settings": {"none": 1}}, "no chosen method has the option"),
        ({"method": "anchored", "recipe": "fast"}, "leave it out, or choose the method i2cl"),
        ({"experts": ["llm"], "settings": {"experts": "tfidf"}}, "experts is given twice"),
        ({"method": "svm"}, "method"),
        ({"chat": True}, "no chat template"),
        ({"more": 1}, "more"),
    ],
    ids=str,
)
def test_invalid_fit_requests_are_refused(client, change, expected):
    body = json.dumps({**FIT_BODY, **second_row("b"), "check": True, **change})
    reply = client.post("/v1/tasks", content=body, headers={"Content-Type": "application/json"})
    assert error_of(reply)[0] == 422, reply.text
    assert re.search(expected, reply.json()["error"]["message"]), reply.text


UNREADABLE = [
    (b"", "the body is empty", None),
    (b'{"model": "films"', "the body is not valid JSON", None),
    (b'{"model": "\xff"}', "the body is not valid UTF-8: encode it as UTF-8", None),
    (b'{"model": "films"}', "input is missing", "input"),
]


@pytest.mark.parametrize(("body", "message", "param"), UNREADABLE)
def test_unreadable_bodies_and_missing_fields_are_named(client, body, message, param):
    reply = client.post(CLASSIFY, content=body, headers={"Content-Type": "application/json"})
    assert reply.json()["error"]["message"].startswith(message)
    assert reply.json()["error"]["param"] == param


def test_invalid_json_is_reported_with_its_position(client):
    reply = client.post(CLASSIFY, content='{"name": films}', headers={"Content-Type": "application/json"})
    assert error_of(reply) == (422, "bad_request")
    assert "not valid JSON (Expecting value, character 9)" in reply.json()["error"]["message"]


def test_blank_text_is_named_by_its_number(client):
    reply = client.post(CLASSIFY, json={"model": "films", "input": ["good", "\u200b", "bad", " "]})
    assert error_of(reply) == (422, "bad_input")
    message = reply.json()["error"]["message"]
    assert "2 of 4 texts cannot be classified: text 2 is empty" in message
    assert "text 4 is empty" in message
    assert reply.json()["error"]["hint"] == "correct or remove them"


def test_batch_line_with_an_unknown_task_is_named(client):
    lines = '{"input": "a"}\n{"input": "b", "model": "none"}\n'
    headers = {"Content-Type": "application/jsonl"}
    reply = client.post("/v1/batches", params={"model": "films"}, content=lines, headers=headers)
    assert error_of(reply) == (404, "unknown_task")
    assert reply.json()["error"]["message"].startswith("line 2: there is no task 'none'")


def test_errors_of_texts_name_position_limit_and_hint(client):
    long, many = ({"model": "films", "input": texts} for texts in ([TEXT, "long " * 3000], ["a"] * 3000))
    outcome = client.post(CLASSIFY, json=long).json()["error"]
    assert re.match(
        r"text 2 takes [\d,]+ tokens with its prompt, and [\d,]+ fit .*: shorten it", outcome["message"]
    )
    assert outcome["hint"] == "shorten it"
    outcome = client.post(CLASSIFY, json=many).json()["error"]
    assert outcome["message"].startswith("the request has 3000 texts, but the limit is 2048: send fewer")
    described = client.get("/openapi.json").json()["components"]["schemas"]["Classify"]
    assert [one.get("maxItems") for one in described["properties"]["input"]["anyOf"]] == [None, 2048]
    for text in ("", 3, "\ud800"):
        body = json.dumps({"model": "films", "input": ["a", text]})
        reply = client.post(CLASSIFY, content=body, headers={"Content-Type": "application/json"})
        assert error_of(reply) == (422, "bad_request")
        assert reply.json()["error"]["message"].startswith("input.1 is invalid")


def test_class_ids_of_test_rows_start_like_the_examples(client):
    rows = [{"text": f"film {at}", "label": str(at % 3 + 1)} for at in range(6)]
    labels = {"labels": ["good", "fair", "bad"], "template": "{text} {label}"}
    body = {"name": "new", "examples": rows, "test": [{"text": "a", "label": "3"}], **labels, "check": True}
    reply = client.post("/v1/tasks", json=body)
    assert reply.status_code == 200, reply.text


def test_all_invalid_rows_are_listed(client):
    rows = [*second_row("")["examples"], {"text": "b", "label": [1]}, {"label": "y"}]
    outcome = client.post("/v1/tasks", json={**FIT_BODY, "examples": rows}).json()
    assert [re.search(r"item (\d)", row)[1] for row in outcome["error"]["rows"]] == ["2", "3", "4"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", "no lines"),
        ('{"input": ""}\n{"input": "\\u200b"}', "line 1: .*empty"),
        ('{"input": "a", "input": "b"}', "line 1: the key 'input' is given twice"),
        ('{"input": "a"}\n{"input": 1}', "line 2"),
        ('{"input": "a"}\n{', "line 2"),
        ('{"input": "a", "url": "x"}', "line 1"),
        ('{"input": "a", "custom_id": "\\ud83d"}', "line 1: "),
        ('{"input": "a", "custom_id": NaN}', "line 1: "),
        ('{"input": "a", "custom_id": true}', "line 1: "),
    ],
)
def test_invalid_batch_files_are_refused(client, body, expected):
    reply = client.post("/v1/batches?model=films", content=body, headers=LINES)
    assert error_of(reply)[0] == 422
    assert re.search(expected, reply.json()["error"]["message"])
    none = client.post("/v1/batches", content='{"input": "a"}', headers=LINES)
    assert re.search("no task is named", none.json()["error"]["message"])
