"""The model thread dies: requests fail, health checks fail, and the process exits with an error."""

import re
import threading
from concurrent.futures import wait

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from i2cl.interfaces.server.client import Client, ServerError
from processes import Program, until

from .conftest import TEXTS, error_of, make_injection
from .test_app import CLASSIFY, CLASSIFY_BODY
from .test_jobs import queue_fit
from .test_serve import address


class Died(BaseException):
    """Not even an Exception: nothing in the batcher expects it."""


def die(*_, **__):
    raise Died("a user's text")


@pytest.fixture
def dying(service, monkeypatch):
    """A service with a task, whose model thread dies at the next batch."""
    service.tasks.put("films", make_injection(service.decoder, 0))
    monkeypatch.setattr(service.batcher.pool, "score_rows", die)
    return service


def test_running_and_queued_requests_fail(dying):
    go, begun = threading.Event(), threading.Event()
    dying.batcher.run(lambda: (begun.set(), go.wait(30)))
    begun.wait(30)
    rows = dying.tasks.queries("films", TEXTS)[1]
    tickets = [dying.batcher.submit(rows, float(10**9)) for _ in range(3)]
    tickets.append(dying.batcher.submit_slices(rows))
    dying.decoder.token_budget = 1  # one row per batch: the others are still queued when the thread dies
    go.set()
    futures = [ticket.done for ticket in tickets]
    assert not wait(futures, 30).not_done
    assert {future.exception().code for future in futures} == {"model_failed"}


def test_running_work_fails(service):
    assert service.batcher.run(die).exception(30).code == "model_failed"


def test_new_requests_and_health_checks_answer_503(dying, make_client, caplog):
    client = make_client(dying)
    assert error_of(client.post(CLASSIFY, json=CLASSIFY_BODY)) == (503, "model_failed")
    for path in ("/healthz", "/health", "/readyz"):
        assert error_of(client.get(path)) == (503, "model_failed")
    reply = client.post(CLASSIFY, json=CLASSIFY_BODY)
    assert error_of(reply) == (503, "model_failed")
    assert "restarted" in reply.json()["error"]["message"]
    assert "the model thread has died (Died)" in caplog.text
    assert "a user's text" not in caplog.text + reply.text


def test_a_batcher_error_during_a_pause_is_not_attributed_to_the_fit(service, task, monkeypatch):
    service.tasks.put("other", make_injection(service.decoder, 0))
    monkeypatch.setattr(service.metrics, "batch", lambda **_: 1 / 0)
    job = queue_fit(service, task, method="i2cl", settings={"epochs": 5000})
    until(lambda: job.events[-1]["event"] == "step")
    ticket = service.batcher.submit(service.tasks.queries("other", TEXTS)[1], float(10**9))
    ticket.done.exception(30)
    until(lambda: not service.batcher.alive)
    service.close()
    assert not job.ended  # it runs again after the restart


FAILING = """
from i2cl.injections.pool import InjectionPool
def die(*_, **__):
    raise SystemExit("a fault")
InjectionPool.score_rows = die
from i2cl.interfaces.cli import main
main()
"""


def test_process_exits_with_an_error(tmp_path):
    from i2cl import Decoder

    make_injection(Decoder.from_pretrained("reference"), 0).save_pretrained(tmp_path / "films")
    program = Program(FAILING, "serve", "reference", "--tasks", tmp_path / "tasks", "--port", 0)
    client = Client(address(program), retries=0)
    with pytest.raises(ServerError) as refused:  # an upload answers a text first
        client.upload("films", tmp_path / "films")
    assert (refused.value.status, refused.value.code) == (503, "model_failed")
    code, _, err = program.wait()
    assert (code, "Traceback" in err) == (1, False), err
    assert re.search("model thread has died.*restart the server", err, re.DOTALL)
