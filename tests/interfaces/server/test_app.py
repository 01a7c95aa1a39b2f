"""Routes of the server: answers, errors, tokens and the page."""

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

from fitting import raises
from i2cl.interfaces.server.guard import Access, read_tokens
from i2cl.interfaces.server.jobs import Job
from i2cl.interfaces.server.routes import management
from i2cl.interfaces.server.service import Service

from .conftest import LINES, TAR, TEXTS, error_of, make_injection, tar_of
from .test_jobs import examples_json, wait_until_ended

TEXT = TEXTS[0]
FIT_BODY = {"name": "new", "template": "Review: {text}\nSentiment: {label}"}


def test_classify_returns_the_scores_of_the_library(client, service):
    injection = make_injection(service.decoder, 0)
    right = injection.log_probs(service.decoder, list(TEXTS)).softmax(-1)
    entry = service.tasks.entry("films")
    reply = client.post("/v1/classify", json={"model": "films", "input": list(TEXTS)})
    outcome = reply.json()
    assert (reply.status_code, reply.headers["X-I2CL-Digest"]) == (200, entry.digest)
    names = {"id", "object", "created", "model", "multi_label", "labels", "data", "usage"}
    assert outcome.keys() == names
    assert not outcome["multi_label"]
    assert (outcome["object"], outcome["labels"]) == ("list", list(entry.labels))
    probabilities = torch.tensor([one["probs"] for one in outcome["data"]])
    torch.testing.assert_close(probabilities, right, rtol=0, atol=1e-5)
    assert [one["label"] for one in outcome["data"]] == injection.predict(service.decoder, list(TEXTS))
    assert [one["index"] for one in outcome["data"]] == [*range(len(TEXTS))]
    assert {one["num_classes"] for one in outcome["data"]} == {2}


def test_label_below_the_minimum_confidence_is_empty(shared_client):
    answer = shared_client.post(CLASSIFY, json=CLASSIFY_BODY).json()["data"]
    unsure = shared_client.post(CLASSIFY, json=CLASSIFY_BODY | {"min_confidence": 1}).json()["data"]
    assert unsure == [answer[0] | {"label": "", "labels": []}]


def test_tasks_are_fitted_uploaded_and_deleted(client, service, task, tmp_path):
    rows = json.loads(examples_json(task))
    fit = {**FIT_BODY, "examples": rows[:12], "settings": {"steps": 0}, "evaluate": 0, "shots": 1}
    outcome = client.post("/v1/tasks", json={**fit, "check": True}).json()
    assert (outcome["rows"], outcome["labels"]) == (12, sorted(task.labels))
    assert (outcome["data"]["rows"], sum(outcome["data"]["labels"].values())) == (12, 12)
    assert 0 < outcome["data"]["longest_tokens"] < outcome["data"]["most_tokens"]
    reply = client.post("/v1/tasks", json=fit)
    assert (reply.status_code, reply.json()["status"]) == (202, "queued")
    wait_until_ended(service.jobs.get(reply.json()["id"]))
    with client.stream("GET", reply.headers["Location"] + "/events") as stream:
        events = re.findall(r"^event: (\w+)$", stream.read().decode(), re.MULTILINE)
    assert (events[0], events[-1]) == ("queued", "done")
    assert client.get(reply.headers["Location"]).json()["status"] == "done"
    (listed,) = client.get("/v1/jobs").json()["data"]
    assert (listed["name"], listed["status"], "last" in listed) == ("new", "done", False)
    make_injection(service.decoder, 1).save_pretrained(tmp_path / "topics")
    name = "<img src=x onerror=alert(1)>/x"
    put = client.put(f"/v1/tasks/{name}", content=tar_of(tmp_path / "topics"), headers=TAR)
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


def test_event_stream_of_a_queued_job_sends_keepalives(service, monkeypatch):
    monkeypatch.setattr(management, "KEEPALIVE_SECONDS", 0.0)
    job = Job(service.jobs._root / "fit-0", "fit", {}, 0.0, [{"event": "queued", "at": 1.0}])

    async def first(count):
        stream = management.job_events(service, job, 0)
        return [await anext(stream) for _ in range(count)]

    queued, *quiet = asyncio.run(asyncio.wait_for(first(3), 20))
    assert queued.startswith("id: 1000\nevent: queued\n")
    assert quiet == [": waiting\n\n"] * 2


