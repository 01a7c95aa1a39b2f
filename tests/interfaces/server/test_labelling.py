"""Labelling over HTTP: projects, answers, rounds of fits, corrections, and the finished task."""

import csv
import io
import threading

import pytest

pytest.importorskip("fastapi")

from i2cl import encoders
from i2cl.interfaces.server import fits, labelling
from i2cl.interfaces.server.guard import Access
from i2cl.interfaces.server.labelling_store import Round
from i2cl.methods.anchored import Anchored
from processes import until

from .conftest import error_of, make_injection
from .test_authorization import ADMIN, READ, bearer
from .test_jobs import wait_until_ended

LABELS = ["positive", "negative"]
PROJECTS = "/v1/labelling/projects"
URL = f"{PROJECTS}/films"
FILMS = {"project": "films"}


@pytest.fixture(autouse=True)
def _short_fits(monkeypatch):
    """Fit in one step: these tests do not depend on the accuracy."""
    monkeypatch.setattr(
        fits, "make_injector", lambda *_: Anchored.from_options({"steps": 1, "say_label": False})
    )


def texts_of(task):
    return [row.text for row in task.train]


def gold(task, text):
    return next(task.labels[row.label] for row in task.train if row.text == text)


def create(client, given, **more):
    return client.post(PROJECTS, json={"name": "films", "labels": LABELS, "texts": given} | more)


def following(client, labeller="ann", count=10):
    """Return the next texts, after the first round."""

    def ask():
        reply = client.post("/v1/labelling/next", json=FILMS | {"labeller": labeller, "count": count}).json()
        return None if reply["waiting"] else reply

    return until(ask)["data"]


def answer(client, text, label, labeller="ann", **more):
    body = FILMS | {"labeller": labeller, "text": text["id"], "label": label} | more
    return client.post("/v1/labelling/answers", json=body)


def exported(client):
    return client.get("/v1/labelling/export", params=FILMS).text


def end_round(service):
    return wait_until_ended(labelling.latest_job(service.jobs, service.labelling.project("films")))


def label_ten(client, service, task, labeller="ann"):
    """Label ten texts by their gold labels, and wait for the round."""
    for text in following(client, labeller):
        assert answer(client, text, gold(task, text["text"]), labeller).status_code == 200
    return end_round(service)


def test_texts_become_a_served_task(client, service, task):
    made = create(client, [*texts_of(task), "", texts_of(task)[0].upper()])
    assert made.status_code == 201
    assert made.json()["left_out"] == {"unusable": 1, "too_long": 0, "repeated": 1}
    assert made.json()["texts"] == 24
    first = following(client)
    assert len(first) == 10
    assert {text["proposal"] for text in first} <= set(LABELS)
    assert all(0 < text["confidence"] <= 1 for text in first)
    job = label_ten(client, service, task)
    assert job.status == "done", job.events[-1]
    assert not list(job.folder.glob("input.*"))
    state = client.get(URL).json()
    assert (state["labelled"], sum(state["per_label"].values())) == (10, 10)
    assert [one["labels"] for one in state["rounds"]] == [10]
    assert 0 <= state["rounds"][0]["low"] <= state["rounds"][0]["accuracy"] <= state["rounds"][0]["high"] <= 1
    assert not {text["id"] for text in following(client)} & {text["id"] for text in first}
    rows = list(csv.DictReader(io.StringIO(exported(client))))
    assert [row["label"] for row in rows] == [gold(task, row["text"]) for row in rows]
    assert {row["text"] for row in rows} == {text["text"] for text in first}
    reply = client.post("/v1/labelling/finish", json=FILMS | {"name": "finished"})
    assert reply.status_code == 202
    fit = wait_until_ended(service.jobs.get(reply.json()["id"]))
    assert (fit.status, fit.events[-1]["demonstrations"]) == ("done", 10)
    reply = client.post("/v1/classify", json={"model": "finished", "input": "a warm film"})
    assert reply.json()["labels"] == LABELS


