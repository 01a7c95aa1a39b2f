"""Fit and batch jobs: completion, cancellation, errors, restarts, full disk, deletion, pruning and quotas."""

import errno
import io
import json
import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("fastapi")

from i2cl.interfaces.server import files, jobs
from i2cl.interfaces.server.guard import Access
from processes import until

from .conftest import LINES, TEXTS, error_of, make_injection
from .test_authorization import READ, bearer

FIT_REQUEST = {"name": "films", "template": "Review: {text}\nSentiment: {label}", "labels": None, "shots": 2}
FIT_REQUEST |= {
    "seed": 0,
    "method": None,
    "recipe": None,
    "settings": {"steps": 1, "say_label": False},
    "evaluate": 4,
}
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
    assert torch.equal(after.context, before.context)
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
            service.batcher.is_stopping = True  # as in a kill: no event is recorded
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


def test_a_failing_row_does_not_fail_the_file(service, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    service.tasks.put("a", make_injection(service.decoder, 0))
    lines = lines_of(9) + b'\n{"input": "%s"}' % (b"long " * 3000)
    score_rows = service.batcher.pool.score_rows
    failing_ids = service.tasks.queries("a", [f"{TEXTS[0]} 6"])[1][0].ids

    def fail_on_one_row(rows):
        if any(row.ids == failing_ids for row in rows):
            raise KeyError("a user's text")
        return score_rows(rows)

    monkeypatch.setattr(service.batcher.pool, "score_rows", fail_on_one_row)
    job = wait_until_ended(service.jobs.add("batch", *batch_job(service, lines, "a")))
    out = answers(job)
    errors = {line["line"]: line["error"]["code"] for line in out if "error" in line}
    assert errors == {7: "internal", 10: "text_too_long"}
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
def test_custom_id_is_returned_unchanged_and_on_one_line(client, service, custom_id):
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


@pytest.fixture
def batch(service):
    """Function that queues a batch job."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    return lambda count=1: service.jobs.add("batch", *batch_job(service, lines_of(count), "films"))


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_at_the_end_fails_the_job(batch, service, open_service, monkeypatch, caplog):
    save = service.jobs._save

    def save_starts(job, events, folder):
        return save(job, events, folder) if events[-1]["event"] in {"queued", "started"} else full_disk()

    with monkeypatch.context() as patch:
        patch.setattr(service.jobs, "_save", save_starts)
        job = wait_until_ended(batch())
    assert (job.status, job.events[-1]["error"]["code"]) == ("failed", "disk_full")
    assert f"the end of job {job.id} could not be saved" in caplog.text
    service.close()
    assert wait_until_ended(open_service().jobs.get(job.id)).events[-1]["error"]["code"] == "lost_input"


def test_a_job_ends_on_a_full_disk_once_its_input_is_removed(batch, service, monkeypatch):
    save = service.jobs._save

    def needs_room(job, events, folder):
        if events[-1]["event"] == "done" and list(folder.glob("input.*")):
            full_disk()
        save(job, events, folder)

    monkeypatch.setattr(service.jobs, "_save", needs_room)
    assert wait_until_ended(batch()).status == "done"


def test_a_full_disk_fails_the_job(batch, monkeypatch):
    monkeypatch.setattr(files.Journal, "append", full_disk)
    job = wait_until_ended(batch())
    assert (job.status, job.events[-1]["error"]["code"]) == ("failed", "disk_full")


def test_cancel_leaves_the_answers_of_a_finished_job(batch, service, make_client):
    client, job = make_client(service), wait_until_ended(batch())
    reply = client.post(f"/v1/jobs/{job.id}/cancel")
    assert (reply.status_code, reply.json()["status"]) == (200, "done")
    assert client.get(f"/v1/batches/{job.id}").status_code == 200


def test_delete_removes_finished_jobs_only(service, make_client, task):
    client = make_client(service)
    runs, waits = start_two_slow_fits(service, task)
    for job in (waits, runs):
        assert error_of(client.delete(f"/v1/jobs/{job.id}")) == (409, "not_finished")
        client.post(f"/v1/jobs/{job.id}/cancel")
        assert wait_until_ended(job).status == "cancelled"
        assert client.delete(f"/v1/jobs/{job.id}").status_code == 200
        assert error_of(client.get(f"/v1/jobs/{job.id}")) == (404, "unknown_job")
        assert not job.folder.exists()


def test_finished_jobs_are_pruned_while_running(batch, service, monkeypatch):
    monkeypatch.setattr(jobs, "MAX_FINISHED", 2)
    made_jobs = [wait_until_ended(batch()) for _ in range(4)]
    until(lambda: len(service.jobs.all()) == 2)
    assert [job.id for job in service.jobs.all()] == [job.id for job in made_jobs[:1:-1]]
    until(lambda: not made_jobs[0].folder.exists())


def test_jobs_are_listed_in_pages(batch, service, make_client):
    client = make_client(service)
    ids = [wait_until_ended(batch()).id for _ in range(5)][::-1]
    first = client.get("/v1/jobs?limit=2").json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == (ids[:2], True)
    second = client.get(f"/v1/jobs?limit=3&after={ids[1]}").json()
    assert ([one["id"] for one in second["data"]], second["has_more"]) == (ids[2:], False)
    assert error_of(client.get("/v1/jobs?after=gone")) == (404, "unknown_job")
    assert error_of(client.get("/v1/jobs?limit=0")) == (422, "bad_request")


def send(client, body):
    return client.post("/v1/batches?model=films", content=body, headers=LINES | bearer(READ))


@pytest.fixture
def reader(service, make_client):
    """A client with a read token."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    return make_client(service, Access({READ: "read"}))


def test_file_whose_answers_take_too_much_is_refused(reader, service, monkeypatch):
    monkeypatch.setattr(files, "MAX_JOB_BYTES", 10_000)
    reply = send(reader, lines_of(100))
    assert error_of(reply) == (413, "file_too_long")
    assert service.jobs.all() == []


def test_jobs_of_a_read_token_have_a_quota(reader, service, monkeypatch):
    monkeypatch.setattr(jobs, "MAX_BYTES_PER_READER", 2500)
    first = send(reader, lines_of(3)).json()["id"]
    wait_until_ended(service.jobs.get(first))
    refused = [reply for reply in (send(reader, lines_of(3)) for _ in range(8)) if reply.status_code != 202]
    assert refused
    assert error_of(refused[0]) == (403, "quota")


def test_size_of_a_job_is_an_upper_bound(batch):
    job = batch(50)
    size = job.request["bytes"]
    assert wait_until_ended(job).disk_bytes() < size


def test_job_without_its_input_fails(batch, service, monkeypatch):
    monkeypatch.setattr(service.jobs, "_workers", {"batch": Mock()})
    with service.jobs._changed:
        job = batch()
        jobs._remove(job, "input.*")
    assert wait_until_ended(job).events[-1]["error"]["code"] == "lost_input"