CLASSIFY, CHAT = "/v1/classify", "/v1/chat/completions"
CLASSIFY_BODY = {"model": "films", "input": TEXT}
CHAT_BODY = {"model": "films", "messages": [{"role": "user", "content": TEXT}]}


def chat_logprobs(client, messages, **options):
    """The log probabilities of all labels, which depend on every character of the text."""
    reply = client.post(CHAT, json=CHAT_BODY | {"messages": messages} | options).json()
    return [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]


def test_chat_classifies_the_user_message_like_classify(shared_client):
    answer = shared_client.post(CLASSIFY, json=CLASSIFY_BODY).json()["data"][0]
    reply = shared_client.post(
        CHAT, json=CHAT_BODY | {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    ).json()
    assert reply["choices"][0]["message"]["content"] == answer["label"]
    logprobs = [one["logprob"] for one in reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert [math.exp(one) for one in logprobs] == pytest.approx(sorted(answer["probs"], reverse=True))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_chat_ignores_system_and_developer_messages(shared_client, role):
    user = {"role": "user", "content": TEXT}
    instruction = {"role": role, "content": "You are a helpful assistant."}
    assert chat_logprobs(shared_client, [instruction, user]) == chat_logprobs(shared_client, [user])


def test_chat_joins_text_parts_with_newlines(shared_client):
    parts = [{"type": "text", "text": part, "cache_control": None} for part in ("a warm", "film")]
    joined = chat_logprobs(shared_client, [{"role": "user", "content": "a warm\nfilm"}])
    assert chat_logprobs(shared_client, [{"role": "user", "content": parts}]) == joined


def test_chat_has_at_most_as_many_top_logprobs_as_labels(shared_client):
    user = [{"role": "user", "content": TEXT}]
    assert [len(chat_logprobs(shared_client, user, top_logprobs=most)) for most in (0, 1, 20)] == [0, 1, 2]


def test_chat_stream_ends_with_usage_and_done(shared_client):
    whole = shared_client.post(CHAT, json=CHAT_BODY).json()
    streamed = shared_client.post(
        CHAT, json=CHAT_BODY | {"stream": True, "stream_options": {"include_usage": True}}
    )
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


def test_invalid_paths_methods_bodies_and_headers_are_refused(shared_client, monkeypatch):
    post = shared_client.post
    assert error_of(shared_client.get("/nowhere")) == (404, "not_found")
    assert error_of(shared_client.get(CLASSIFY)) == (405, "method")
    for method in ("PUT", "PATCH", "TRACE"):
        assert error_of(shared_client.request(method, CLASSIFY, content=b"x")) == (405, "method")
    assert error_of(post("/healthz", content=b"x")) == (405, "method")
    assert shared_client.put("/v1/tasks", content=b"x").headers["Allow"] == "GET, POST"
    assert error_of(shared_client.get("/v1/jobs/none")) == (404, "unknown_job")
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
    assert error_of(shared_client.put("/v1/tasks/a", content=b"no tar", headers=TAR)) == (422, "bad_artefact")
    assert post(CLASSIFY, json=CLASSIFY_BODY, headers={"X-Request-Timeout": "0"}).status_code == 422
    assert error_of(shared_client.get("/healthz", headers={"Host": "evil.example"})) == (421, "unknown_host")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CLASSIFY, CLASSIFY_BODY),
        (CHAT, CHAT_BODY | {"n": 1.0, "any": 1}),  # JSON's 5.0 is a whole number
    ],
)
def test_classifying_routes_accept_a_timeout(shared_client, monkeypatch, path, body):
    asked = AsyncMock(return_value=None)
    monkeypatch.setattr(Service, "classify", asked)
    shared_client.post(path, json=body, headers={"X-Request-Timeout": "7"})
    assert asked.call_args.args[-1] == 7


def test_unexpected_error_does_not_reveal_its_message(client, service, monkeypatch, caplog):
    def fails(*_):
        raise KeyError("a user's text")

    monkeypatch.setattr(service.tasks, "queries", fails)
    reply = client.post(CLASSIFY, json=CLASSIFY_BODY, headers={"X-Request-Id": "seven"})
    assert error_of(reply) == (500, "internal")
    assert "a user's text" not in reply.text + caplog.text
    assert re.search(r"KeyError at test_app.py:.* id=seven", caplog.text)


