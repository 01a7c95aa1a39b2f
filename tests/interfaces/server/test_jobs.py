"""Fit and batch jobs: completion, cancellation, errors and restarts."""

import io
import json
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from i2cl.interfaces.server import files, jobs
from processes import until

from .conftest import LINES, TEXTS, make_injection

FIT_REQUEST = {"name": "films", "template": "Review: {text}\nSentiment: {label}", "labels": None, "shots": 2}
FIT_REQUEST |= {"seed": 0, "method": None, "recipe": None, "settings": {"steps": 1}, "evaluate": 4}
FIT_REQUEST |= {"chat": False, "instruction": None}


def wait_until_ended(job):
    until(lambda: job.ended)
    return job


def run_fit(service, task, **more):
    """Run a fit, and return its job."""
    return wait_until_ended(queue_fit(service, task, **more))


def queue_fit(service, task, **more):
    return service.jobs.add("fit", FIT_REQUEST | more, {"input.json": examples_json(task)})


def start_two_slow_fits(service, task):
    """Start a fit that takes minutes, wait for its first step, and queue another one."""
    runs, waits = (queue_fit(service, task, method="i2cl", settings={"epochs": 5000}) for _ in range(2))
    until(lambda: runs.events[-1]["event"] == "step" or runs.ended)
    assert not runs.ended, runs.events[-1]
    return runs, waits


def answers(job):
    """Return the output lines of a batch job."""
    return [json.loads(line) for line in (job.folder / files.OUTPUT).read_bytes().splitlines()]


def examples_json(task):
    return json.dumps([{"text": row.text, "label": task.labels[row.label]} for row in task.train]).encode()


def batch_job(service, body, model=None):
    """Return the arguments of `Jobs.add` for a batch file."""
    rows = io.BytesIO()
    count, names, size = files.read_lines(io.BytesIO(body), model, service.tasks.entry, rows)
    folder = Path(tempfile.mkdtemp(dir=service.jobs._root, prefix="."))
    entries = {name: service.tasks.copy(name, folder) for name in names}
    inputs = {files.INPUT: rows.getvalue(), files.TASKS: folder}
    return files.job_request(entries, count, size), inputs


def test_fit_publishes_its_steps_and_creates_a_task(service, task):
    job = run_fit(service, task)
    events = [one["event"] for one in job.events]
    assert events[:4] == ["queued", "started", "drawn", "step"]
    assert job.status == "done", job.events[-1]
    last = job.events[-1]
    assert last["digest"] == service.tasks.entry("films").digest
    assert last["evaluation"]["methods"].keys() >= {"zero_shot", "few_shot", "anchored"}
    assert not any("milliseconds_per_query" in one for one in last["evaluation"]["methods"].values())
    assert last["tokens"]["few_shot"] > last["tokens"]["task"]
    until(lambda: not list(job.folder.glob("input.*")))
    assert service.tasks.injection(last["digest"]).task.labels == tuple(sorted(task.labels))


def test_killed_fit_restarts_with_the_same_result(open_service, task, tmp_path, monkeypatch):
    service = open_service()
    whole = run_fit(service, task)
    before = service.tasks.injection(whole.events[-1]["digest"])
    service.tasks.delete("films")
    with monkeypatch.context() as patch:  # as in a kill: no event is recorded
        patch.setattr(service.tasks, "put", Mock(side_effect=jobs.FitStoppedError))
        job = queue_fit(service, task)
        until(lambda: any(one.get("method") == "anchored" for one in job.events))
        service.close()
    again = open_service()
    result = wait_until_ended(again.jobs.get(job.id))
    assert [one["event"] for one in result.events].count("resumed") == 1
    assert result.status == "done"
    after = again.tasks.injection(again.tasks.entry("films").digest)
    assert torch.equal(after.context.values, before.context.values)
    assert after.history == before.history
    assert again.jobs.get(whole.id).status == "done"


def test_batch_resumes_after_kill(open_service, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    service = open_service()
    for number, name in enumerate("ab"):
        service.tasks.put(name, make_injection(service.decoder, number))
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]
    lines = [{"input": text, "model": "ab"[at % 2], "custom_id": f"n{at}"} for at, text in enumerate(texts)]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    message, inputs = batch_job(service, body)
    injections = {name: service.tasks.injection(digest) for name, digest in message["digests"].items()}
    right = [injections[line["model"]].log_probs(service.decoder, [line["input"]])[0] for line in lines]
    whole = service.batcher.pool.score_rows
    calls = []

    def stop_at_fourth(rows):
        calls.append(len(rows))
        if len(calls) == 4:
            service.batcher.stops = True  # as in a kill: no event is recorded
            raise jobs.FitStoppedError
        return whole(rows)

    service.batcher.pool.score_rows = stop_at_fourth
    job = service.jobs.add("batch", message, inputs)
    until(lambda: len(calls) >= 4)
    service.close()
    with (job.folder / files.OUTPUT).open("ab") as torn:
        torn.write(b'{"line": 13, "half')
    again = open_service()
    again.tasks.put(
        "a", make_injection(again.decoder, 5)
    )  # the job keeps the version of the time it was queued
    result = wait_until_ended(again.jobs.get(job.id))
    assert result.status == "done", result.events
    out = answers(result)
    assert len(out) == len(texts)
    for at, (one, scores) in enumerate(zip(out, right, strict=True)):
        assert (one["line"], one["custom_id"]) == (at + 1, f"n{at}")
        assert one["probs"] == pytest.approx(scores.softmax(-1).tolist(), abs=1e-5)
        assert one["label"] == result.events[-1]["labels"][one["model"]][int(scores.argmax())]


