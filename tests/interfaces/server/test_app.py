"""Every address: what it answers, and everything that it refuses."""

import asyncio
import json
import math
import re
import threading
import time
from unittest.mock import AsyncMock

import pytest
import torch

pytest.importorskip("fastapi")

from fitting import one_line
from i2cl.interfaces.server.guard import Access, read_tokens
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.refusals import MAX_SEARCHED, RefusalError
from i2cl.interfaces.server.routes import management
from i2cl.interfaces.server.service import Service

from .conftest import LINES, TAR, TEXTS, made, packed
from .test_jobs import ended, examples

TEXT = TEXTS[0]
NAMED = {"name": "new", "template": "Review: {text}\nSentiment: {label}"}


def error_of(reply):
    outcome = reply.json()["error"]
    assert outcome["message"], outcome["cure"]
    assert "Traceback" not in reply.text
    assert "site-packages" not in reply.text
    return reply.status_code, outcome["code"]


def test_texts_are_classified_in_every_shape(client, service):
    injection = made(service.decoder, 0)
    right = injection.scores(service.decoder, list(TEXTS)).softmax(-1)
    entry = service.tasks.entry("films")
    reply = client.post("/v1/classify", json={"model": "films", "input": list(TEXTS)})
    outcome = reply.json()
    assert (reply.status_code, reply.headers["X-I2CL-Digest"]) == (200, entry.digest)
    assert outcome.keys() == {"id", "object", "created", "model", "labels", "data", "usage"}
    assert (outcome["object"], outcome["labels"]) == ("list", list(entry.labels))
    probabilities = torch.tensor([one["probs"] for one in outcome["data"]])
    torch.testing.assert_close(probabilities, right, rtol=0, atol=1e-5)
    assert [one["label"] for one in outcome["data"]] == injection.predict(service.decoder, list(TEXTS))
    assert [one["index"] for one in outcome["data"]] == [*range(len(TEXTS))]
    assert {one["num_classes"] for one in outcome["data"]} == {2}
    unsure = client.post("/v1/classify", json={"model": "films", "input": list(TEXTS), "min_confidence": 1})
    assert unsure.json()["data"] == [one | {"label": ""} for one in outcome["data"]]
    alone = client.post("/v1/classify", json={"model": "films", "input": TEXT}).json()
    best = alone["data"][0]["label"]
    ((first, second),) = client.post("/models/films", json={"inputs": TEXT}).json()
    assert (first["label"], first["score"] + second["score"]) == (best, pytest.approx(1))
    assert first["score"] > second["score"]
    top = {"inputs": list(TEXTS), "parameters": {"top_k": 1, "function_to_apply": "softmax"}}
    assert [len(one) for one in client.post("/models/films", json=top).json()] == [1] * len(TEXTS)


