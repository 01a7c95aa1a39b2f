"""The task store and task folders: atomic changes, versions, eviction and damaged files."""

import errno
import json
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("fastapi")

from fitting import raises
from i2cl.injections.pool import InjectionPool
from i2cl.interfaces.server.task_store import STATE, TaskStore, content_digest

from .conftest import LINES, TAR, TEXTS, catch_refusal, error_of, make_injection, tar_of
from .test_app import CLASSIFY
from .test_jobs import answers, wait_until_ended


@pytest.fixture
def open_store(decoder, tmp_path):
    def make(**options):
        given = {"max_resident_tasks": 10, "read_only": False, **options}
        return TaskStore(tmp_path / "tasks", InjectionPool(decoder), **given)

    return make


@pytest.fixture
def store(open_store):
    return open_store()


def files(root):
    """Return the names of all artefact files, and the published tasks."""
    found = (root / STATE / "artefacts").rglob("*")
    names = json.loads((root / STATE / "tasks.json").read_text())
    return sorted(path.name for path in found if path.is_file()) + names


def test_equal_artefacts_are_stored_once(store, decoder, tmp_path):
    first, again = store.put("one", make_injection(decoder, 0)), store.put("two", make_injection(decoder, 0))
    assert (
        first.digest
        == again.digest
        == content_digest(tmp_path / "tasks" / STATE / "artefacts" / first.digest)
    )
    assert [entry.name for entry in store.entries()] == ["one", "two"]
    store.delete("one")
    assert store.injection(first.digest).task.labels == again.labels
    store.delete("two")
    assert files(tmp_path / "tasks") == []


def test_queued_queries_of_a_replaced_task_are_answered(store, decoder):
    before = make_injection(decoder, 0)
    old = store.put("a", before)
    _, rows = store.queries("a", TEXTS)
    new = store.put("a", make_injection(decoder, 1))
    assert store.entry("a") == new
    catch_refusal("has been removed", store.queries_of_version, old.digest, TEXTS)
    result = torch.stack([row.log_probs for row in store.pool.score_rows(rows)])
    torch.testing.assert_close(result, before.log_probs(decoder, TEXTS), rtol=1e-5, atol=1e-5)


def test_least_recently_used_task_is_evicted_and_reloaded(open_store, decoder):
    store = open_store(max_resident_tasks=2)
    digests = [store.put(name, make_injection(decoder, number)).digest for number, name in enumerate("abc")]
    for name in "abac":
        store.queries(name, TEXTS)
    assert set(store.pool) == {digests[0], digests[2]}
    assert store.queries("b", TEXTS)[0].digest == digests[1]


