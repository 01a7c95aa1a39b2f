"""End of jobs: full disk, cancellation, deletion, pruning and quotas."""

import errno
import os
from unittest.mock import Mock

import pytest

pytest.importorskip("fastapi")

from i2cl.interfaces.server import files, jobs
from i2cl.interfaces.server.guard import Access
from processes import until

from .conftest import LINES, make_injection
from .test_app import error_of
from .test_authorization import READ, bearer
from .test_jobs import batch_job, lines_of, start_two_slow_fits, wait_until_ended


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


def test_end_is_saved_when_removing_the_input_makes_room(batch, service, monkeypatch):
    save = service.jobs._save

    def needs_room(job, events, folder):
        if events[-1]["event"] == "done" and list(folder.glob("input.*")):
            full_disk()
        save(job, events, folder)

    monkeypatch.setattr(service.jobs, "_save", needs_room)
    assert wait_until_ended(batch()).status == "done"


def test_answers_that_do_not_fit_on_the_disk_fail_the_job(batch, monkeypatch):
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