@pytest.mark.parametrize(("during", "labels"), [(10, [0, 10, 20]), (9, [0, 10])])
def test_ten_labels_during_a_round_start_the_next_one(client, service, task, monkeypatch, during, labels):
    create(client, texts_of(task))
    texts = following(client, count=20)
    end_round(service)
    started, released, followed = threading.Event(), threading.Event(), threading.Event()
    make_task, follow_up = labelling.task_of, service.jobs._on_end

    def wait(*given):
        started.set()
        assert released.wait(60)
        return make_task(*given)

    monkeypatch.setattr(labelling, "task_of", wait)

    def on_end(*given):  # also of the first round, if its thread is late
        follow_up(*given)
        if started.is_set():
            followed.set()

    monkeypatch.setattr(service.jobs, "_on_end", on_end)
    for text in texts[:10]:
        answer(client, text, gold(task, text["text"]))
    assert started.wait(60)
    for text in texts[10 : 10 + during]:
        answer(client, text, gold(task, text["text"]))
    released.set()  # from here on, no request starts a round
    assert followed.wait(60)
    assert end_round(service).status == "done"
    project = service.labelling.project("films")
    assert [one.labels for one in service.labelling.rounds(project)] == labels


def test_failing_to_queue_a_round_does_not_stop_later_rounds(
    open_service, make_client, task, monkeypatch, caplog
):
    monkeypatch.setattr(labelling, "queue_next_round", lambda *_, **__: 1 / 0)
    service = open_service()
    client = make_client(service)
    create(client, texts_of(task))
    assert label_ten(client, service, task).status == "done"
    assert "division by zero" in caplog.text


def test_rounds_propose_the_labels_that_have_a_text(client, service, task):
    create(client, texts_of(task), labels=["mixed", *LABELS])
    job = label_ten(client, service, task)
    assert (job.status, job.events[-1]["missing"]) == ("done", ["mixed"])
    state = client.get(URL).json()
    assert state["per_label"]["mixed"] == 0
    assert [one["labels"] for one in state["rounds"]] == [10]
    assert {text["proposal"] for text in following(client)} <= set(LABELS)


def test_the_only_text_of_a_label_counts_as_wrong(client, service, task):
    texts = texts_of(task)
    labels = [*(gold(task, text) for text in texts[:11]), "mixed"]
    rows = "text,label\n" + "".join(f"{text},{label}\n" for text, label in zip(texts, labels, strict=False))
    file = {"name": "films.csv", "content": rows}
    create(client, file, labels=["mixed", *LABELS], label_column="label")
    assert end_round(service).events[-1]["labels"] == 12
    (only,) = client.get(URL).json()["rounds"]
    right = 12 * only["accuracy"]
    assert right == pytest.approx(round(right))
    assert 0 < round(right) <= 11


def test_without_two_labels_the_base_model_chooses(client, service, task):
    create(client, texts_of(task))
    for text in following(client):
        answer(client, text, "positive")
    job = end_round(service)
    assert (job.status, job.events[-1]["missing"]) == ("done", ["negative"])
    reply = client.post("/v1/labelling/finish", json=FILMS)
    assert error_of(reply) == (409, "label_missing")
    assert reply.json()["error"]["hint"] == "label one text of each"
    finish = FILMS | {"omit_empty_labels": True}  # a single label is no task
    assert error_of(client.post("/v1/labelling/finish", json=finish)) == (409, "label_missing")
    assert following(client)[0]["proposal"] in LABELS


def test_finish_can_omit_labels_without_a_text(client, service, task):
    create(client, texts_of(task), labels=[*LABELS, "mixed"])
    label_ten(client, service, task)
    reply = client.post("/v1/labelling/finish", json=FILMS)
    assert error_of(reply) == (409, "label_missing")
    assert "'mixed'" in reply.json()["error"]["message"]
    reply = client.post("/v1/labelling/finish", json=FILMS | {"omit_empty_labels": True})
    assert wait_until_ended(service.jobs.get(reply.json()["id"])).status == "done"
    assert client.get("/v1/models/films").json()["labels"] == LABELS