def test_a_read_token_can_send_files_and_sees_only_its_own_jobs(service, make_client, monkeypatch):
    service.tasks.put("films", make_injection(service.decoder, 0))
    tokens = {"admin-0123456789abc": "admin", "read1-0123456789abc": "read", "read2-0123456789abc": "read"}
    client = make_client(service, Access(tokens, frozenset()))
    admin, first, second = ({"Authorization": f"Bearer {token}"} for token in tokens)
    jobs = {}
    for name, header in (("admin", admin), ("first", first), ("second", second)):
        reply = client.post("/v1/batches?model=films", content=b'{"input": "a"}', headers={**LINES, **header})
        jobs[name] = wait_until_ended(service.jobs.get(reply.json()["id"])).id
    assert error_of(client.post("/v1/tasks", json=FIT_BODY, headers=first)) == (403, "read_token")

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


def test_read_only_server_refuses_changes(service, open_service, make_client, tmp_path):
    service.tasks.put("films", make_injection(service.decoder, 0))
    client = make_client(open_service(read_only=True))
    assert client.post(CLASSIFY, json=CLASSIFY_BODY).status_code == 200
    assert error_of(client.delete("/v1/tasks/films")) == (403, "read_only")
    fit = FIT_BODY | {"examples": [{"text": "a", "label": "x"}]}
    assert error_of(client.post("/v1/tasks", json=fit)) == (403, "read_only")
    assert error_of(client.post("/v1/batches", content=b"{}", headers=LINES)) == (403, "read_only")
    assert error_of(client.put("/v1/tasks/a", content=b"", headers=TAR)) == (403, "read_only")
    assert error_of(client.get("/v1/jobs")) == (403, "read_only")


def test_cors_is_off_by_default_and_the_page_loads_no_external_resources(client, service, make_client):
    origin = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in client.options(CLASSIFY, headers=origin).headers
    reply = make_client(service, origins=["https://example.org"]).options(CLASSIFY, headers=origin)
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    for path in ("/", "/page.css", "/page.js"):
        reply = client.get(path)
        assert reply.status_code == 200
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org/)", reply.text)
    assert error_of(client.get("/docs"))[0] == 404
    described = client.get("/openapi.json").json()
    assert {"/v1/classify", "/v1/tasks/{name}", "/v1/batches"} <= described["paths"].keys()


def test_metrics_count_requests_without_task_names(client, service):
    client.post(CLASSIFY, json=CLASSIFY_BODY)
    client.post(CLASSIFY, json=CLASSIFY_BODY | {"model": "none"})
    expected = client.get("/metrics").text
    assert 'i2cl_requests_total{route="/v1/classify",status="200"} 1.0' in expected
    assert 'i2cl_refusals_total{reason="unknown_task"} 1.0' in expected
    assert "i2cl_batch_rows_count 1.0" in expected
    assert "i2cl_resident_tasks 1.0" in expected
    assert "films" not in expected


def test_folder_is_locked_and_shutdown_refuses_new_work(service, open_service, client):
    raises("another process serves", open_service)
    service.close()
    assert error_of(client.get("/readyz")) == (503, "stopping")
    assert error_of(client.post(CLASSIFY, json=CLASSIFY_BODY)) == (503, "stopping")
    lines = client.post("/v1/batches?model=films", content='{"input": "a"}', headers=LINES)
    assert error_of(lines) == (503, "stopping")


@pytest.mark.parametrize("text", ["admin short", "root 0123456789abcdef", "admin", "", "# none"])
def test_invalid_token_files_are_refused(tmp_path, text):
    file = tmp_path / "tokens"
    file.write_text(text)
    assert "0123456789abcdef" not in raises("--token-file", read_tokens, file)
    file.write_text("admin 0123456789abcdef", encoding="utf-8-sig")
    assert read_tokens(file) == {"0123456789abcdef": "admin"}


def test_cancelled_request_does_not_run(service):
    service.tasks.put("films", make_injection(service.decoder, 0))
    go, begun = threading.Event(), threading.Event()
    service.batcher.run(lambda: (begun.set(), go.wait(20)))
    begun.wait(20)

    async def cancel_request():
        request = asyncio.create_task(service.classify("films", [TEXT]))
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.wait([request])

    before = service.metrics.text()
    asyncio.run(cancel_request())
    assert service.batcher.waiting == 0
    go.set()
    time.sleep(0.1)
    count = re.compile(rb"i2cl_batch_rows_count (\S+)")
    assert count.search(service.metrics.text())[1] == count.search(before)[1]