def test_tasks_come_from_examples_and_artefacts_and_go(client, service, task, tmp_path):
    rows = json.loads(examples(task))
    fit = {**NAMED, "examples": rows[:12], "settings": {"steps": 0}, "evaluate": 0, "shots": 1}
    outcome = client.post("/v1/tasks", json={**fit, "check": True}).json()
    assert (outcome["rows"], outcome["labels"]) == (12, sorted(task.labels))
    assert (outcome["data"]["rows"], sum(outcome["data"]["labels"].values())) == (12, 12)
    assert 0 < outcome["data"]["longest_tokens"] < outcome["data"]["most_tokens"]
    reply = client.post("/v1/tasks", json=fit)
    assert (reply.status_code, reply.json()["status"]) == (202, "queued")
    ended(service.jobs.get(reply.json()["id"]))
    with client.stream("GET", reply.headers["Location"] + "/events") as stream:
        events = re.findall(r"^event: (\w+)$", stream.read().decode(), re.MULTILINE)
    assert (events[0], events[-1]) == ("queued", "done")
    assert client.get(reply.headers["Location"]).json()["status"] == "done"
    (listed,) = client.get("/v1/jobs").json()["data"]
    assert (listed["name"], listed["status"], "last" in listed) == ("new", "done", False)
    csv = "text,label\n" + "\n".join(f"{row['text']},{row['label']}" for row in rows[:12])
    query = {"name": "csv", "template": "{text}\\n{label}", "labels": "positive,negative", "check": "true"}
    reply = client.post("/v1/tasks", params=query, content=csv, headers={"Content-Type": "text/csv"})
    assert reply.json()["labels"] == ["positive", "negative"]
    made(service.decoder, 1).save_pretrained(tmp_path / "topics")
    name = "<img src=x onerror=alert(1)>/x"
    put = client.put(f"/v1/tasks/{name}", content=packed(tmp_path / "topics"), headers=TAR)
    assert (put.status_code, put.json()["id"]) == (200, name)
    listed = [one["id"] for one in client.get("/v1/models").json()["data"]]
    assert listed == [service.decoder.name, *sorted([name, "films", "new"])]
    assert client.get("/v1/models/films").json()["labels"] == ["positive", "negative"]
    assert client.get(f"/v1/models/{service.decoder.name}").json()["id"] == service.decoder.name
    assert [one["id"] for one in client.get("/v1/tasks").json()["data"]] == listed[1:]
    described = client.get(f"/v1/tasks/{name}").json()
    assert described["labels"] == ["world", "sports", "company"]
    assert client.delete(f"/v1/tasks/{name}").json()["deleted"]
    assert error_of(client.get(f"/v1/tasks/{name}")) == (404, "unknown_task")


def test_a_job_that_waits_shows_that_the_server_is_there(service, monkeypatch):
    monkeypatch.setattr(management, "KEEPALIVE_SECONDS", 0.0)
    job = Job(service.jobs._root / "fit-0", "fit", {}, 0.0, [{"event": "queued", "at": 1.0}])

    async def first(count):
        stream = management.job_events(service, job, 0)
        return [await anext(stream) for _ in range(count)]

    queued, *quiet = asyncio.run(asyncio.wait_for(first(3), 20))
    assert queued.startswith("id: 1000\nevent: queued\n")
    assert quiet == [": waiting\n\n"] * 2


CLASSIFY, CHAT = "/v1/classify", "/v1/chat/completions"
ONE = {"model": "films", "input": TEXT}
SAID = {"model": "films", "messages": [{"role": "user", "content": TEXT}]}


def chat_logprobs(client, messages, **options):
    """The log probabilities of all labels, which depend on every character of the text."""
    reply = client.post(CHAT, json=SAID | {"messages": messages} | options).json()
    return [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]


