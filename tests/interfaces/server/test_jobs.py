"""Fits and files: to their end, cancelled, and after a kill."""

import io
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from i2cl.interfaces.server import files, jobs
from processes import until

from .conftest import TEXTS, made

FIT = {"name": "films", "template": "Review: {text}\nSentiment: {label}", "labels": None, "shots": 2}
FIT |= {"seed": 0, "method": None, "recipe": None, "settings": {"steps": 1}, "evaluate": 4}
FIT |= {"chat": False, "instruction": None}


def ended(job):
    until(lambda: job.ended)
    return job


def fitted(service, task, **more):
    """The job of a fit, once it has ended."""
    return ended(fitting(service, task, **more))


def fitting(service, task, **more):
    return service.jobs.add("fit", FIT | more, {"input.json": examples(task)})


def two_slow(service, task):
    """A fit that has come to its first step, and one that waits behind it; both would take minutes."""
    runs, waits = (fitting(service, task, method="i2cl", settings={"epochs": 5000}) for _ in range(2))
    until(lambda: runs.events[-1]["event"] == "step" or runs.ended)
    assert not runs.ended, runs.events[-1]
    return runs, waits


def answers(job):
    """The lines that a file's job has written."""
    return [json.loads(line) for line in (job.folder / files.OUTPUT).read_bytes().splitlines()]


def examples(task):
    return json.dumps([{"text": row.text, "label": task.labels[row.label]} for row in task.train]).encode()


def checked(service, body, model=None):
    """What the job of a file has to know, and its files."""
    rows = io.BytesIO()
    count, names, size = files.read_lines(io.BytesIO(body), model, service.tasks.entry, rows)
    with service.tasks.kept(names) as entries:
        return files.description(entries, count, size), {files.INPUT: rows.getvalue()}


def test_a_fit_is_told_step_by_step_and_ends_as_a_task(service, task):
    job = fitted(service, task)
    events = [one["event"] for one in job.events]
    assert events[:4] == ["queued", "started", "drawn", "step"]
    assert job.status == "done", job.events[-1]
    last = job.events[-1]
    assert last["digest"] == service.tasks.entry("films").digest
    assert last["worth"]["methods"].keys() >= {"zero_shot", "few_shot", "anchored"}
    assert not any("milliseconds_per_query" in one for one in last["worth"]["methods"].values())
    assert last["tokens"]["few_shot"] > last["tokens"]["task"]
    until(lambda: not list(job.folder.glob("input.*")))
    assert service.tasks.injection(last["digest"]).task.labels == tuple(sorted(task.labels))


def test_a_fit_that_was_killed_comes_to_the_same_vectors(opened, task, tmp_path, monkeypatch):
    service = opened()
    whole = fitted(service, task)
    before = service.tasks.injection(whole.events[-1]["digest"])
    service.tasks.delete("films")
    with monkeypatch.context() as patch:  # as at the end of the process: nothing is told
        patch.setattr(service.tasks, "put", Mock(side_effect=jobs.FitStoppedError))
        job = fitting(service, task)
        until(lambda: any(one.get("method") == "anchored" for one in job.events))
        service.close()
    again = opened()
    result = ended(again.jobs.get(job.id))
    assert [one["event"] for one in result.events].count("resumed") == 1
    assert result.status == "done"
    after = again.tasks.injection(again.tasks.entry("films").digest)
    assert torch.equal(after.context.values, before.context.values)
    assert after.history == before.history
    assert again.jobs.get(whole.id).status == "done"


def test_a_blank_text_fails_its_line_and_not_the_file(opened):
    service = opened()
    service.tasks.put("a", made(service.decoder, 0))
    message, held = checked(service, b'{"input": "good"}\n{"input": "\\u200b "}\n{"input": "bad"}\n', "a")
    job = ended(service.jobs.add("batch", message, held))
    assert job.status == "done"
    assert job.events[-1]["failed"] == 1
    first, blank, last = answers(job)
    assert {"label", "probs"} <= first.keys() & last.keys()
    assert blank["line"] == 2
    assert blank["error"]["message"].startswith("the text is empty")


