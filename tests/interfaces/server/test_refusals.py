"""What the server refuses, in which words, and with which cure."""

import json
import re

import pytest

pytest.importorskip("fastapi")
from i2cl.interfaces.server.app import make_app
from i2cl.interfaces.server.guard import Access
from i2cl.interfaces.server.service import Service
from i2cl.models.decoder import Decoder
from tiny import tiny_model, tiny_tokenizer

from .conftest import HOST, made
from .test_app import CHAT, CLASSIFY, LINES, NAMED, ONE, SAID, TEXT, error_of


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """A client of one service for all that is refused, which leaves it as it was."""
    from starlette.testclient import TestClient

    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")
    service = Service(decoder, tmp_path_factory.mktemp("served") / "tasks")
    service.tasks.put("films", made(decoder, 0))
    yield TestClient(make_app(service, Access()), base_url=HOST, raise_server_exceptions=False)
    service.close()


REFUSED = [
    (CLASSIFY, {"model": "none", "input": TEXT}, 404, "unknown_task"),
    (CLASSIFY, {"model": "tiny-llama", "input": TEXT}, 400, "base_model"),
    (CLASSIFY, ONE | {"input": [TEXT, "  "]}, 422, "bad_input"),
    *((CLASSIFY, ONE | {"input": value}, 422, "bad_request") for value in ("", [], 3)),
    *((CLASSIFY, ONE | {"min_confidence": value}, 422, "bad_request") for value in (0, 1.5, "high")),
    *((CLASSIFY, body, 422, "bad_request") for body in (ONE | {"more": 1}, {"model": "films"})),
    (CLASSIFY, {"model": "films", "input": "long " * 3000}, 413, "text_too_long"),
    (CLASSIFY, {"model": "films", "input": ["so " * 100] * 500}, 413, "request_too_long"),
    (CLASSIFY, {"model": "films", "input": ["a"] * 2049}, 413, "too_many_texts"),
    ("/models/films", {"inputs": ["a"] * 2049}, 413, "too_many_texts"),
    ("/models/none", {"inputs": TEXT}, 404, "unknown_task"),
    ("/models/films", {"inputs": TEXT, "parameters": {"function_to_apply": "sigmoid"}}, 422, "bad_request"),
    (CHAT, {"model": "films", "messages": [], "stream": True}, 422, "bad_request"),
    *((CHAT, SAID | more, 400, "unsupported") for more in ({"n": 2}, {"tools": [{}]})),
    (CHAT, SAID | {"response_format": {"type": "json_object"}}, 400, "unsupported"),
    (CHAT, SAID | {"modalities": ["text", "audio"]}, 400, "unsupported"),
    (CHAT, SAID | {"messages": SAID["messages"] * 2}, 400, "unsupported"),
    (CHAT, SAID | {"messages": [{"role": "system", "content": "a"}]}, 400, "unsupported"),
    ("/v1/completions", {"model": "films", "prompt": TEXT}, 404, "not_found"),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_classified_is_told(refusing, path, body, status, code):
    assert error_of(refusing.post(path, json=body)) == (status, code)
    assert refusing.post(CLASSIFY, json=ONE).status_code == 200


def second(text, label="y"):
    """Two rows, of which the second is this one."""
    return {"examples": [{"text": "a", "label": "x"}, {"text": text, "label": label}]}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (second(" "), "item 2: the text is empty"),
        (second(3), "item 2: the text is 3, not"),
        ({"examples": [1]}, "1 is not an object: write one with 'text', 'label'$"),
        (second("\ud800"), "item 2: .* surrogate"),
        (second("b", None), "item 2: label None"),
        ({"labels": ["good", "bad"]}, "item 1: label 'x' is not one of good, bad"),
        ({"labels": ["x", "x"]}, "given twice"),
        ({"labels": ["x"]}, "at least two|not one of"),
        (second("b", "x"), r"every label is 'x'.*\(labels\)"),
        ({"examples": []}, "examples"),
        ({"template": "no field"}, r"\{text\} 0 times"),
        ({"name": " "}, "invalid task name"),
        ({"name": "a/../films"}, "invalid task name"),
        ({"name": "tiny-llama"}, "base model's name"),
        ({"settings": {"none": 1}}, "no chosen method has the option"),
        ({"method": "anchored", "recipe": "fast"}, "leave the recipe out"),
        ({"method": "svm"}, "method"),
        ({"chat": True}, "no chat template"),
        ({"more": 1}, "more"),
    ],
    ids=str,
)
def test_examples_that_make_no_task_are_refused_row_by_row(refusing, change, expected):
    body = json.dumps({**NAMED, **second("b"), "check": True, **change})
    reply = refusing.post("/v1/tasks", content=body, headers={"Content-Type": "application/json"})
    assert error_of(reply)[0] == 422, reply.text
    assert re.search(expected, reply.json()["error"]["message"]), reply.text