def test_failed_fit_reports_its_error(service, task, monkeypatch):
    fails = Mock(side_effect=KeyError("a user's text"))
    monkeypatch.setattr("i2cl.methods.anchored.Anchored.fit_injection", fails)
    job = run_fit(service, task)
    assert job.status == "failed"
    assert job.events[-1]["error"]["code"] == "internal"
    assert "a user's text" not in json.dumps(job.events)


def lines_of(count):
    return "\n".join(json.dumps({"input": f"{TEXTS[0]} {at}"}) for at in range(count)).encode()


def test_row_that_fails_gets_an_error_without_failing_the_file(service, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    service.tasks.put("a", make_injection(service.decoder, 0))
    lines = lines_of(9) + b'\n{"input": "%s"}' % (b"long " * 3000)
    whole, seventh = service.batcher.pool.score_rows, service.tasks.queries("a", [f"{TEXTS[0]} 6"])[1][0].ids

    def fails(asked):
        if any(row.ids == seventh for row in asked):
            raise KeyError("a user's text")
        return whole(asked)

    monkeypatch.setattr(service.batcher.pool, "score_rows", fails)
    job = wait_until_ended(service.jobs.add("batch", *batch_job(service, lines, "a")))
    out = answers(job)
    refused = {one["line"]: one["error"]["code"] for one in out if "error" in one}
    assert refused == {7: "internal", 10: "text_too_long"}
    assert sum("label" in one for one in out) == 8
    assert (job.status, job.events[-1]["failed"]) == ("done", 2)


def test_batch_answers_name_the_line_of_the_file(service):
    service.tasks.put("a", make_injection(service.decoder, 0))
    first, second = lines_of(2).splitlines()
    job = wait_until_ended(
        service.jobs.add("batch", *batch_job(service, b"\n" + first + b"\n \n" + second, "a"))
    )
    assert [one["line"] for one in answers(job)] == [2, 4]


@pytest.mark.parametrize(
    "custom_id", ["\x00\x1b[31m\n\r\ufeff\U0001f600", "a\u2028b\u2029c\x85d\x1cd", 10**22]
)
def test_a_custom_id_returns_unchanged_on_a_line_of_its_own(client, service, custom_id):
    line = json.dumps({"input": "a good film", "custom_id": custom_id})
    job = client.post("/v1/batches?model=films", content=line, headers=LINES).json()["id"]
    wait_until_ended(service.jobs.get(job))
    (answer,) = client.get(f"/v1/batches/{job}").text.splitlines()
    assert json.loads(answer)["custom_id"] == custom_id


@pytest.mark.parametrize("kind", ["runs", "waits"])
def test_cancellation_survives_a_kill(open_service, task, monkeypatch, kind):
    service = open_service()
    runs, waits = start_two_slow_fits(service, task)
    with monkeypatch.context() as patch:  # the process ends before the fit notices
        patch.setattr(jobs.Job, "raise_if_cancelled", lambda _: None)
        patch.setattr(service.jobs, "_end", lambda *_, **__: None)
        chosen = {"runs": runs, "waits": waits}[kind]
        service.jobs.cancel(chosen)
        service.close()
    assert not chosen.ended
    again = open_service()
    assert wait_until_ended(again.jobs.get(chosen.id)).status == "cancelled"
    until(lambda: not list(chosen.folder.glob("input.*")))
    other = again.jobs.get(({runs, waits} - {chosen}).pop().id)
    again.jobs.cancel(other)
    assert [one["event"] for one in wait_until_ended(other).events][-1] == "cancelled"


def test_number_of_progress_events_is_bounded(service, make_client):
    job = jobs.Job(service.jobs._root / "fit-0", "fit", {}, 0.0)
    job.folder.mkdir()
    service.jobs._jobs[job.id] = job
    for event in ("queued", "started"):
        service.jobs.record_event(job, event)
    for step in range(5 * jobs.MAX_PROGRESS_EVENTS):
        job.publish_progress("step", step=step)
    shown = [one for one in job.events if one["event"] == "step"]
    assert [one["step"] for one in shown] == [*range(4 * len(shown), 5 * len(shown))]
    assert len(shown) == jobs.MAX_PROGRESS_EVENTS
    assert [one["event"] for one in job.events[:2]] == ["queued", "started"]
    times = [one["at"] for one in job.events]
    assert times == sorted(set(times))
    service.jobs.record_event(job, "done")
    seen = round(1000 * job.events[-2]["at"])
    reply = make_client(service).get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": str(seen)})
    assert reply.text.startswith(f"id: {round(1000 * job.events[-1]['at'])}\nevent: done\n")