def test_a_file_goes_on_where_it_stood(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    service = opened()
    for number, name in enumerate("ab"):
        service.tasks.put(name, made(service.decoder, number))
    texts = [f"{text} {number}" for number in range(3) for text in TEXTS]
    lines = [{"input": text, "model": "ab"[at % 2], "custom_id": f"n{at}"} for at, text in enumerate(texts)]
    body = "\n".join(json.dumps(line) for line in lines).encode()
    message, held = checked(service, body)
    injections = {name: service.tasks.injection(digest) for name, digest in message["digests"].items()}
    right = [injections[line["model"]].scores(service.decoder, [line["input"]])[0] for line in lines]
    whole = service.batcher.pool.answers
    calls = []

    def some(rows):
        calls.append(len(rows))
        if len(calls) == 4:
            service.batcher.stops = True  # what is under way is not told, as in a kill
            raise jobs.FitStoppedError
        return whole(rows)

    service.batcher.pool.answers = some
    job = service.jobs.add("batch", message, held)
    until(lambda: len(calls) >= 4)
    service.close()
    with (job.folder / files.OUTPUT).open("ab") as torn:
        torn.write(b'{"line": 13, "half')
    again = opened()
    again.tasks.put("a", made(again.decoder, 5))  # the file's version is that of when it came
    result = ended(again.jobs.get(job.id))
    assert result.status == "done", result.events
    out = answers(result)
    assert len(out) == len(texts)
    for at, (one, scores) in enumerate(zip(out, right, strict=True)):
        assert (one["line"], one["custom_id"]) == (at + 1, f"n{at}")
        assert one["probs"] == pytest.approx(scores.softmax(-1).tolist(), abs=1e-5)
        assert one["label"] == result.events[-1]["labels"][one["model"]][int(scores.argmax())]


def test_a_job_is_cancelled_while_it_runs_and_while_it_waits(service, task):
    runs, waits = two_slow(service, task)
    for job in (waits, runs):
        service.jobs.cancel(job)
        assert ended(job).status == "cancelled"


def test_a_fit_that_fails_says_why(service, task, monkeypatch):
    fails = Mock(side_effect=KeyError("a user's text"))
    monkeypatch.setattr("i2cl.methods.anchored.Anchored.injection", fails)
    job = fitted(service, task)
    assert job.status == "failed"
    assert job.events[-1]["error"]["code"] == "internal"
    assert "a user's text" not in json.dumps(job.events)


def lines_of(count):
    return "\n".join(json.dumps({"input": f"{TEXTS[0]} {at}"}) for at in range(count)).encode()


def test_a_row_that_fails_or_is_too_long_costs_its_line_and_not_the_file(service, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 4)
    service.tasks.put("a", made(service.decoder, 0))
    lines = lines_of(9) + b'\n{"input": "%s"}' % (b"long " * 3000)
    whole, seventh = service.batcher.pool.answers, service.tasks.queries("a", [f"{TEXTS[0]} 6"])[1][0].ids

    def fails(asked):
        if any(row.ids == seventh for row in asked):
            raise KeyError("a user's text")
        return whole(asked)

    monkeypatch.setattr(service.batcher.pool, "answers", fails)
    job = ended(service.jobs.add("batch", *checked(service, lines, "a")))
    out = answers(job)
    refused = {one["line"]: one["error"]["code"] for one in out if "error" in one}
    assert refused == {7: "internal", 10: "text_too_long"}
    assert sum("label" in one for one in out) == 8
    assert (job.status, job.events[-1]["failed"]) == ("done", 2)


def test_an_answer_names_the_line_of_the_file(service):
    service.tasks.put("a", made(service.decoder, 0))
    first, second = lines_of(2).splitlines()
    job = ended(service.jobs.add("batch", *checked(service, b"\n" + first + b"\n \n" + second, "a")))
    assert [one["line"] for one in answers(job)] == [2, 4]


@pytest.mark.parametrize("kind", ["runs", "waits"])
def test_a_cancel_survives_a_kill(opened, task, monkeypatch, kind):
    service = opened()
    runs, waits = two_slow(service, task)
    with monkeypatch.context() as patch:  # the process ends before the fit notices
        patch.setattr(jobs.Job, "raise_if_cancelled", lambda _: None)
        patch.setattr(service.jobs, "_end", lambda *_, **__: None)
        chosen = {"runs": runs, "waits": waits}[kind]
        service.jobs.cancel(chosen)
        service.close()
    assert not chosen.ended
    again = opened()
    assert ended(again.jobs.get(chosen.id)).status == "cancelled"
    until(lambda: not list(chosen.folder.glob("input.*")))
    other = again.jobs.get(({runs, waits} - {chosen}).pop().id)
    again.jobs.cancel(other)
    assert [one["event"] for one in ended(other).events][-1] == "cancelled"


def test_progress_events_are_few_however_long_a_job_takes(service, asking):
    job = jobs.Job(service.jobs._root / "fit-0", "fit", {}, 0.0)
    service.jobs._database.add_job(job.id, "fit", 0.0, {}, None)
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
    reply = asking(service).get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": str(seen)})
    assert reply.text.startswith(f"id: {round(1000 * job.events[-1]['at'])}\nevent: done\n")


def test_event_ids_go_on_after_a_restart(opened, task):
    service = opened()
    job = fitted(service, task, evaluate=0)
    service.close()
    again = opened().jobs.get(job.id)
    persisted = [one for one in job.events if one["event"] in jobs.PERSISTED_EVENTS]
    assert again.events == persisted


def test_a_fit_measured_by_leaving_rows_out_keeps_no_time_of_a_text(service, task):
    job = fitted(service, replace(task, train=task.train[:4]))
    assert job.status == "done", job.events[-1]
    methods = service.tasks.injection(job.events[-1]["digest"]).worth["methods"]
    assert methods.keys() >= {"zero_shot", "anchored"}
    assert not any("milliseconds_per_query" in one for one in methods.values())
    card = (service.tasks._artefacts / job.events[-1]["digest"] / "README.md").read_text()
    assert "| zero_shot |" in card