@pytest.mark.parametrize("labels", [["positive"], LABELS])
def test_a_round_after_the_last_text_succeeds(client, service, task, labels):
    create(client, texts_of(task)[:10])
    for number, text in enumerate(following(client)):
        answer(client, text, labels[number % len(labels)])
    job = end_round(service)
    assert (job.status, job.events[-1]["labels"]) == ("done", 10), job.events[-1]
    assert following(client) == []


def test_a_failed_round_does_not_stop_the_labelling(client, service, task, monkeypatch):
    monkeypatch.setattr(labelling, "text_vectors", lambda *_: 1 / 0)
    create(client, texts_of(task))
    texts = following(client)
    assert [len(texts), texts[0]["proposal"]] == [10, None]
    assert end_round(service).status == "failed"
    assert answer(client, texts[0], "positive").json()["labelled"] == 1


def test_labels_are_reviewed_and_corrected(client, service, task):
    create(client, texts_of(task))
    (text, *_) = following(client)
    answer(client, text, "positive")
    project = service.labelling.project("films")
    issue = labelling.Issue(text["id"], "positive", "negative", 0.125)
    service.labelling.save_round(
        project, Round(service.labelling.last_answer(project), 1, None, None), [issue], []
    )
    (listed,) = client.get("/v1/labelling/review", params=FILMS).json()["data"]
    assert (listed["text"], listed["label"], listed["suggested"]) == (text["text"], "positive", "negative")
    assert client.get(URL).json()["issues"] == 1
    assert error_of(answer(client, text, "negative")) == (409, "labelled")
    assert answer(client, text, "negative", replaces="positive").status_code == 200
    assert client.get("/v1/labelling/review", params=FILMS).json()["data"] == []


def test_two_browsers_share_a_project(client, service, task):
    create(client, texts_of(task))
    (mine, *_), (other, *_) = following(client, "ann"), following(client, "bob")
    assert mine["id"] != other["id"]
    assert error_of(answer(client, other, "positive", "ann")) == (409, "leased")
    assert len(following(client, "eve")) == 4  # the rest of 24
    assert client.get(URL).json()["labellers"] == 3
    answer(client, mine, "positive", "ann")
    ann = FILMS | {"labeller": "ann"}
    assert client.post("/v1/labelling/undo", json=ann).json()["id"] == mine["id"]
    assert error_of(client.post("/v1/labelling/undo", json=ann)) == (409, "nothing_to_undo")
    assert answer(client, mine, None, "ann").json()["skipped"] == 1


def test_labels_in_the_file_are_imported(client, service, task):
    rows = "ticket,kind\nit crashes,negative\nvery nice,1\nmy cat,\nIT  crashes,positive\n"
    file = {"name": "tickets.csv", "content": rows}
    columns = {"text_column": "ticket", "label_column": "kind"}
    made = create(client, file, **columns).json()
    assert (made["texts"], made["labelled"], made["left_out"]["repeated"]) == (3, 2, 1)
    assert exported(client) == "text,label\nit crashes,negative\nvery nice,negative\n"
    assert [text["text"] for text in following(client)] == ["my cat"]
    ids = '[{"ticket": "it crashes", "kind": 0}, {"ticket": "very nice", "kind": 1}]'
    made = create(client, {"name": "tickets.json", "content": ids}, name="ids", **columns).json()
    assert made["labelled"] == 2
    wrong = create(
        client, {**file, "content": rows.replace("my cat,", "my cat,ugly")}, name="other", **columns
    )
    assert error_of(wrong) == (422, "unknown_label")
    assert "'ugly'" in wrong.text


