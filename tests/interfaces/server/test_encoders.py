"""Tasks with a sentence encoder, which has to be enabled on the server."""

from importlib.util import find_spec

import pytest

from fitting import raises
from i2cl import encoders
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble
from i2cl.interfaces.server.fits import SharedDecoder
from plugin import WordsEncoder
from processes import until

from .conftest import TAR, TEXTS, make_injection, tar_of

REFUSED = "encoder 'words' is not enabled on this server (enabled: none): start the server with --encoder"


def fit_body(task, **more):
    rows = [{"text": row.text, "label": task.labels[row.label]} for row in task.train]
    return {
        "name": "both",
        "template": task.template.format,
        "examples": rows,
        "shots": 2,
        "evaluate": 4,
    } | more


def fit_injection(service, task):
    config = EnsembleConfig(encoder="words")
    plain = make_injection(service.decoder, 0)
    return fit_ensemble(plain, config, WeightPrior(0.5, 0.5), task.sample(2, 0), "cpu")


def answers(client, name):
    reply = client.post("/v1/classify", json={"model": name, "input": list(TEXTS)})
    assert reply.status_code == 200, reply.text
    return [one["probs"] for one in reply.json()["data"]]


@pytest.mark.parametrize("options", [{}, {"settings": {"encoder": "words"}}])
def test_fit_uses_the_encoder_of_the_server(open_service, make_client, task, words_encoder, options):
    service = open_service(encoders=["words", "others"])
    client = make_client(service)
    job = client.post("/v1/tasks", json=fit_body(task, **options)).json()
    until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "done")
    injection = service.tasks.injection(service.tasks.entry("both").digest)
    assert client.get("/v1/tasks/both").json()["ensemble"] == injection.ensemble
    assert injection.head.embeddings.encoder == "words"
    assert "ensemble" in injection.evaluation["methods"]
    service.tasks.put("plain", make_injection(service.decoder, 0))
    expected = injection.log_probs(service.decoder, TEXTS).softmax(-1).tolist()
    for actual, wanted in zip(answers(client, "both"), expected, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-5)


def test_requests_run_while_a_fit_embeds_its_texts(
    open_service, make_client, task, words_encoder, monkeypatch
):
    pauses, pause = [], SharedDecoder.pause

    def pause_and_count(decoder):
        pauses.append(decoder.job.events[-1]["event"])
        pause(decoder)

    monkeypatch.setattr(SharedDecoder, "pause", pause_and_count)
    monkeypatch.setattr(encoders, "PROGRESS_TEXTS", 1)
    service = open_service(encoders=["words"])
    client = make_client(service)
    body = fit_body(task, experts=["embeddings"], evaluate=0)
    job = client.post("/v1/tasks", json=body).json()
    until(lambda: client.get(f"/v1/jobs/{job['id']}").json()["status"] == "done")
    (embedding,) = [one for one in service.jobs.get(job["id"]).events if one["event"] == "embedding"]
    assert embedding["texts"] == 2 * len(task.labels)
    assert pauses.count("embedding") == embedding["texts"]


def test_tasks_with_an_encoder_that_is_not_enabled_are_refused(
    open_service, make_client, task, words_encoder, tmp_path
):
    service = open_service()
    fit_injection(service, task).save_pretrained(tmp_path / "new")
    client = make_client(service)
    body = tar_of(tmp_path / "new")
    settings = {"encoder": "words"}
    for reply in (
        client.put("/v1/tasks/both", content=body, headers=TAR),
        client.post("/v1/tasks", json=fit_body(task, settings=settings)),
        client.post("/v1/tasks", json=fit_body(task, settings=settings, check=True)),
    ):
        assert (reply.status_code, REFUSED in reply.text) == (422, True), reply.text
    other = open_service(tmp_path / "second", encoders=["words"])
    assert make_client(other).put("/v1/tasks/both", content=body, headers=TAR).status_code == 200
    wanted = answers(make_client(other), "both")
    other.close()
    again = open_service(tmp_path / "second", encoders=["words"])
    assert answers(make_client(again), "both") == [pytest.approx(one, abs=1e-6) for one in wanted]
    again.close()
    without = make_client(open_service(tmp_path / "second"))  # the encoder is not enabled
    reply = without.post("/v1/classify", json={"model": "both", "input": "a"})
    assert (reply.status_code, "cannot be used by this server" in reply.text) == (500, True)


def test_encoder_is_identified_by_its_vectors(open_service, make_client, task, words_encoder, tmp_path):
    service = open_service(encoders=["elsewhere"])
    injection = fit_injection(service, task)
    injection.save_pretrained(tmp_path / "new")
    client = make_client(service)
    body = tar_of(tmp_path / "new")
    assert client.put("/v1/tasks/both", content=body, headers=TAR).status_code == 200
    expected = injection.log_probs(service.decoder, TEXTS).softmax(-1).tolist()
    for actual, wanted in zip(answers(client, "both"), expected, strict=True):
        assert actual == pytest.approx(wanted, abs=1e-5)
    words_encoder(WordsEncoder(turned=1))
    reply = client.put("/v1/tasks/other", content=body, headers=TAR)
    assert (reply.status_code, "not enabled on this server (enabled: 'elsewhere')" in reply.text) == (
        422,
        True,
    )


def test_server_does_not_start_with_a_missing_encoder(open_service, tmp_path, monkeypatch):
    folder, wrong = tmp_path / "tasks", [str(tmp_path / "none")]
    with monkeypatch.context() as patch:
        patch.setattr("i2cl.errors.find_spec", lambda module: None)
        raises(r"a sentence encoder needs .*'i2cl\[embeddings\]'", open_service, folder, encoders=wrong)
    assert not folder.exists()
    if find_spec("sentence_transformers") is None:  # an import would take seconds
        pytest.skip("sentence-transformers is not installed")
    raises("encoder folder .*none' does not exist", open_service, folder, encoders=wrong)
    assert not folder.exists()
