"""Task folders in the served folder."""

import logging
import shutil

import pytest

pytest.importorskip("fastapi")

from dataclasses import replace

from i2cl.interfaces.server.task_store import STATE

from .conftest import LINES, TAR, TEXTS, make_injection, tar_of
from .test_app import CLASSIFY, error_of
from .test_jobs import answers, wait_until_ended


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


def test_unusable_folders_are_logged_and_the_others_served(root, open_service, make_client, decoder, caplog):
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