@pytest.mark.parametrize("at", ["sync_to_disk", "write_text_atomic"])
def test_kill_before_the_response_leaves_the_store_unchanged(open_store, decoder, tmp_path, monkeypatch, at):
    store = open_store()
    store.put("a", make_injection(decoder, 0))
    before = files(tmp_path / "tasks")
    with monkeypatch.context() as patch:
        patch.setattr(f"i2cl.interfaces.server.task_store.{at}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.put("a", make_injection(decoder, 1))
    again = open_store()
    assert files(tmp_path / "tasks") == before
    assert again.queries("a", TEXTS)[0].labels == make_injection(decoder, 0).task.labels


def test_a_read_only_store_follows_the_writer_and_changes_nothing(store, open_store, decoder):
    reader = open_store(read_only=True)
    entry = store.put("a", make_injection(decoder, 0))
    assert reader.queries("a", TEXTS)[0] == entry
    assert catch_refusal("", reader.put, "b", make_injection(decoder, 1)).status == 403
    assert catch_refusal("", reader.delete, "a").status == 403


@pytest.mark.parametrize("name", ["", " a", "a\n", ".", "..", "\ud800", "a" * 129, "a\u202e"])
def test_names_that_cannot_be_shown_are_refused(store, decoder, name):
    catch_refusal("invalid task name", store.put, name, make_injection(decoder, 0))


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a/b", "ünïcode 漢字", "..a", "CON"])
def test_any_other_name_is_fine(store, decoder, name):
    store.put(name, make_injection(decoder, 0))
    assert store.queries(name, TEXTS)[0].name == name


def test_an_artefact_of_another_model_is_refused(store, decoder, tmp_path):
    other = make_injection(decoder, 0)
    other = replace(other, base=replace(decoder.base, weights="0" * 16))
    assert catch_refusal("made on", store.put, "a", other).status == 422
    assert files(tmp_path / "tasks") == []


def test_damaged_names_are_reported(open_store, decoder, tmp_path):
    open_store().put("a", make_injection(decoder, 0))
    (tmp_path / "tasks" / STATE / "tasks.json").write_bytes(b"x" * 8192)
    raises("tasks.json' is damaged .*restore it from a backup", open_store)


def test_missing_names_are_reported_before_artefacts_are_removed(open_store, decoder, tmp_path):
    digest = open_store().put("a", make_injection(decoder, 0)).digest
    (tmp_path / "tasks" / STATE / "tasks.json").unlink()
    raises("tasks.json' is missing", open_store)
    assert (tmp_path / "tasks" / STATE / "artefacts" / digest).is_dir()


def test_upload_repairs_a_damaged_version(store, decoder, tmp_path):
    digest = store.put("a", make_injection(decoder, 0)).digest
    store._last_used.clear()
    (tmp_path / "tasks" / STATE / "artefacts" / digest / "injection.json").write_text("{}")
    assert catch_refusal("upload it again", store.queries, "a", TEXTS).code == "damaged"
    store.put("a", make_injection(decoder, 0))
    assert store.queries("a", TEXTS)[0].digest == digest


def test_a_job_reads_its_copy_of_a_version_that_is_being_removed(store, decoder, tmp_path):
    digest = store.put("a", make_injection(decoder, 0)).digest
    store.copy("a", tmp_path / "copies")
    store._last_used.clear()
    (tmp_path / "tasks" / STATE / "artefacts" / digest / "injection.json").unlink()
    queries = store.queries_of_version(digest, TEXTS, tmp_path / "copies")
    assert len(queries) == len(TEXTS)


def test_loading_a_task_does_not_block_loaded_ones(store, decoder, monkeypatch):
    cold, hot = (
        store.put(name, make_injection(decoder, number)) for number, name in enumerate(["cold", "hot"])
    )
    store.queries("hot", TEXTS)
    read, go, begun = store.injection, threading.Event(), threading.Event()

    def slow(digest, copies):
        begun.set()
        go.wait(30)
        return read(digest, copies)

    monkeypatch.setattr(store, "injection", slow)
    with ThreadPoolExecutor() as pool:
        loading = [pool.submit(store.queries, "cold", TEXTS) for _ in range(2)]
        begun.wait(30)
        assert store.queries("hot", TEXTS)[0] == hot
        assert not any(one.done() for one in loading)
        go.set()
        assert {one.result(30)[0] for one in loading} == {cold}


@pytest.mark.parametrize("read_only", [False, True])
def test_replaced_task_is_looked_up_again(store, open_store, decoder, monkeypatch, read_only):
    """The version is replaced between look-up and reading five times in a row."""
    store.put("a", make_injection(decoder, 0))
    make_client = open_store(read_only=True) if read_only else store
    queries_of_version, replaced = make_client.queries_of_version, []

    def meanwhile(digest, texts):
        if len(replaced) < 5:
            replaced.append(store.put("a", make_injection(decoder, len(replaced) + 1)).digest)
        return queries_of_version(digest, texts)

    monkeypatch.setattr(make_client, "queries_of_version", meanwhile)
    entry, rows = make_client.queries("a", TEXTS)
    assert (entry.digest, len(rows)) == (replaced[-1], len(TEXTS))


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)])
@pytest.mark.parametrize("at", ["task_store.sync_to_disk", "jobs.sync_to_disk"])
def test_storage_error_is_a_server_error_without_paths(
    service, make_client, decoder, tmp_path, monkeypatch, number, status, at
):
    service.tasks.put("films", make_injection(decoder, 0))
    make_injection(decoder, 1).save_pretrained(tmp_path / "topics")

    def fails(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(f"i2cl.interfaces.server.{at}", fails)
    client = make_client(service)
    if at == "task_store.sync_to_disk":
        reply = client.put("/v1/tasks/new", content=tar_of(tmp_path / "topics"), headers=TAR)
    else:
        reply = client.post("/v1/batches?model=films", content=b'{"input": "a"}', headers=LINES)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "server_error"
    assert str(tmp_path) not in reply.text
    assert [entry.name for entry in service.tasks.entries()] == ["films"]
    assert service.jobs.all() == []


def test_damaged_or_foreign_version_is_a_server_error(service, make_client, decoder, tmp_path, monkeypatch):
    client = make_client(service)
    body = {"model": "a", "input": TEXTS[0]}
    entry = service.tasks.put("a", make_injection(decoder, 0))
    store = tmp_path / "tasks" / STATE / "artefacts" / entry.digest
    (store / "injection.json").write_text("{}")
    reply = client.post("/v1/classify", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "damaged")
    assert str(tmp_path) not in reply.text
    other = make_injection(decoder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(service.tasks, "prepare", lambda _: None)
        service.tasks.put("a", replace(other, base=replace(decoder.base, weights="0" * 16)))
    reply = client.post("/v1/classify", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "unusable")


def test_unicode_forms_of_a_name_are_the_same_task(store, decoder):
    composed, decomposed = "Auditor\u00eda", "Auditori\u0301a"
    entry = store.put(decomposed, make_injection(decoder, 0))
    assert entry.name == composed
    assert store.entry(decomposed).digest == store.entry(composed).digest == entry.digest
    store.delete(decomposed)
    catch_refusal("no task", store.entry, composed)


def classify(client, name):
    return client.post(CLASSIFY, json={"model": name, "input": list(TEXTS)})


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.fixture
def root(decoder, tmp_path):
    """Folder with a task folder, as `i2cl fit -o tasks/films` writes it."""
    make_injection(decoder, 0).save_pretrained(tmp_path / "tasks" / "films")
    return tmp_path / "tasks"


@pytest.mark.parametrize("read_only", [False, True])
def test_task_folder_is_served(root, open_service, make_client, read_only):
    service = open_service(read_only=read_only)
    before = contents(root / "films")
    client = make_client(service)
    assert [one["id"] for one in client.get("/v1/tasks").json()["data"]] == ["films"]
    reply = classify(client, "films").json()
    expected = make_injection(service.decoder, 0).predict(service.decoder, list(TEXTS))
    assert [one["label"] for one in reply["data"]] == expected
    assert client.get("/v1/tasks/films").json()["source"] == "folder"
    assert contents(root / "films") == before


def test_added_replaced_and_removed_folders_are_noticed(root, open_service, make_client, decoder):
    client = make_client(open_service())
    make_injection(decoder, 1).save_pretrained(root / "topics")
    assert classify(client, "topics").json()["labels"] == ["world", "sports", "company"]
    make_injection(decoder, 2).save_pretrained(root / "topics")
    assert classify(client, "topics").json()["labels"] == ["no", "yes"]
    shutil.rmtree(root / "topics")
    assert error_of(classify(client, "topics")) == (404, "unknown_task")


def test_folder_is_neither_deleted_nor_replaced_over_http(root, open_service, make_client):
    client = make_client(open_service())
    before = contents(root / "films")
    assert error_of(client.delete("/v1/tasks/films")) == (409, "folder_task")
    upload = client.put("/v1/tasks/films", content=tar_of(root / "films"), headers=TAR)
    assert error_of(upload) == (409, "folder_task")
    fit = {"name": "films", "template": "{text} {label}", "examples": [{"text": "a", "label": "b"}]}
    assert error_of(client.post("/v1/tasks", json=fit)) == (409, "folder_task")
    assert contents(root / "films") == before


def test_unusable_folders_are_logged_and_other_tasks_are_served(
    root, open_service, make_client, decoder, caplog
):
    (root / "notes").mkdir()
    shutil.copytree(root / "films", root / "broken")
    (root / "broken" / "injection.json").write_text("{}")
    other = replace(make_injection(decoder, 0), base=replace(decoder.base, weights="0" * 16))
    other.save_pretrained(root / "other")
    with caplog.at_level(logging.WARNING):
        client = make_client(open_service())
    lines = [record.getMessage() for record in caplog.records if "is not served" in record.getMessage()]
    assert [name for name in ("broken", "notes", "other") for line in lines if f"/{name} is" in line] == [
        "broken",
        "notes",
        "other",
    ]
    assert [one["id"] for one in client.get("/v1/tasks").json()["data"]] == ["films"]
    reply = classify(client, "other")
    assert error_of(reply) == (500, "unusable")
    assert str(root) not in reply.text


def test_name_that_came_over_http_takes_precedence(root, open_service, caplog, decoder):
    service = open_service()
    digest = service.tasks.put("topics", make_injection(decoder, 1)).digest
    service.close()
    make_injection(decoder, 2).save_pretrained(root / "topics")
    again = open_service()
    assert again.tasks.entry("topics").digest == digest
    assert "a task of this name came over HTTP" in caplog.text


def test_batch_keeps_the_version_of_a_folder_that_is_replaced(
    root, open_service, make_client, decoder, monkeypatch
):
    service = open_service()
    digest = service.tasks.entry("films").digest
    with monkeypatch.context() as patch:
        patch.setattr(service.jobs, "_run", lambda _: None)  # the process ends before the job begins
        reply = make_client(service).post("/v1/batches?model=films", content=b'{"input": "a"}', headers=LINES)
        service.close()
    make_injection(decoder, 4).save_pretrained(root / "films")
    again = open_service()
    job = wait_until_ended(again.jobs.get(reply.json()["id"]))
    assert [one["digest"] for one in answers(job)] == [digest]
    assert again.tasks.entry("films").digest != digest
    again.close()
    assert not list((root / STATE / "artefacts").iterdir())  # the copy is not kept


@pytest.mark.parametrize(
    "name", [".i2cl-server", "..", "films/", "./films", "films/../films", "漢" * 128, "\0"]
)
def test_names_do_not_lead_out_of_the_folder(root, open_service, name):
    service = open_service()
    with pytest.raises(ValueError, match="no task"):
        service.tasks.entry(name)