@pytest.mark.parametrize(
    ("change", "status", "code", "words"),
    [
        ({"labels": ["positive"]}, 422, "bad_request", "at least 2"),
        ({"labels": ["positive", "positive"]}, 422, "bad_input", "given twice"),
        ({"texts": ["", " "]}, 422, "bad_rows", "no text can be used"),
        ({"texts": []}, 422, "bad_request", "at least 1"),
        ({"texts": {"name": "a.csv", "content": "body\na\n"}}, 422, "bad_rows", "no text column 'text'"),
        ({"texts": ["long " * 5000]}, 413, "text_too_long", "shorten"),
        (
            {"texts": {"name": "a.csv", "content": "text\na\n"}, "label_column": "kind"},
            422,
            "bad_rows",
            "a.csv: no column 'kind' to keep, the columns are text: correct its name",
        ),
        ({"template": "no fields"}, 422, "bad_input", "{text}"),
    ],
)
def test_bad_projects_are_refused_in_one_line(shared_client, change, status, code, words):
    reply = create(shared_client, ["a", "b"], **change)
    assert error_of(reply) == (status, code)
    assert words in reply.json()["error"]["message"]
    assert shared_client.get(PROJECTS).json()["data"] == []


def test_a_project_of_the_same_name_or_unknown_project_is_refused(client):
    create(client, ["a", "b"])
    assert error_of(create(client, ["c"])) == (409, "project_exists")
    assert [one["texts"] for one in client.get(PROJECTS).json()["data"]] == [2]
    assert error_of(client.get(f"{PROJECTS}/none")) == (404, "unknown_project")
    assert error_of(client.post("/v1/labelling/next", json={"project": "none", "labeller": "a"})) == (
        404,
        "unknown_project",
    )
    assert error_of(answer(client, {"id": 99}, "positive")) == (404, "unknown_text")
    assert error_of(answer(client, {"id": 1}, "ugly")) == (422, "unknown_label")


def test_corrections_of_answers_go_into_the_project(client, service):
    """The task "films" was uploaded; its first correction creates the project."""
    body = {"task": "films", "text": "a cold night", "label": "positive"}
    assert client.post("/v1/feedback", json=body).json()["labelled"] == 1
    client.post("/v1/feedback", json=body | {"label": "negative"})
    template = service.tasks.injection(service.tasks.entry("films").digest).task.template.format
    assert client.get(URL).json()["template"] == template
    assert exported(client) == "text,label\na cold night,negative\n"
    for wrong, status in (({"label": "ugly"}, 422), ({"text": " "}, 422), ({"text": "long " * 5000}, 413)):
        assert client.post("/v1/feedback", json=body | wrong).status_code == status
    assert error_of(client.post("/v1/feedback", json=body | {"task": "none"})) == (404, "unknown_task")


def test_deleting_a_project_removes_its_texts(client, service, task, tmp_path):
    create(client, ["a secret of the patient", *texts_of(task)])
    job = end_round(service)
    assert client.delete(URL).json() == {"id": "films", "object": "labelling", "deleted": True}
    assert client.get(PROJECTS).json()["data"] == []
    files = [path for path in (tmp_path / "tasks").rglob("*") if path.is_file()]
    assert job.folder / "job.json" in files
    assert not any(b"a secret of the patient" in path.read_bytes() for path in files)
    assert service.tasks.entry("films").name == "films"  # the task stays


def test_texts_are_not_logged(client, service, caplog):
    caplog.set_level("DEBUG")
    create(client, ["a secret of the patient", "dull"])
    end_round(service)
    answer(client, following(client)[0], "positive")
    client.post(
        "/v1/feedback", json={"task": "films", "text": "a secret of the patient", "label": "negative"}
    )
    assert "/v1/labelling" in caplog.text
    assert "secret" not in caplog.text


