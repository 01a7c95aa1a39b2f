"""Decision APIs of the plugin, with stand-ins for vLLM and for its own routes."""

from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="the extra serve")

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from i2cl.interfaces.decisions import DECISIONS, SYSTEMONE

from .standins import in_a_loop, injection_for
from .test_routes import call, make_app, saved, started  # noqa: F401 - fixture

TEXT = "this film"
LABELS = {"mood": ("positive", "negative"), "quality": ("good", "bad", "fair")}


def own_routes():
    """Return an application with stand-ins for vLLM's own decision routes, and the requests that they get."""
    app, requests = FastAPI(), []

    @app.post(DECISIONS)
    @app.post(SYSTEMONE)
    async def own(request: Request):
        body = await request.json()
        requests.append(body)
        if body.get("model") == "unsupported":
            raise NotImplementedError
        if body.get("model") == "unknown":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        answer = {"type": "choice", "choice": "first"}
        if isinstance(body["questions"], dict):
            answers = dict.fromkeys(body["questions"], answer)
            return {"answers": answers, "usage": {"input_tokens": 50, "output_tokens": 1}, "model": "own"}
        answers = [answer] * len(body["questions"])
        return {"answers": answers, "usage": {"input_tokens": 50, "output_tokens": 1}, "model": "own"}

    @app.exception_handler(RequestValidationError)
    async def invalid(_request, error):
        return JSONResponse({"error": {"message": str(error.errors()[0]["loc"])}}, 400)

    return app, requests


@pytest.fixture
def app(monkeypatch):
    """Application of a vLLM that has no decision routes, such as 0.32 for ``/v1/decisions``."""
    return make_app(monkeypatch, FastAPI())


@pytest.fixture
def app_and_requests(monkeypatch):
    """Application of a vLLM with its own decision routes, and the requests that they got."""
    app, requests = own_routes()
    return make_app(monkeypatch, app), requests


@pytest.fixture
def injections(base, task, tmp_path):
    """Two saved tasks by name."""
    injections = {}
    for seed, (name, labels) in enumerate(LABELS.items()):
        named = replace(task, name=name, labels=labels, train=(), test=())
        injections[name] = injection_for(base, named, seed).with_head(temperature=1.5)
        injections[name].save_pretrained(tmp_path / name)
    return injections


async def serve(app, base, tmp_path):
    engine = await started(app, base, *((name, str(tmp_path / name)) for name in LABELS))
    engine.go.set()
    return engine


def choice(name, *values):
    choices = [{"value": value} for value in values]
    return {"type": "choice", "name": name, "instructions": "Which?", "choices": choices}


async def decide(app, *questions, model="base", **fields):
    body = {"model": model, "input": TEXT, "questions": questions} | fields
    status, reply, _ = await call(app, "POST", DECISIONS, body)
    return status, reply


async def systemone(app, questions, **fields):
    status, reply, _ = await call(app, "POST", SYSTEMONE, {"state": TEXT, "questions": questions} | fields)
    return status, reply


def probabilities(injections, base, name):
    values = injections[name].log_probs(base, [TEXT])[0].softmax(-1).tolist()
    return pytest.approx(dict(zip(LABELS[name], values, strict=True)), abs=1e-5)


def by_value(answer):
    return {item["value"]: item["probability"] for item in answer["probabilities"]}


@in_a_loop
async def test_questions_are_answered_by_the_tasks_of_their_names(app, base, injections, tmp_path):
    await serve(app, base, tmp_path)
    status, reply = await decide(app, *(choice(name, *LABELS[name]) for name in LABELS))
    assert status == 200
    assert reply["model"] == "base"
    for name, answer, diagnostics in zip(LABELS, reply["answers"], reply["diagnostics"], strict=True):
        assert by_value(answer) == probabilities(injections, base, name)
        assert (diagnostics["answered_by"], diagnostics["task"]) == ("task", name)
        mass = injections[name].label_log_mass(base, [TEXT]).exp().item()
        assert diagnostics["label_mass"] == pytest.approx(mass, rel=1e-4)
    criteria = {name: {"type": "choice", "criteria": dict.fromkeys(LABELS[name])} for name in LABELS}
    status, reply = await systemone(app, criteria)
    assert (status, reply["model"]) == (200, "base")
    for name in LABELS:
        assert reply["answers"][name]["probabilities"] == probabilities(injections, base, name)


@pytest.mark.parametrize("fields", [{"model": "mood"}, {"vllm_xargs": {"i2cl": "mood"}}])
@in_a_loop
async def test_a_request_may_name_the_task(app, base, injections, tmp_path, fields):
    await serve(app, base, tmp_path)
    status, reply = await decide(app, choice("other", *LABELS["mood"]), **fields)
    assert (status, by_value(reply["answers"][0])) == (200, probabilities(injections, base, "mood"))
    question = {"other": {"type": "choice", "criteria": dict.fromkeys(LABELS["mood"])}}
    status, reply = await systemone(app, question, **fields)
    assert reply["answers"]["other"]["probabilities"] == probabilities(injections, base, "mood")