TICKETS = "ticket_text,category\nmy card was charged twice,billing\nthe app crashes,bug\n"
OWN_COLUMNS = {"text_column": "ticket_text", "label_column": "category", "check": True}


def check_file(client, content, name="tickets.csv", **options):
    """The reply to a request that only checks a file."""
    body = FIT_BODY | OWN_COLUMNS | {"examples": {"name": name, "content": content}} | options
    return client.post("/v1/tasks", json=body)


def test_fits_without_a_template_use_the_default(shared_client):
    examples = [{"text": "a warm film", "label": "good"}, {"text": "dull", "label": "bad"}]
    reply = shared_client.post("/v1/tasks", json={"name": "new", "examples": examples, "check": True})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", TICKETS),
        ("a.TSV", TICKETS.replace(",", "\t")),
        ("a.json", '[{"ticket_text": "x", "category": "billing"}, {"ticket_text": "y", "category": "bug"}]'),
        ("a.jsonl", '{"ticket_text": "x", "category": "billing"}\n{"ticket_text": "y", "category": "bug"}\n'),
    ],
)
def test_fit_reads_a_file_with_its_own_columns(shared_client, name, content):
    reply = check_file(shared_client, content, name)
    assert (reply.json()["labels"], reply.json()["rows"]) == (["billing", "bug"], 2)


def test_fit_reads_rows_with_their_own_keys(shared_client):
    rows = [{"ticket_text": "x", "category": "billing"}, {"ticket_text": "y", "category": "bug"}]
    reply = shared_client.post("/v1/tasks", json=FIT_BODY | OWN_COLUMNS | {"examples": rows, "test": rows})
    assert (reply.json()["rows"], reply.json()["test_rows"]) == (2, 2)


def test_fit_runs_on_a_file_with_its_own_columns(client, service):
    body = FIT_BODY | OWN_COLUMNS | {"check": False, "evaluate": 0, "settings": {"steps": 0}}
    test = {"name": "test.csv", "content": TICKETS}
    reply = client.post(
        "/v1/tasks", json=body | {"examples": {"name": "a.csv", "content": TICKETS}, "test": test}
    )
    job = wait_until_ended(service.jobs.get(reply.json()["id"]))
    assert (job.status, job.events[-1]["labels"]) == ("done", ["billing", "bug"])


def test_fit_errors_name_the_uploaded_file(shared_client):
    empty = check_file(shared_client, TICKETS + ",bug\n").json()["error"]
    assert empty["message"].startswith("tickets.csv row 4: the text is empty")
    test = {"name": "holdout.csv", "content": "ticket_text,category\nx,other\n"}
    other = check_file(shared_client, TICKETS, test=test, labels=["billing", "bug"]).json()["error"]
    assert other["rows"] == [other["message"]]
    assert other["message"].startswith("holdout.csv row 2: label 'other' is not one of billing, bug")


def test_fit_names_the_columns_that_a_file_has(shared_client):
    message = check_file(shared_client, TICKETS, text_column="body").json()["error"]["message"]
    problem = "tickets.csv: no text column 'body', the columns are ticket_text, category"
    assert message.startswith(f"{problem}: ")
    assert "text_column" in message.removeprefix(problem)
    assert "--" not in message


def test_errors_in_fit_rows_name_the_field_of_the_request(shared_client):
    rows = [{"text": "a", "label": "x"}, {"text": "", "label": "y"}]
    message = shared_client.post("/v1/tasks", json=FIT_BODY | {"examples": rows}).json()["error"]["message"]
    assert message.startswith("examples item 2: the text is empty")


def test_fit_refuses_a_file_of_an_unknown_format(shared_client):
    reply = check_file(shared_client, TICKETS, "tickets.xyz")
    assert error_of(reply) == (422, "bad_request")
    assert "set format to one of csv, tsv, jsonl, json" in reply.json()["error"]["message"]
    examples_json = {"name": "tickets.xyz", "content": TICKETS, "format": "csv"}
    assert check_file(shared_client, "", examples=examples_json).status_code == 200
