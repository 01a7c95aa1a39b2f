"""The folder of tasks: all or nothing, whatever is sent and whatever ends the process."""

import errno
import json
import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from fitting import one_line
from i2cl.injections.pool import InjectionPool
from i2cl.interfaces.server.task_store import STATE, TaskStore, content_digest
from i2cl.storage import atomic

from .conftest import LINES, TAR, TEXTS, made, packed, refusal


@pytest.fixture
def opened_folder(decoder, tmp_path):
    def make(**options):
        given = {"most_resident": 10, "read_only": False, **options}
        return TaskStore(tmp_path / "tasks", InjectionPool(decoder), **given)

    return make


@pytest.fixture
def folder(opened_folder):
    return opened_folder()


def files(root):
    """Artefacts and names."""
    found = (root / STATE / "artefacts").rglob("*")
    names = json.loads((root / STATE / "tasks.json").read_text())
    return sorted(path.name for path in found if path.is_file()) + names


def test_a_name_is_an_alias_of_content(folder, decoder, tmp_path):
    first, again = folder.put("one", made(decoder, 0)), folder.put("two", made(decoder, 0))
    assert (
        first.digest
        == again.digest
        == content_digest(tmp_path / "tasks" / STATE / "artefacts" / first.digest)
    )
    assert [entry.name for entry in folder.entries()] == ["one", "two"]
    folder.delete("one")
    assert folder.injection(first.digest).task.labels == again.labels
    folder.delete("two")
    assert files(tmp_path / "tasks") == []


def test_what_is_replaced_goes_and_what_was_asked_of_it_is_answered(folder, decoder):
    before = made(decoder, 0)
    old = folder.put("a", before)
    _, rows = folder.queries("a", TEXTS)
    new = folder.put("a", made(decoder, 1))
    assert folder.entry("a") == new
    refusal("gone", folder.of_version, old.digest, TEXTS)
    result = torch.stack(folder.pool.score_queries(rows))
    torch.testing.assert_close(result, before.scores(decoder, TEXTS), rtol=1e-5, atol=1e-5)


def test_a_version_that_is_needed_stays(folder, decoder):
    old = folder.put("a", made(decoder, 0))
    folder.needed = lambda: {old.digest}
    folder.put("a", made(decoder, 1))
    assert len(folder.of_version(old.digest, TEXTS)) == len(TEXTS)
    folder.needed = frozenset
    folder.sweep()
    refusal("gone", folder.of_version, old.digest, TEXTS)


def test_what_was_not_used_for_longest_leaves_the_device_and_comes_back(opened_folder, decoder):
    folder = opened_folder(most_resident=2)
    digests = [folder.put(name, made(decoder, number)).digest for number, name in enumerate("abc")]
    for name in "abac":
        folder.queries(name, TEXTS)
    assert set(folder.pool) == {digests[0], digests[2]}
    assert folder.queries("b", TEXTS)[0].digest == digests[1]