@pytest.mark.parametrize(
    ("query", "expected"),
    [({"shots": "9" * 5000}, "shots"), ({"shots": "x"}, "shots"), ({"check": "maybe"}, "check")],
    ids=["long", "word", "doubt"],
)
def test_a_query_that_cannot_be_read_is_refused(refusing, query, expected):
    headers, rows = {"Content-Type": "text/csv"}, "text,label\na,x\nb,y\n"
    reply = refusing.post("/v1/tasks", params=NAMED | query, content=rows, headers=headers)
    assert error_of(reply) == (422, "bad_request")
    assert expected in reply.json()["error"]["message"]


def test_a_body_that_is_no_json_is_told_with_its_place(refusing):
    reply = refusing.post(CLASSIFY, content='{"name": films}', headers={"Content-Type": "application/json"})
    assert error_of(reply) == (422, "bad_request")
    assert "not valid JSON (Expecting value, character 9)" in reply.json()["error"]["message"]


def test_a_blank_text_among_several_is_named_by_its_number(refusing):
    reply = refusing.post(CLASSIFY, json={"model": "films", "input": ["good", "\u200b", "bad", " "]})
    assert error_of(reply) == (422, "bad_input")
    message = reply.json()["error"]["message"]
    assert "2 of 4 texts cannot be classified: text 2 is empty" in message
    assert "text 4 is empty" in message


def test_a_line_of_an_unknown_task_is_named(refusing):
    lines = '{"input": "a"}\n{"input": "b", "model": "none"}\n'
    headers = {"Content-Type": "application/jsonl"}
    reply = refusing.post("/v1/batches", params={"model": "films"}, content=lines, headers=headers)
    assert error_of(reply) == (404, "unknown_task")
    assert reply.json()["error"]["message"].startswith("line 2: no task 'none' is here")


def test_texts_that_cannot_be_used_are_told_with_place_limit_and_cure(refusing):
    long, many = ({"model": "films", "input": texts} for texts in ([TEXT, "long " * 3000], ["a"] * 3000))
    outcome = refusing.post(CLASSIFY, json=long).json()["error"]
    assert re.match(
        r"text 2 takes \d+ tokens with its prompt, and \d+ fit .*: shorten it", outcome["message"]
    )
    assert outcome.keys() == {"message", "type", "code", "cure"}
    outcome = refusing.post(CLASSIFY, json=many).json()["error"]
    assert outcome["message"].startswith("the request has 3000 texts, and the limit is 2048: send fewer")
    described = refusing.get("/openapi.json").json()["components"]["schemas"]["Classify"]
    assert [one.get("maxItems") for one in described["properties"]["input"]["anyOf"]] == [None, 2048]
    for text in ("", 3, "\ud800"):
        body = json.dumps({"model": "films", "input": ["a", text]})
        reply = refusing.post(CLASSIFY, content=body, headers={"Content-Type": "application/json"})
        assert error_of(reply) == (422, "bad_request")
        assert reply.json()["error"]["message"].startswith("input.1 is invalid")


def test_ids_of_test_rows_begin_where_those_of_the_examples_do(refusing):
    rows = [{"text": f"film {at}", "label": str(at % 3 + 1)} for at in range(6)]
    labels = {"labels": ["good", "fair", "bad"], "template": "{text} {label}"}
    body = {"name": "new", "examples": rows, "test": [{"text": "a", "label": "3"}], **labels, "check": True}
    reply = refusing.post("/v1/tasks", json=body)
    assert reply.status_code == 200, reply.text


def test_rows_that_are_refused_are_all_named_and_a_table_without_its_columns_has_a_cure(refusing):
    rows = [*second("")["examples"], {"text": "b", "label": [1]}, {"label": "y"}]
    outcome = refusing.post("/v1/tasks", json={**NAMED, "examples": rows}).json()
    assert [re.search(r"item (\d)", row)[1] for row in outcome["error"]["rows"]] == ["2", "3", "4"]
    query = {"name": "new", "template": "{text} {label}"}
    reply = refusing.post("/v1/tasks", params=query, content="a,b\n", headers={"Content-Type": "text/csv"})
    assert reply.json()["error"]["cure"] == "set text_column to the one that holds it"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", "no lines"),
        ('{"input": ""}\n{"input": "\\u200b"}', "line 1: .*empty"),
        ('{"input": "a", "input": "b"}', "line 1: the key 'input' is given twice"),
        ('{"input": "a"}\n{"input": 1}', "line 2"),
        ('{"input": "a"}\n{', "line 2"),
        ('{"input": "a", "url": "x"}', "line 1"),
    ],
)
def test_files_that_cannot_be_classified_are_refused_line_by_line(refusing, body, expected):
    reply = refusing.post("/v1/batches?model=films", content=body, headers=LINES)
    assert error_of(reply)[0] == 422
    assert re.search(expected, reply.json()["error"]["message"])
    none = refusing.post("/v1/batches", content='{"input": "a"}', headers=LINES)
    assert re.search("no task is named", none.json()["error"]["message"])
