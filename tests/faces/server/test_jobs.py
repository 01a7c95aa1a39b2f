"""Fits and files: to their end, cancelled, and after a kill."""

import io
import json
import time

import pytest
import torch

from i2cl.faces.server import files, jobs
from i2cl.faces.server.refusals import RefusalError

from .conftest import TEXTS, made

FIT = {"name": "films", "template": "Review: {text}\nSentiment: {label}", "labels": None, "shots": 2}
FIT |= {"seed": 0, "method": None, "recipe": None, "settings": {"steps": 1}, "evaluate": 4}
FIT |= {"chat": False, "instruction": None}


def ended(job, seconds=60.0):
    start = time.monotonic()
    while not job.ended and time.monotonic() - start < seconds:
        time.sleep(0.01)
    return job


def examples(task):
    return json.dumps([{"text": row.text, "label": task.labels[row.label]} for row in task.train]).encode()


def checked(service, body, model=None):
    """What the job of a file has to know, and its lines."""
    rows = io.BytesIO()
    count, names = files.checked(io.BytesIO(body), model, service.tasks.entry, rows)
    with service.tasks.kept(names) as digests:
        return {"rows": count, "tasks": names, "digests": digests}, rows.getvalue()


def test_a_fit_is_told_step_by_step_and_ends_as_a_task(service, task):
    job = ended(service.jobs.add("fit", FIT, {"input.json": examples(task)}))
    events = [one["event"] for one in job.events]
    assert events[:3] == ["queued", "started", "step"]
    assert job.status == "done", job.events[-1]
    last, step = job.events[-1], job.events[2]
    layers = service.decoder.layers
    assert "coefficients" not in step  # but in the last one
    assert [len(last["coefficients"]), len(last["coefficients"][0]), len(last["sizes"])] == [
        layers,
        2,
        layers,
    ]
    assert last["digest"] == service.tasks.entry("films").digest
    assert last["worth"]["methods"].keys() >= {"zero_shot", "few_shot", "anchored"}
    assert last["tokens"]["few_shot"] > last["tokens"]["task"]
    assert not list(job.folder.glob("input.*"))
    injection = service.tasks.injection(last["digest"])
    assert injection.task.labels == ("bad", "good") or injection.task.labels == ("negative", "positive")


def test_a_fit_that_was_killed_comes_to_the_same_vectors(opened, task, tmp_path, monkeypatch):
    service = opened()
    whole = ended(service.jobs.add("fit", FIT, {"input.json": examples(task)}))
    before = service.tasks.injection(whole.events[-1]["digest"])
    service.tasks.delete("films")

    def killed(*_, **__):
        raise jobs.FitStoppedError  # as at the end of the process: nothing is told

    with monkeypatch.context() as patch:
        patch.setattr(service.tasks, "put", killed)
        job = service.jobs.add("fit", FIT, {"input.json": examples(task)})
        while not any(one.get("method") == "anchored" for one in job.events):
            time.sleep(0.01)
        service.close()
    again = opened()
    found = ended(again.jobs.get(job.id))
    assert [one["event"] for one in found.events].count("resumed") == 1
    assert found.status == "done"
    after = again.tasks.injection(again.tasks.entry("films").digest)
    assert torch.equal(after.context.values, before.context.values)
    assert after.history == before.history
    assert again.jobs.get(whole.id).status == "done"


def test_a_file_goes_on_where_it_stood(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    service = opened()
    for number, name in enumerate("ab"):
        service.tasks.put(name, made(service.decoder, number))
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]
    lines = [{"input": text, "model": "ab"[at % 2], "custom_id": f"n{at}"} for at, text in enumerate(texts)]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    told, rows = checked(service, body)
    right = [
        service.tasks.injection(told["digests"][line["model"]]).scores(service.decoder, [line["input"]])[0]
        for line in lines
    ]
    answers = service.batcher.pool.answers
    calls = []

    def some(rows):
        calls.append(len(rows))
        if len(calls) == 4:
            service.batcher._stops = True  # what is under way is not told, as in a kill
            raise jobs.FitStoppedError
        return answers(rows)

    service.batcher.pool.answers = some
    job = service.jobs.add("batch", told, {files.INPUT: rows})
    while len(calls) < 4:
        time.sleep(0.01)
    service.close()
    with (tmp_path / "tasks" / "jobs" / job.id / files.OUTPUT).open("ab") as torn:
        torn.write(b'{"line": 13, "half')
    again = opened()
    again.tasks.put("a", made(again.decoder, 5))  # the file's version is that of when it came
    found = ended(again.jobs.get(job.id))
    assert found.status == "done", found.events
    out = [json.loads(line) for line in (found.folder / files.OUTPUT).read_bytes().splitlines()]
    assert [(one["line"], one["custom_id"]) for one in out] == [
        (at + 1, f"n{at}") for at in range(len(texts))
    ]
    for one, scores in zip(out, right, strict=True):
        assert one["probs"] == pytest.approx(scores.softmax(-1).tolist(), abs=1e-5)
        assert one["label"] == one["labels"][int(scores.argmax())]


def test_a_line_that_is_too_long_is_told_as_such(service):
    service.tasks.put("a", made(service.decoder, 0))
    body = "\n".join(json.dumps({"input": text}) for text in ("short", "long " * 3000, "short"))
    told, rows = checked(service, body.encode(), "a")
    job = ended(service.jobs.add("batch", told, {files.INPUT: rows}))
    out = [json.loads(line) for line in (job.folder / files.OUTPUT).read_bytes().splitlines()]
    assert [one.get("label") is None for one in out] == [False, True, False]
    assert out[1]["error"]["code"] == "text_too_long"


def test_a_job_is_cancelled_while_it_runs_and_while_it_waits(service, task):
    slow = {**FIT, "method": "i2cl", "settings": {"epochs": 5000}}
    runs, waits = (service.jobs.add("fit", slow, {"input.json": examples(task)}) for _ in range(2))
    while runs.events[-1]["event"] != "step":
        assert not runs.ended, runs.events[-1]
        time.sleep(0.01)
    for job in (waits, runs):
        service.jobs.cancel(job)
        assert ended(job).status == "cancelled"
    service.jobs.cancel(waits)
    with pytest.raises(RefusalError):
        service.jobs.get(waits.id)
    assert not waits.folder.exists()


def test_a_fit_that_fails_says_why(service, task, monkeypatch):
    def fails(*_, **__):
        raise KeyError("a user's text")

    monkeypatch.setattr("i2cl.faces.server.fits.Anchored.injection", fails)
    job = ended(service.jobs.add("fit", FIT, {"input.json": examples(task)}))
    assert job.status == "failed"
    assert job.events[-1]["error"]["code"] == "internal"
    assert "a user's text" not in json.dumps(job.events)