@pytest.mark.parametrize("at", ["sync_to_disk", "write_text_atomic"])
def test_an_end_before_the_reply_leaves_all_as_it_was(opened_folder, decoder, tmp_path, monkeypatch, at):
    folder = opened_folder()
    folder.put("a", made(decoder, 0))
    before = files(tmp_path / "tasks")
    with monkeypatch.context() as patch:
        patch.setattr(f"i2cl.interfaces.server.task_store.{at}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            folder.put("a", made(decoder, 1))
    again = opened_folder()
    again.sweep()
    assert files(tmp_path / "tasks") == before
    assert again.queries("a", TEXTS)[0].labels == made(decoder, 0).task.labels


def test_it_is_synced_before_it_has_its_name(folder, decoder, tmp_path, monkeypatch):
    order, path = [], type(tmp_path)
    rename = path.rename
    monkeypatch.setattr(atomic.os, "fsync", lambda handle: order.append("sync"))
    monkeypatch.setattr(path, "rename", lambda *at: (order.append("rename"), rename(*at))[1])
    folder.put("a", made(decoder, 0))
    last = len(order) - 1 - order[::-1].index("rename")
    assert order[:last].count("sync") >= 3
    assert "sync" in order[last:]


def test_a_reader_sees_what_the_writer_does_and_changes_nothing(folder, opened_folder, decoder):
    reader = opened_folder(read_only=True)
    entry = folder.put("a", made(decoder, 0))
    assert reader.queries("a", TEXTS)[0] == entry
    assert refusal("", reader.put, "b", made(decoder, 1)).status == 403
    assert refusal("", reader.delete, "a").status == 403


@pytest.mark.parametrize("name", ["", " a", "a\n", ".", "..", "\ud800", "a" * 129, "a\u202e"])
def test_names_that_cannot_be_shown_are_refused(folder, decoder, name):
    refusal("invalid task name", folder.put, name, made(decoder, 0))


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a/b", "ünïcode 漢字", "..a", "CON"])
def test_any_other_name_is_fine(folder, decoder, name):
    folder.put(name, made(decoder, 0))
    assert folder.queries(name, TEXTS)[0].name == name


def test_an_artefact_of_another_model_is_refused(folder, decoder, tmp_path):
    other = made(decoder, 0)
    other = replace(other, base=replace(decoder.base, weights="0" * 16))
    assert refusal("made on", folder.put, "a", other).status == 422
    assert files(tmp_path / "tasks") == []


def test_damaged_database_is_reported(opened_folder, decoder, tmp_path):
    folder = opened_folder()
    folder.put("a", made(decoder, 0))
    folder.close()
    (tmp_path / "tasks" / STATE / "state.sqlite").write_bytes(b"x" * 8192)
    one_line("state.sqlite' is damaged .*restore it from a backup", opened_folder)


def test_missing_database_is_reported_before_artefacts_are_removed(opened_folder, decoder, tmp_path):
    folder = opened_folder()
    digest = folder.put("a", made(decoder, 0)).digest
    folder.close()
    (tmp_path / "tasks" / STATE / "state.sqlite").unlink()
    one_line("state.sqlite' is missing", opened_folder)
    assert (tmp_path / "tasks" / STATE / "artefacts" / digest).is_dir()


def test_database_of_a_later_version_is_not_touched(opened_folder, tmp_path):
    opened_folder().close()
    with closing(sqlite3.connect(tmp_path / "tasks" / STATE / "state.sqlite")) as database:
        database.execute("PRAGMA user_version = 99")
    one_line("written by a later version of i2cl: upgrade i2cl", opened_folder)


@pytest.mark.parametrize("read_only", [False, True])
def test_folder_of_an_earlier_version_is_reported(opened_folder, tmp_path, read_only):
    for name in ("names", "artefacts"):
        (tmp_path / "tasks" / name).mkdir(parents=True)
    (tmp_path / "tasks" / "names" / f"{'0' * 32}.json").write_text("{}")
    one_line("written by an earlier version", partial(opened_folder, read_only=read_only))
    assert not (tmp_path / "tasks" / STATE).exists()


def test_upload_repairs_a_damaged_version(folder, decoder, tmp_path):
    digest = folder.put("a", made(decoder, 0)).digest
    folder._used.clear()
    (tmp_path / "tasks" / STATE / "artefacts" / digest / "injection.json").write_text("{}")
    assert refusal("upload it again", folder.queries, "a", TEXTS).code == "damaged"
    folder.put("a", made(decoder, 0))
    assert folder.queries("a", TEXTS)[0].digest == digest


def test_loading_a_task_does_not_block_loaded_ones(folder, decoder, monkeypatch):
    cold, hot = (folder.put(name, made(decoder, number)) for number, name in enumerate(["cold", "hot"]))
    folder.queries("hot", TEXTS)
    read, go, begun = folder.injection, threading.Event(), threading.Event()

    def slow(digest):
        begun.set()
        go.wait(30)
        return read(digest)

    monkeypatch.setattr(folder, "injection", slow)
    with ThreadPoolExecutor() as pool:
        loading = [pool.submit(folder.queries, "cold", TEXTS) for _ in range(2)]
        begun.wait(30)
        assert folder.queries("hot", TEXTS)[0] == hot
        assert not any(one.done() for one in loading)
        go.set()
        assert {one.result(30)[0] for one in loading} == {cold}


@pytest.mark.parametrize("read_only", [False, True])
def test_one_version_answers_however_often_replaced(folder, opened_folder, decoder, monkeypatch, read_only):
    """Each time that a version was looked up it has gone when it is read, but for the last."""
    folder.put("a", made(decoder, 0))
    asking = opened_folder(read_only=True) if read_only else folder
    of_version, replaced = asking.of_version, []

    def meanwhile(digest, texts):
        if len(replaced) < 5:
            replaced.append(folder.put("a", made(decoder, len(replaced) + 1)).digest)
        return of_version(digest, texts)

    monkeypatch.setattr(asking, "of_version", meanwhile)
    entry, rows = asking.queries("a", TEXTS)
    assert (entry.digest, len(rows)) == (replaced[-1], len(TEXTS))


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EDQUOT, 507), (errno.EIO, 500)])
@pytest.mark.parametrize("at", ["task_store.sync_to_disk", "jobs.sync_to_disk"])
def test_what_the_disk_refuses_is_the_servers_fault_and_names_no_path(
    service, asking, decoder, tmp_path, monkeypatch, number, status, at
):
    service.tasks.put("films", made(decoder, 0))
    made(decoder, 1).save_pretrained(tmp_path / "topics")

    def fails(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(f"i2cl.interfaces.server.{at}", fails)
    client = asking(service)
    if at == "task_store.sync_to_disk":
        reply = client.put("/v1/tasks/new", content=packed(tmp_path / "topics"), headers=TAR)
    else:
        reply = client.post("/v1/batches?model=films", content=b'{"input": "a"}', headers=LINES)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "server_error"
    assert str(tmp_path) not in reply.text
    assert [entry.name for entry in service.tasks.entries()] == ["films"]
    assert service.jobs.all() == []


def test_a_damaged_or_foreign_version_is_the_servers_fault(service, asking, decoder, tmp_path, monkeypatch):
    client = asking(service)
    body = {"model": "a", "input": TEXTS[0]}
    entry = service.tasks.put("a", made(decoder, 0))
    folder = tmp_path / "tasks" / STATE / "artefacts" / entry.digest
    (folder / "injection.json").write_text("{}")
    reply = client.post("/v1/classify", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "damaged")
    assert str(tmp_path) not in reply.text
    other = made(decoder, 1)
    with monkeypatch.context() as patch:
        patch.setattr(service.tasks, "loaded", lambda _: None)
        service.tasks.put("a", replace(other, base=replace(decoder.base, weights="0" * 16)))
    reply = client.post("/v1/classify", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "unusable")


def test_a_name_in_another_unicode_form_is_the_same_task(folder, decoder):
    composed, decomposed = "Auditor\u00eda", "Auditori\u0301a"
    entry = folder.put(decomposed, made(decoder, 0))
    assert entry.name == composed
    assert folder.entry(decomposed).digest == folder.entry(composed).digest == entry.digest
    folder.delete(decomposed)
    refusal("no task", folder.entry, composed)