def test_chat_classifies_the_user_message_like_classify(client):
    answer = client.post(CLASSIFY, json=ONE).json()["data"][0]
    reply = client.post(CHAT, json=SAID | {"logprobs": True, "top_logprobs": 2, "temperature": 0}).json()
    assert reply["choices"][0]["message"]["content"] == answer["label"]
    logprobs = [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert [math.exp(one) for one in logprobs] == pytest.approx(sorted(answer["probs"], reverse=True))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chat_ignores_system_and_developer_messages(client, role):
    user = {"role": "user", "content": TEXT}
    instruction = {"role": role, "content": "You are a helpful assistant."}
    assert chat_logprobs(client, [instruction, user]) == chat_logprobs(client, [user])


def test_chat_joins_text_parts_with_newlines(client):
    parts = [{"type": "text", "text": part, "cache_control": None} for part in ("a warm", "film")]
    joined = chat_logprobs(client, [{"role": "user", "content": "a warm\nfilm"}])
    assert chat_logprobs(client, [{"role": "user", "content": parts}]) == joined


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
def test_chat_refuses_images_and_audio_naming_the_part(client, part):
    content = [{"type": "text", "text": TEXT}, part]
    reply = client.post(CHAT, json=SAID | {"messages": [{"role": "user", "content": content}]})
    assert error_of(reply) == (400, "unsupported")
    assert f"content parts of type '{part['type']}' are not supported" in reply.json()["error"]["message"]


def test_chat_stream_ends_with_usage_and_done(client):
    whole = client.post(CHAT, json=SAID).json()
    streamed = client.post(CHAT, json=SAID | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert "X-I2CL-Digest" in streamed.headers
    *events, done = streamed.text.removesuffix("\n\n").split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    answer, end, usage = chunks
    assert answer["choices"][0]["delta"]["content"] == whole["choices"][0]["message"]["content"]
    assert end["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


def test_chat_stream_errors_are_plain_json(client):
    reply = client.post(CHAT, json=SAID | {"stream": True, "model": "none"})
    assert error_of(reply) == (404, "unknown_task")


def test_chat_accepts_the_default_response_format(client):
    reply = client.post(CHAT, json=SAID | {"response_format": {"type": "text"}, "tools": []})
    assert reply.status_code == 200


def test_text_completions_name_the_routes_to_use(client):
    reply = client.post("/v1/completions", json={"model": "films", "prompt": TEXT})
    assert "/v1/chat/completions or /v1/classify" in reply.json()["error"]["message"]


def test_addresses_methods_bodies_and_times_that_are_wrong(client, monkeypatch):
    post = client.post
    assert error_of(client.get("/nowhere")) == (404, "not_found")
    assert error_of(client.get(CLASSIFY)) == (405, "method")
    for method in ("PUT", "PATCH", "TRACE"):
        assert error_of(client.request(method, CLASSIFY, content=b"x")) == (405, "method")
    assert error_of(post("/healthz", content=b"x")) == (405, "method")
    assert client.put("/v1/tasks", content=b"x").headers["Allow"] == "GET, POST"
    assert error_of(client.get("/v1/jobs/none")) == (404, "unknown_job")
    assert error_of(post(CLASSIFY, content=b"{")) == (415, "content_type")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"Content-Type": kind}
        assert error_of(post(CLASSIFY, content=b"{}", headers=headers)) == (415, "content_type")
    headers = {"Content-Type": "application/json; charset=utf-8"}
    for body in (b"{", b"\xff", b"[" * 100_000, b"null", b'{"input": "\\ud800", "model": "films"}'):
        assert post(CLASSIFY, content=body, headers=headers).status_code in {400, 422}
    assert error_of(post(CLASSIFY, content=b" " * 2**23, headers=headers)) == (413, "body_too_long")
    parts = (b" " * 2**20 for _ in range(9))
    assert error_of(post(CLASSIFY, content=parts, headers=headers)) == (413, "body_too_long")
    assert error_of(client.put("/v1/tasks/a", content=b"no tar", headers=TAR)) == (422, "bad_artefact")
    assert post(CLASSIFY, json=ONE, headers={"X-Request-Timeout": "0"}).status_code == 422
    assert error_of(client.get("/healthz", headers={"Host": "evil.example"})) == (421, "unknown_host")


def test_a_deadline_that_has_passed(client, service, monkeypatch):
    monkeypatch.setattr("i2cl.interfaces.server.service.TIMEOUT", -1.0)
    assert error_of(client.post(CLASSIFY, json=ONE)) == (504, "deadline")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CLASSIFY, ONE),
        ("/models/films", {"inputs": TEXT}),
        (CHAT, SAID | {"n": 1.0, "any": 1}),  # JSON's 5.0 is a whole number
    ],
)
def test_each_way_of_asking_takes_a_deadline(client, monkeypatch, path, body):
    asked = AsyncMock(return_value=None)
    monkeypatch.setattr(Service, "classify", asked)
    client.post(path, json=body, headers={"X-Request-Timeout": "7"})
    assert asked.call_args.kwargs["timeout"] == 7


