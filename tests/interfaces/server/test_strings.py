"""Unusual strings and numbers in JSON, in chats, batch files and fits."""

import json

import pytest

from .conftest import LINES
from .test_jobs import wait_until_ended

CHAT, JSON = "/v1/chat/completions", {"Content-Type": "application/json"}
MESSAGES = json.dumps([{"role": "user", "content": "a good film"}])


def chat(client, fields):
    content = f'{{"model": "films", "messages": {MESSAGES}, {fields}}}'
    return client.post(CHAT, content=content, headers=JSON)


@pytest.mark.parametrize(("asked", "found"), [(0, 0), (1, 1), (20, 2)])
def test_chat_has_at_most_as_many_top_logprobs_as_labels(client, asked, found):
    reply = chat(client, f'"logprobs": true, "top_logprobs": {asked}')
    assert len(reply.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == found


@pytest.mark.parametrize("value", ["21", "1e5", "-1", "1.5", "true", '"5"', "NaN", "Infinity", "1e400"])
def test_chat_refuses_other_numbers_of_top_logprobs(client, value):
    reply = chat(client, f'"top_logprobs": {value}')
    assert reply.status_code == 422
    assert reply.json()["error"]["message"].startswith("top_logprobs is invalid, Input should be ")


@pytest.mark.parametrize("fields", ['"temperature": NaN', '"temperature": 1e400', '"logit_bias": {"5": NaN}'])
def test_chat_ignores_numbers_that_are_not_finite_in_ignored_fields(client, fields):
    assert chat(client, fields).status_code == 200


@pytest.mark.parametrize(
    "custom_id", ["\x00\x1b[31m\n\r", "a\u2028b\u2029c\x85d\x1cd", "\ufeff", "\U0001f600", 10**22]
)
def test_a_custom_id_returns_unchanged_on_a_line_of_its_own(client, service, custom_id):
    line = json.dumps({"input": "a good film", "custom_id": custom_id})
    job = client.post("/v1/batches?model=films", content=line, headers=LINES).json()["id"]
    wait_until_ended(service.jobs.get(job))
    (answer,) = client.get(f"/v1/batches/{job}").text.splitlines()
    assert json.loads(answer)["custom_id"] == custom_id


@pytest.mark.parametrize("custom_id", ['"\\ud83d"', '"\\udc00\\ud83d"', "1e400", "NaN", "true", "{}"])
def test_other_custom_ids_are_refused_naming_the_line(client, custom_id):
    line = f'{{"input": "a good film", "custom_id": {custom_id}}}'
    reply = client.post("/v1/batches?model=films", content=line, headers=LINES)
    assert reply.status_code == 422
    assert reply.json()["error"]["message"].startswith("line 1: ")


@pytest.mark.parametrize("name", ["a\x1b[31m.csv", "a\x00.csv", "a\nb.csv", "a\u2028.csv"])
def test_file_names_with_control_characters_are_refused(client, name):
    examples = {"name": name, "content": "text,label\na good film,good\na bad film,bad\n"}
    body = {"name": "n", "template": "{text}\nLabel:{label}", "examples": examples}
    reply = client.post("/v1/tasks", json=body)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 422
    assert "has control characters: rename it" in message
    assert message.isprintable()