@in_a_loop
async def test_questions_for_one_task_share_their_prompts(app, base, injections, tmp_path):
    engine = await serve(app, base, tmp_path)
    await decide(app, choice("mood", *LABELS["mood"]))
    alone = engine.ended
    first, second = choice("", *LABELS["mood"]), choice("x", *reversed(LABELS["mood"]))
    _, reply = await decide(app, first, second, model="mood")
    assert engine.ended == 2 * alone
    assert by_value(reply["answers"][0]) == by_value(reply["answers"][1])


@in_a_loop
async def test_other_questions_are_answered_by_vllm(app_and_requests, base, injections, tmp_path):
    app, requests = app_and_requests
    await serve(app, base, tmp_path)
    questions = [choice("place", "a", "b"), choice("mood", *LABELS["mood"]), choice("quality", "good", "x")]
    status, reply = await decide(app, *questions)
    assert status == 200
    assert requests == [{"model": "base", "input": TEXT, "questions": [questions[0], questions[2]]}]
    assert [item["answered_by"] for item in reply["diagnostics"]] == ["vllm", "task", "vllm"]
    assert [answer["choice"] for answer in reply["answers"]][::2] == ["first", "first"]
    assert by_value(reply["answers"][1]) == probabilities(injections, base, "mood")
    assert reply["usage"]["input_tokens"] > 50
    mood, place = {"type": "choice", "criteria": dict.fromkeys(LABELS["mood"])}, {"type": "noul"}
    _, reply = await systemone(app, {"place": place, "mood": mood})
    assert requests[1] == {"state": TEXT, "questions": {"place": place}}
    assert [*reply["answers"]] == ["place", "mood"]
    assert reply["answers"]["mood"]["probabilities"] == probabilities(injections, base, "mood")
    assert reply["diagnostics"]["place"]["answered_by"] == "vllm"


@in_a_loop
async def test_requests_without_a_task_reach_vllm_unchanged(app_and_requests, base, injections, tmp_path):
    app, requests = app_and_requests
    engine = await serve(app, base, tmp_path)
    body = {"state": [1], "questions": {"x": {"type": "box"}}, "seed": 3}
    status, reply, _ = await call(app, "POST", SYSTEMONE, body)
    assert (status, reply["model"], requests) == (200, "own", [body])
    status, reply = await decide(app, choice("x", "a", "b"), model="unknown")
    assert (status, reply) == (404, {"error": {"message": "no such model"}})
    assert not engine.ended


@in_a_loop
async def test_an_error_of_vllm_is_the_answer_for_the_whole_request(
    app_and_requests, base, injections, tmp_path
):
    app, _ = app_and_requests
    engine = await serve(app, base, tmp_path)
    status, _ = await decide(app, choice("x", "a", "b"), choice("mood", *LABELS["mood"]), model="unknown")
    assert (status, engine.ended) == (404, 0)


@in_a_loop
async def test_questions_that_nobody_can_answer_are_refused(
    app, app_and_requests, base, injections, tmp_path
):
    await serve(app, base, tmp_path)
    status, reply = await decide(app, choice("place", "a", "b"))
    assert (status, reply["error"]["code"]) == (400, "no_task")
    assert "loaded: mood, quality" in reply["error"]["message"]
    status, reply = await decide(app_and_requests[0], choice("place", "a", "b"), model="unsupported")
    assert (status, reply["error"]["code"]) == (400, "no_task")


@pytest.mark.parametrize("fields", [{"model": "mood"}, {"vllm_xargs": {"i2cl": "mood"}}])
@in_a_loop
async def test_the_plain_model_never_answers_for_a_named_task(
    app_and_requests, base, injections, tmp_path, fields
):
    app, requests = app_and_requests
    await serve(app, base, tmp_path)
    status, reply = await decide(app, choice("other", "a", "b"), **fields)
    assert (status, reply["error"]["code"]) == (400, "unknown_option")
    status, reply = await systemone(app, {"mood": {"type": "noul"}}, stream=True, **fields)
    assert (status, reply["error"]["message"]) == (400, "('stream',)")
    assert not requests


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"vllm_xargs": {"i2cl": "moods"}}, 404, "did you mean 'mood'"),
        ({"vllm_xargs": {"i2cl": None}}, 400, "None is not a task name"),
        ({"state": " "}, 400, "text 1 is empty"),
        ({"state": "film " * 100}, 413, "shorten it"),
        ({"images": ["a.png"]}, 400, "images is not supported"),
    ],
)
@in_a_loop
async def test_errors_have_the_shape_of_the_route(app, base, injections, tmp_path, body, status, message):
    await serve(app, base, tmp_path)
    question = {"mood": {"type": "choice", "criteria": dict.fromkeys(LABELS["mood"])}}
    answered, reply = await systemone(app, question, **body)
    assert answered == status
    assert message in reply["error"]["message"]
    assert reply["error"]["code"] == status