def test_what_nobody_expected_is_told_without_its_words(client, service, monkeypatch, caplog):
    def fails(*_):
        raise KeyError("a user's text")

    monkeypatch.setattr(service.tasks, "queries", fails)
    reply = client.post(CLASSIFY, json=ONE)
    assert error_of(reply) == (500, "internal")
    assert "a user's text" not in reply.text + caplog.text
    assert "KeyError at test_app.py" in caplog.text


def test_tokens_and_roles(service, asking, tmp_path):
    service.tasks.put("films", made(service.decoder, 0))
    file = tmp_path / "tokens"
    file.write_text("# notes\nadmin 0123456789abcdefA\nread 0123456789abcdefR\n")
    client = asking(service, Access(read_tokens(file), frozenset()))
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic 0123456789abcdefA"}):
        assert error_of(client.post(CLASSIFY, json=ONE, headers=header)) == (401, "no_token")
        assert error_of(client.get("/metrics", headers=header))[0] == 401
    for role, removed in (("R", 403), ("A", 200)):
        header = {"Authorization": f"Bearer 0123456789abcdef{role}"}
        assert client.post(CLASSIFY, json=ONE, headers=header).status_code == 200
        assert client.get("/v1/models", headers=header).status_code == 200
        assert client.delete("/v1/tasks/films", headers=header).status_code == removed
    assert client.get("/healthz").status_code == client.get("/").status_code == 200


def test_a_reading_token_sends_files_and_sees_its_own_jobs(service, asking, monkeypatch):
    service.tasks.put("films", made(service.decoder, 0))
    tokens = {"admin-0123456789abc": "admin", "read1-0123456789abc": "read", "read2-0123456789abc": "read"}
    client = asking(service, Access(tokens, frozenset()))
    admin, first, second = ({"Authorization": f"Bearer {token}"} for token in tokens)
    jobs = {}
    for name, header in (("admin", admin), ("first", first), ("second", second)):
        reply = client.post("/v1/batches?model=films", content=b'{"input": "a"}', headers={**LINES, **header})
        jobs[name] = ended(service.jobs.get(reply.json()["id"])).id
    assert error_of(client.post("/v1/tasks", json=NAMED, headers=first)) == (403, "read_token")

    def seen(header):
        return {one["id"] for one in client.get("/v1/jobs", headers=header).json()["data"]}

    assert (seen(admin), seen(first), seen(second)) == ({*jobs.values()}, {jobs["first"]}, {jobs["second"]})
    for path in ("/v1/jobs/{}", "/v1/jobs/{}/events", "/v1/batches/{}"):
        assert client.get(path.format(jobs["first"]), headers=first).status_code == 200
        assert client.get(path.format(jobs["first"]), headers=admin).status_code == 200
        assert error_of(client.get(path.format(jobs["first"]), headers=second)) == (404, "unknown_job")
    assert error_of(client.delete(f"/v1/jobs/{jobs['first']}", headers=second)) == (404, "unknown_job")
    assert seen(second) == {jobs["second"]}
    assert service.jobs.get(jobs["first"]).owner not in {None, *tokens}
    assert client.delete(f"/v1/jobs/{jobs['first']}", headers=first).status_code == 200
    monkeypatch.setattr("i2cl.interfaces.server.jobs.MAX_QUEUED_PER_READER", 0)
    for header, status in ((first, 429), (admin, 202)):
        sent = client.post("/v1/batches?model=films", content=b'{"input": "a"}', headers={**LINES, **header})
        assert sent.status_code == status


def test_one_that_only_reads(service, opened, asking, tmp_path):
    service.tasks.put("films", made(service.decoder, 0))
    client = asking(opened(read_only=True))
    assert client.post(CLASSIFY, json=ONE).status_code == 200
    assert error_of(client.delete("/v1/tasks/films")) == (403, "read_only")
    for path, headers in (("/v1/tasks", {"Content-Type": "application/json"}), ("/v1/batches", LINES)):
        assert error_of(client.post(path, content=b"{}", headers=headers))[0] == 403
    assert error_of(client.put("/v1/tasks/a", content=b"", headers=TAR)) == (403, "read_only")
    assert error_of(client.get("/v1/jobs")) == (403, "read_only")


