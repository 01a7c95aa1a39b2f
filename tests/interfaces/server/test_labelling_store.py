"""Labelling projects in SQLite: leases, answers, corrections, deletion, kills."""

import multiprocessing
import os
import signal

import pytest

from i2cl.errors import I2CLError
from i2cl.interfaces.server.labelling_store import Issue, LabellingStore, PoolText, Round

from .conftest import catch_refusal

TEXTS = [f"text {number}" for number in range(12)]
LABELS = ("good", "bad")


@pytest.fixture
def store(tmp_path):
    store = LabellingStore(tmp_path / "labelling.sqlite3")
    yield store
    store.close()


@pytest.fixture
def project(store):
    return store.create("films", LABELS, "{text} {label}", dict.fromkeys(TEXTS))


def ids(texts):
    return [text["id"] for text in texts]


def test_two_people_never_get_the_same_text(store, project):
    first, second = (store.lease(project, name, 5) for name in ("ann", "bob"))
    third = store.lease(project, "eve", 5)
    assert len({*ids(first), *ids(second), *ids(third)}) == len(first) + len(second) + len(third) == 12
    assert store.lease(project, "dan", 5) == []
    assert ids(store.lease(project, "ann", 5)) == ids(first)  # after a reload
    assert store.counts(project) == {"texts": 12, "labelled": 0, "skipped": 0, "labellers": 3}


def test_leases_expire(store, project, monkeypatch):
    mine = ids(store.lease(project, "ann", 12))
    monkeypatch.setattr("time.time", lambda: project.created + 3600)
    assert ids(store.lease(project, "bob", 12)) == mine


def test_text_of_another_person_is_refused(store, project):
    (text,) = store.lease(project, "ann", 1)
    error = catch_refusal("another person", store.answer, project, text["id"], "good", "bob")
    assert (error.status, error.code) == (409, "leased")
    store.answer(project, text["id"], "good", "ann")
    store.answer(project, text["id"], "good", "ann")  # a repeated request
    error = catch_refusal("already has the label 'good'", store.answer, project, text["id"], "bad", "bob")
    assert (error.status, error.code) == (409, "labelled")
    assert [(row.text, row.label) for row in store.labelled(project)] == [(text["text"], "good")]
    assert store.answers_since(project, 0) == 1


def test_undo_returns_the_last_text_of_the_same_person(store, project):
    first, second = store.lease(project, "ann", 2)
    (other,) = store.lease(project, "bob", 1)
    store.answer(project, first["id"], "good", "ann")
    store.answer(project, second["id"], None, "ann")
    store.answer(project, other["id"], "bad", "bob")
    assert store.counts(project)["skipped"] == 1
    assert store.undo(project, "ann") == second
    assert store.undo(project, "ann") == first
    assert {*ids(store.lease(project, "ann", 2))} == {first["id"], second["id"]}
    assert [row.label for row in store.labelled(project)] == ["bad"]


def test_undo_of_a_correction_returns_the_text_with_its_label(store, project):
    store.answer(project, 1, "good", "ann")
    store.answer(project, 1, "bad", "ann", replaces="good")
    undone = store.undo(project, "ann")
    assert (undone["id"], undone["label"]) == (1, "good")
    store.answer(project, 1, "bad", "ann", replaces=undone["label"])
    assert [row.label for row in store.labelled(project)] == ["bad"]


def test_corrections_replace_the_label_and_are_counted(store, project):
    store.correct(project, "  TEXT  0", "good", "feedback")
    store.correct(project, "text 0", "bad", "feedback")
    store.correct(project, "a new text", "good", "feedback")
    assert [(row.text, row.label) for row in store.labelled(project)] == [
        ("text 0", "bad"),
        ("a new text", "good"),
    ]
    assert store.answers_since(project, 0) == 3
    assert store.counts(project)["texts"] == 13


def test_proposals_come_first_and_issues_leave_the_list_once_confirmed(store, project):
    for text in (1, 2, 3):
        store.answer(project, text, "good", "ann")
    proposals = [(9, "bad", 0.5), (5, "good", 0.75)]
    issues = [Issue(1, "good", "bad", 0.25, (2,)), Issue(3, "good", "bad", 0.375)]
    store.save_round(
        project, Round(store.last_answer(project), 3, "tfidf", (0.5, 0.25, 0.75)), issues, proposals
    )
    first, second, third = store.lease(project, "ann", 3)
    assert first == {"id": 9, "text": "text 8", "label": None, "proposal": "bad", "confidence": 0.5}
    assert (second["id"], third["proposal"]) == (5, None)
    one, other = store.issues(project)
    assert one == {
        "id": 1,
        "text": "text 0",
        "label": "good",
        "suggested": "bad",
        "probability": 0.25,
        "near_duplicates": [{"id": 2, "text": "text 1", "label": "good"}],
    }
    store.answer(project, 1, "good", "ann", replaces="good")  # confirmed
    store.answer(project, other["id"], "bad", "ann", replaces="good")
    assert store.issues(project) == []
    assert store.rounds(project) == [Round(3, 3, "tfidf", (0.5, 0.25, 0.75))]


def test_candidates_exclude_labelled_and_leased_texts(store, project):
    (mine,) = store.lease(project, "ann", 1)
    store.answer(project, 3, "good", "bob")
    store.answer(project, 4, None, "bob")
    store.save_vectors([(3, b"abcd")])
    left = {one.id for one in store.candidates(project, 100)}
    assert left == {*range(1, 13)} - {mine["id"], 3, 4}
    assert store.candidates(project, 4) == store.candidates(project, 100)[:4]
    assert {one.id for one in store.taken(project)} == {mine["id"], 3}
    assert PoolText(3, "text 2", b"abcd", "good") in store.taken(project)


def test_deleted_texts_are_not_on_the_disk(store, tmp_path):
    secret = "the patient has a rare disease"
    project = store.create("secret", LABELS, "{text} {label}", {secret: "good"})
    store.create("kept", LABELS, "{text} {label}", {"harmless": None})
    assert any(secret.encode() in path.read_bytes() for path in tmp_path.iterdir())
    store.delete("secret")
    assert not any(secret.encode() in path.read_bytes() for path in tmp_path.iterdir())
    assert store.find("secret") is None
    assert store.labelled(project) == []
    store.save_round(project, Round(1, 1, None, None), [], [])  # of a job that was still running
    assert [one.name for one in store.projects()] == ["kept"]


def test_only_the_server_can_read_the_file(store, tmp_path):
    assert (tmp_path / "labelling.sqlite3").stat().st_mode & 0o077 == 0


def _label_and_die(path):
    store = LabellingStore(path)
    project = store.create("films", LABELS, "{text} {label}", dict.fromkeys(TEXTS))
    for text in store.lease(project, "ann", 5):
        store.answer(project, text["id"], "good", "ann")
    store._connection.execute("BEGIN IMMEDIATE")
    store._answer(12, "bad", "ann")  # not committed
    os.kill(os.getpid(), signal.SIGKILL)


def test_answers_survive_a_kill(tmp_path):
    path = tmp_path / "labelling.sqlite3"
    process = multiprocessing.get_context("fork").Process(target=_label_and_die, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    store = LabellingStore(path)
    assert [row.label for row in store.labelled(store.project("films"))] == ["good"] * 5
    store.close()


def test_damaged_file_is_reported(tmp_path):
    (tmp_path / "labelling.sqlite3").write_bytes(b"not a database " * 100)
    with pytest.raises(I2CLError, match="restore it from a backup, or remove it"):
        LabellingStore(tmp_path / "labelling.sqlite3")