def test_labelling_needs_an_admin_token(service, make_client):
    client = make_client(service, Access({ADMIN: "admin", READ: "read"}))
    for method, path in (("GET", PROJECTS), ("GET", URL), ("GET", "/v1/labelling/export"), ("DELETE", URL)):
        assert error_of(client.request(method, path, headers=bearer(READ))) == (403, "read_token")
    for path in (PROJECTS, "/v1/labelling/next", "/v1/labelling/answers", "/v1/feedback"):
        assert error_of(client.post(path, json={}, headers=bearer(READ))) == (403, "read_token")


def test_read_only_server_has_no_projects(open_service, make_client):
    service = open_service()
    service.tasks.put("films", make_injection(service.decoder, 0))
    client = make_client(open_service(read_only=True))
    assert error_of(client.get(PROJECTS)) == (403, "read_only")
    assert error_of(create(client, ["a", "b"])) == (403, "read_only")


def test_projects_and_rounds_survive_a_restart(open_service, make_client, task):
    service = open_service()
    client = make_client(service)
    create(client, texts_of(task))
    texts = following(client)
    for text in texts:
        answer(client, text, gold(task, text["text"]))
    service.close()  # with a round queued or running
    service = open_service()
    client = make_client(service)
    assert end_round(service).events[-1]["labels"] == 10
    assert client.get(URL).json()["labelled"] == 10
    assert client.get(URL).json()["rounds"]


@pytest.mark.parametrize("same", [True, False])
def test_a_restarted_server_embeds_again_only_with_another_encoder(
    open_service, make_client, task, words_encoder, monkeypatch, same
):
    monkeypatch.setattr(encoders, "local_encoder", lambda: None)
    service = open_service(encoders=["words"])
    create(make_client(service), texts_of(task))
    assert end_round(service).status == "done"
    service.close()
    embedded, embed = [], labelling.text_vectors

    def counting(decoder, task, texts, *more):
        embedded.append(len(texts))
        return embed(decoder, task, texts, *more)

    monkeypatch.setattr(labelling, "text_vectors", counting)
    service = open_service(encoders=["words"] if same else [])
    assert label_ten(make_client(service), service, task).status == "done"
    assert embedded == ([1] if same else [1, len(texts_of(task))])


def test_typical_gain_shrinks_with_the_number_of_labels_and_near_perfection():
    few, many, perfect = (
        labelling.typical_gain(Round(0, labels, "tfidf", accuracy))
        for labels, accuracy in (
            (10, (0.5, 0.25, 0.75)),
            (80, (0.5, 0.375, 0.625)),
            (80, (1.0, 0.96875, 1.0)),
        )
    )
    assert few["low"] < many["low"] < 0 < many["gain"] < few["gain"] < few["high"] < 0.3
    assert perfect == {"gain": 0, "low": many["low"], "high": 0.03125}


def test_the_accuracy_curve_shows_only_rounds_of_the_latest_classifier():
    before, after = (Round(0, 10, name, (0.5, 0.25, 0.75)) for name in ("tfidf", "embeddings"))
    assert labelling.measured_rounds([before, before]) == [before, before]
    assert labelling.measured_rounds([before, after, Round(0, 20, None, None)]) == [after]
    assert labelling.measured_rounds([]) == []


@pytest.mark.parametrize(("encoders", "name"), [(["words"], "embeddings"), ([], "tfidf")])
def test_rounds_do_not_run_the_model(
    open_service, make_client, task, words_encoder, monkeypatch, encoders, name
):
    service = open_service(encoders=encoders)
    client = make_client(service)
    create(client, texts_of(task))
    texts = following(client)
    monkeypatch.setattr(type(service.decoder), "forward", lambda *_, **__: 1 / 0)
    for text in texts:
        answer(client, text, gold(task, text["text"]))
    job, state = end_round(service), client.get(URL).json()
    assert (job.status, state["classifier"]) == ("done", name), job.events[-1]
    assert state["rounds"][0]["accuracy"] > 0.5
    assert state["next_round"]["low"] < 0 <= state["next_round"]["gain"]