def test_no_other_site_can_ask_unless_named_and_the_page_loads_nothing_of_others(client, service, asking):
    origin = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options(CLASSIFY, headers=origin).headers
    reply = asking(service, origins=["https://example.org"]).options(CLASSIFY, headers=origin)
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    for path in ("/", "/page.css", "/page.js"):
        reply = client.get(path)
        assert reply.status_code == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org/)", reply.text)
    assert error_of(client.get("/docs"))[0] == 404
    described = client.get("/openapi.json").json()
    assert {"/v1/classify", "/v1/tasks/{name}", "/v1/batches"} <= described["paths"].keys()


def test_figures_tell_of_requests_and_name_no_task(client, service):
    client.post(CLASSIFY, json=ONE)
    client.post(CLASSIFY, json=ONE | {"model": "none"})
    expected = client.get("/metrics").text
    assert 'i2cl_requests_total{route="/v1/classify",status="200"} 1.0' in expected
    assert 'i2cl_refusals_total{reason="unknown_task"} 1.0' in expected
    assert "i2cl_batch_rows_count 1.0" in expected
    assert "i2cl_resident_tasks 1.0" in expected
    assert "films" not in expected


def test_two_processes_do_not_write_to_one_folder_and_an_end_takes_nothing_new(service, opened, client):
    one_line("another process serves", opened)
    service.close()
    assert error_of(client.get("/readyz")) == (503, "stopping")
    assert error_of(client.post(CLASSIFY, json=ONE)) == (503, "stopping")
    lines = client.post("/v1/batches?model=films", content='{"input": "a"}', headers=LINES)
    assert error_of(lines) == (503, "stopping")


@pytest.mark.parametrize("text", ["admin short", "root 0123456789abcdef", "admin", "", "# none"])
def test_token_files_that_are_none(tmp_path, text):
    file = tmp_path / "tokens"
    file.write_text(text)
    assert "0123456789abcdef" not in one_line("--token-file", read_tokens, file)
    file.write_text("admin 0123456789abcdef", encoding="utf-8-sig")
    assert read_tokens(file) == {"0123456789abcdef": "admin"}


def test_an_answer_that_nobody_waits_for_does_not_run(service):
    service.tasks.put("films", made(service.decoder, 0))
    go, begun = threading.Event(), threading.Event()
    service.batcher.run(lambda: (begun.set(), go.wait(20)))
    begun.wait(20)

    before = service.metrics.text()
    assert asyncio.run(service.classify("films", [TEXT], gone=lambda: asyncio.sleep(0.05))) is None
    assert service.batcher.waiting == 0
    go.set()
    time.sleep(0.1)
    count = re.compile(rb"i2cl_batch_rows_count (\S+)")
    assert count.search(service.metrics.text())[1] == count.search(before)[1]


def test_a_cure_is_short_however_long_the_message():
    value = RefusalError(422, "bad_input", "x: " + "': a' " * 1000).body()["error"]
    assert len(value["cure"]) <= MAX_SEARCHED
    assert RefusalError(422, "bad_input", "it is 'a: b': say 'c: d'").body()["error"]["cure"] == "say 'c: d'"


TICKETS = "ticket_text,category\nmy card was charged twice,billing\nthe app crashes,bug\n"
OWN_COLUMNS = {"text_column": "ticket_text", "label_column": "category", "check": True}


def check_file(client, content, name="tickets.csv", **options):
    """The reply to a request that only checks a file."""
    body = NAMED | OWN_COLUMNS | {"examples": {"name": name, "content": content}} | options
    return client.post("/v1/tasks", json=body)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TICKETS),
        ("a.TSV", TICKETS.replace(",", "\t")),
        ("a.json", '[{"ticket_text": "x", "category": "billing"}, {"ticket_text": "y", "category": "bug"}]'),
        ("a.jsonl", '{"ticket_text": "x", "category": "billing"}\n{"ticket_text": "y", "category": "bug"}\n'),
    ],
)
def test_fit_reads_a_file_with_its_own_columns(client, name, content):
    reply = check_file(client, content, name)
    assert (reply.json()["labels"], reply.json()["rows"]) == (["billing", "bug"], 2)


