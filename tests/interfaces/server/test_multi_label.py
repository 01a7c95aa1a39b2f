"""Multi-label tasks on the server: answers, and what it refuses."""

import pytest
import torch

pytest.importorskip("fastapi")

from i2cl import Example, Task, Template
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble

from .conftest import TEXTS

SETS = ((0, 2), (1,), (0,), ())
ROWS = [Example.multi_label(text, ids) for text, ids in zip(TEXTS, SETS, strict=False)]
TASK = Task(
    "mixed", ("good", "bad", "unsure"), Template("Review: {text}\nSentiment:{label}"), multi_label=True
)


@pytest.fixture(params=["llm", "llm,tfidf"])
def injection(request, service):
    config = EnsembleConfig(experts=request.param)
    made = anchor(service.decoder, TASK, ROWS, AnchoredConfig(steps=1))
    made = fit_ensemble(made, config, WeightPrior(0.4, 0.2), ROWS, "cpu")
    service.tasks.put("mixed", made)
    return made


def test_classify_returns_every_label_above_its_threshold(client, service, injection):
    reply = client.post("/v1/classify", json={"model": "mixed", "input": list(TEXTS)}).json()
    assert reply["multi_label"]
    assert reply["labels"] == list(TASK.labels)
    wanted = injection.log_probs(service.decoder, list(TEXTS)).exp()
    found = torch.tensor([row["probs"] for row in reply["data"]])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    words = injection.predict(service.decoder, list(TEXTS))
    assert [tuple(row["labels"]) for row in reply["data"]] == words
    assert [row["label"] for row in reply["data"]] == [";".join(one) for one in words]
    (listed,) = [task for task in client.get("/v1/tasks").json()["data"] if task["id"] == "mixed"]
    assert listed["multi_label"]


@pytest.mark.usefixtures("injection")
def test_chat_and_decisions_are_refused(client):
    chat = {"model": "mixed", "messages": [{"role": "user", "content": TEXTS[0]}]}
    options = [{"value": "good"}, {"value": "bad"}]
    question = {"type": "choice", "instructions": "Which one?", "choices": options}
    decide = {"model": "mixed", "input": TEXTS[0], "questions": [question]}
    for path, body in (("/v1/chat/completions", chat), ("/v1/decisions", decide)):
        reply = client.post(path, json=body)
        assert reply.status_code in {400, 422}
        assert "/v1/classify" in reply.json()["error"]["message"], reply.text


@pytest.mark.usefixtures("injection")
def test_a_restarted_server_keeps_thresholds(service, open_service):
    before = service.tasks.entry("mixed")
    service.close()
    assert open_service().tasks.entry("mixed") == before