def test_fit_reads_rows_with_their_own_keys(client):
    rows = [{"ticket_text": "x", "category": "billing"}, {"ticket_text": "y", "category": "bug"}]
    reply = client.post("/v1/tasks", json=NAMED | OWN_COLUMNS | {"examples": rows, "test": rows})
    assert (reply.json()["rows"], reply.json()["test_rows"]) == (2, 2)


def test_fit_reads_a_csv_body_with_its_own_columns(client):
    query = NAMED | {"text_column": "ticket_text", "label_column": "category", "check": "true"}
    reply = client.post("/v1/tasks", params=query, content=TICKETS, headers={"Content-Type": "text/csv"})
    assert reply.json()["labels"] == ["billing", "bug"]


def test_fit_reads_a_test_file_of_another_format(client):
    test = {"name": "test.jsonl", "content": '{"ticket_text": "x", "category": "bug"}'}
    assert check_file(client, TICKETS, test=test).json()["test_rows"] == 1


def test_fit_runs_on_a_file_with_its_own_columns(client, service):
    body = NAMED | OWN_COLUMNS | {"check": False, "evaluate": 0, "settings": {"steps": 0}}
    test = {"name": "test.csv", "content": TICKETS}
    reply = client.post(
        "/v1/tasks", json=body | {"examples": {"name": "a.csv", "content": TICKETS}, "test": test}
    )
    job = ended(service.jobs.get(reply.json()["id"]))
    assert (job.status, job.events[-1]["labels"]) == ("done", ["billing", "bug"])


def test_fit_errors_name_the_uploaded_file(client):
    empty = check_file(client, TICKETS + ",bug\n").json()["error"]
    assert empty["message"].startswith("tickets.csv row 4: the text is empty")
    test = {"name": "holdout.csv", "content": "ticket_text,category\nx,other\n"}
    other = check_file(client, TICKETS, test=test, labels=["billing", "bug"]).json()["error"]
    assert other["rows"] == [other["message"]]
    assert other["message"].startswith("holdout.csv row 2: label 'other' is not one of billing, bug")


def test_fit_names_the_columns_that_a_file_has(client):
    message = check_file(client, TICKETS, text_column="body").json()["error"]["message"]
    problem = "tickets.csv: no text column 'body', the columns are ticket_text, category"
    assert message == f"{problem}: set text_column to the one that holds it"


def test_fit_errors_of_rows_name_the_field_of_the_request(client):
    rows = [{"text": "a", "label": "x"}, {"text": "", "label": "y"}]
    message = client.post("/v1/tasks", json=NAMED | {"examples": rows}).json()["error"]["message"]
    assert message.startswith("examples item 2: the text is empty")


def test_fit_refuses_a_repeated_key_in_a_row(client):
    rows = '[{"text": "a", "label": "x", "label": "y"}, {"text": "b", "label": "y"}]'
    body = json.dumps(NAMED)[:-1] + f', "examples": {rows}}}'
    reply = client.post("/v1/tasks", content=body, headers={"Content-Type": "application/json"})
    assert error_of(reply) == (422, "bad_request")
    assert "the key 'label' is given twice" in reply.json()["error"]["message"]


def test_fit_refuses_a_file_of_an_unknown_format(client):
    reply = check_file(client, TICKETS, "tickets.xyz")
    assert error_of(reply) == (422, "bad_request")
    assert "set format to one of csv, tsv, jsonl, json" in reply.json()["error"]["message"]
    examples = {"name": "tickets.xyz", "content": TICKETS, "format": "csv"}
    assert check_file(client, "", examples=examples).status_code == 200
