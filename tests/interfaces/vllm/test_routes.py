"""Routes of the plugin in a separate application, with a replacement for vLLM's engine."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra serve")

from fastapi import FastAPI

from i2cl import Injection, with_temperature
from i2cl.interfaces.vllm import frontend, plugin, routes
from i2cl.interfaces.vllm.engine import ASLEEP
from i2cl.interfaces.vllm.support import DIGEST

from .standins import LLM, in_a_loop, injection_for, parameters, vllm_config


class Engine(LLM):
    """``AsyncLLM``: holds each prompt until the test releases it, and counts the prompts that it holds."""

    def __init__(self, decoder, folder):
        super().__init__(decoder, folder)
        self.model_config = self.llm_engine.model_config
        self.vllm_config = vllm_config(scheduler_config__max_num_seqs=16)
        self.vllm_config.scheduler_config.max_num_batched_tokens = 4000
        self.inside, self.most, self.digests, self.ended = 0, 0, [], 0
        self.go = asyncio.Event()

    async def collective_rpc(self, method, args):
        return super().collective_rpc(method, args)

    async def generate(self, prompt, params, name):
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await self.go.wait()
            await asyncio.sleep(0)
            result = self.answer(tuple(prompt["prompt_token_ids"]), params)
            self.digests.append(params.extra_args[DIGEST])
            yield result
        finally:
            self.inside -= 1
            self.ended += 1


def make_app(monkeypatch, app):
    """Attach the plugin's routes to an application, without any task."""
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.serve", "vllm.entrypoints.serve.utils"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    api_utils = SimpleNamespace(with_cancellation=lambda handler: handler)  # tested with vLLM itself
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.serve.utils.api_utils", api_utils)
    monkeypatch.setattr(plugin, "install_in_server", lambda: None)
    monkeypatch.setattr(frontend, "TASKS", frontend.ServedTasks())
    monkeypatch.setattr(routes, "TASKS", frontend.TASKS)
    monkeypatch.setattr(frontend.ServedTask, "parameters", parameters)
    monkeypatch.setenv(routes.ADMIN_KEY_ENV, "key")
    before = [*app.router.routes]
    routes.Routes().attach_router(app)
    # as vLLM does: routes of a plugin replace others with the same path
    added = [route for route in app.router.routes if route not in before]
    replaced = {route.path for route in added}
    app.router.routes[:] = [route for route in before if route.path not in replaced] + added
    return app


@pytest.fixture
def app(monkeypatch):
    return make_app(monkeypatch, FastAPI())


async def started(app, base, *injections):
    engine = Engine(base, base.name)
    await routes.Routes().init_state(engine, app.state, None)
    for name, injection in injections:
        await routes._load(app.state, name, injection)
    return engine


async def call(app, method, path, body=None):
    """Return a request as a server passes it to the application."""
    sent, parts = [], [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        return parts.pop() if parts else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    await app(scope | {"http_version": "1.1", "scheme": "http", "root_path": ""}, receive, send)
    result = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(result), dict(sent[0]["headers"])


async def classify(app, model, texts):
    return await call(app, "POST", "/v1/i2cl/classify", {"model": model, "input": texts})


@pytest.fixture
def saved(base, task, tmp_path):
    """Two versions of a task, as folders."""
    for seed in (0, 1):
        injection_for(base, task, seed).save_pretrained(tmp_path / str(seed))
    return tmp_path


async def until(condition):
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


@in_a_loop
async def test_below_min_confidence_the_label_is_empty_and_probabilities_stay(app, base, task, tmp_path):
    with_temperature(injection_for(base, task, 0), 3.0).save_pretrained(tmp_path / "warm")
    warm = Injection.from_pretrained(tmp_path / "warm")

    (await started(app, base, ("mood", str(tmp_path / "warm")))).go.set()
    path, body = "/v1/i2cl/classify", {"model": "mood", "input": ["good", "this film", "bad"]}
    plain = (await call(app, "POST", path, body))[1]["data"]
    least = max(max(one["probs"]) for one in plain) - 1e-9
    result = (await call(app, "POST", path, body | {"min_confidence": least}))[1]["data"]
    statuses = [(await call(app, "POST", path, body | {"min_confidence": bad}))[0] for bad in (0, 1.5)]
    wanted = warm.log_probs(base, body["input"]).softmax(-1)
    found_probs = torch.tensor([one["probs"] for one in plain])
    torch.testing.assert_close(found_probs, wanted, rtol=0, atol=1e-5)
    sure = [max(one["probs"]) >= least for one in plain]
    assert sorted(set(sure)) == [False, True]
    for before, after, kept in zip(plain, result, sure, strict=True):
        assert after == before | ({} if kept else {"label": "", "labels": []})
    assert statuses == [422, 422]


@in_a_loop
async def test_classify_keeps_its_version_during_reloads(app, base, task, saved):
    texts = ["this film", "good", "bad indeed"] * 4

    engine = await started(app, base, ("mood", str(saved / "0")))
    first, version = frontend.TASKS.get("mood").edit.digest, frontend.TASKS.get("mood").digest
    running = asyncio.create_task(classify(app, "mood", texts))
    await until(lambda: engine.inside == 4)  # the rest of its prompts are not even in the engine
    await routes._load(app.state, "mood", str(saved / "1"))
    assert (await call(app, "DELETE", "/v1/i2cl/tasks/mood"))[0] == 200
    assert (await classify(app, "mood", texts))[0] == 404
    engine.go.set()
    status, reply, headers = await running
    assert (status, len(reply["data"])) == (200, len(texts))
    assert headers[b"x-i2cl-digest"].decode() == version
    assert engine.digests == [first] * engine.ended
    assert engine.ended > len(texts)  # their labels have several tokens
    assert not engine.loaded
    wanted = injection_for(base, task, 0).log_probs(base, texts).softmax(-1)
    result = torch.tensor([one["probs"] for one in reply["data"]], dtype=wanted.dtype)
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-5)


@in_a_loop
async def test_oversized_input_is_413_with_row_limit_and_hint(app, base, saved):
    engine = await started(app, base, ("mood", str(saved / "0")))
    engine.go.set()
    long = "film " * 100
    asked = (["good", long, long], ["good"] * 2049, [], "good")
    long, many, none, fine = [await classify(app, "mood", texts) for texts in asked]
    error = long[1]["error"]
    assert (long[0], error["type"], error["code"]) == (413, "invalid_request_error", "text_too_long")
    assert error["message"].startswith("text 2 takes ")
    assert " tokens with its prompt, and 59 fit into the context: " in error["message"]
    assert error["message"].endswith(": shorten it")
    error = many[1]["error"]
    assert (many[0], error["code"], error["hint"]) == (
        413,
        "too_many_texts",
        "split them over several requests",
    )
    assert error["message"] == f"the request has 2049 texts, but the limit is 2048: {error['hint']}"
    assert (none[0], fine[0]) == (422, 200)
    assert 0 < len(engine.digests) < 10  # of one text


@in_a_loop
async def test_a_disconnect_cancels_only_its_own_request(app, base, saved):
    engine = await started(app, base, ("mood", str(saved / "0")))
    bulk = asyncio.create_task(classify(app, "mood", ["good"] * 200))
    await until(lambda: engine.inside == 4)
    single = asyncio.create_task(classify(app, "mood", "good"))
    await until(app.state.i2cl_limiter._turn.locked)
    bulk.cancel()  # as vLLM does when the client leaves
    with pytest.raises(asyncio.CancelledError):
        await bulk
    assert engine.ended == 4
    await until(lambda: engine.inside > 0)
    engine.go.set()
    assert (await single)[0] == 200
    assert engine.ended - 4 == len(engine.digests) < 10
    assert not app.state.i2cl_limiter._prompts


@in_a_loop
async def test_large_requests_share_the_batch(app, base, saved):
    engine = await started(app, base, ("mood", str(saved / "0")))
    ended = []

    async def asked(name, texts):
        assert (await classify(app, "mood", texts))[0] == 200
        ended.append(name)

    engine.go.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(asked("bulk", ["good"] * 100))
        await until(lambda: engine.inside == 4)
        for number in range(4):
            group.create_task(asked(f"single {number}", "good"))
    assert ended[-1] == "bulk"
    assert engine.most == 16 // 4


@in_a_loop
async def test_a_failed_prompt_ends_its_request_and_frees_capacity(app, base, saved):
    class GoneError(Exception):
        """vLLM's error for an engine that has ended."""

    engine = await started(app, base, ("mood", str(saved / "0")))
    engine.go.set()
    answer = engine.answer
    engine.answer = lambda *_: (_ for _ in ()).throw(GoneError)
    with pytest.raises(GoneError):
        await classify(app, "mood", ["good"] * 9)
    engine.answer = answer
    assert (await classify(app, "mood", ["good"] * 9))[0] == 200


@in_a_loop
async def test_versions_with_different_priors_have_different_digests(app, base, task, tmp_path):
    engine = await started(app, base)
    engine.go.set()
    probabilities, digests = [], []
    for prior in ((0.5, -0.5), (-0.5, 0.5)):
        injection = injection_for(base, task, 0).with_head(bias=prior)
        injection.save_pretrained(tmp_path / "mood")
        body = {"name": "mood", "artefact": str(tmp_path / "mood")}
        described = (await call(app, "POST", "/v1/i2cl/tasks", body))[1]
        _, reply, headers = await classify(app, "mood", "this film")
        assert headers[b"x-i2cl-digest"].decode() == described["digest"]
        digests.append(described["digest"])
        probabilities.append(reply["data"][0]["probs"])
        wanted = injection.log_probs(base, ["this film"])[0].softmax(-1).tolist()
        assert probabilities[-1] == pytest.approx(wanted, abs=1e-5)
    assert digests[0] != digests[1]
    assert probabilities[0] != probabilities[1]


@pytest.mark.parametrize("reason", ["abort", "error"])
@in_a_loop
async def test_a_classify_that_the_engine_interrupts_is_503(app, base, saved, reason):
    engine = await started(app, base, ("mood", str(saved / "0")))
    engine.go.set()
    output = SimpleNamespace(finish_reason=reason, logprobs=None)

    async def interrupted(prompt, params, name):
        yield SimpleNamespace(outputs=[output])

    engine.generate = interrupted
    status, reply, headers = await classify(app, "mood", ["good"] * 3)
    assert (status, reply["error"]["code"], headers[b"retry-after"]) == (503, "interrupted", b"5")
    assert "ended this request" in reply["error"]["message"]


@in_a_loop
async def test_loading_into_a_sleeping_engine_is_503_and_changes_nothing(app, base, saved):
    engine = await started(app, base, ("mood", str(saved / "0")))
    before = frontend.TASKS.get("mood").digest

    async def asleep(method, args):
        raise RuntimeError(f"Call to collective_rpc method failed: {ASLEEP}")

    engine.collective_rpc = asleep
    body = {"name": "mood", "artefact": str(saved / "1")}
    status, reply, _ = await call(app, "POST", "/v1/i2cl/tasks", body)
    assert (status, reply["error"]["message"]) == (503, ASLEEP)
    assert frontend.TASKS.get("mood").digest == before


@pytest.mark.parametrize("name", ["team/mood", "a b/c", "mood"])
@in_a_loop
async def test_every_name_that_can_be_loaded_can_be_dropped(app, base, saved, name):
    await started(app, base)
    body = {"name": name, "artefact": str(saved / "0")}
    assert (await call(app, "POST", "/v1/i2cl/tasks", body))[0] == 200
    status, reply, _ = await call(app, "DELETE", f"/v1/i2cl/tasks/{name}")
    assert (status, reply["name"], frontend.TASKS.by_name) == (200, name, {})
    assert (await call(app, "DELETE", f"/v1/i2cl/tasks/{name}"))[0] == 404


@in_a_loop
async def test_the_limiter_bounds_prompts_and_tokens():
    limiter, inside, peaks = routes.PromptLimiter(4, 100), [], []

    async def run(size):
        inside.append(size)
        peaks.append((len(inside), sum(inside)))
        await asyncio.sleep(0)
        inside.remove(size)
        limiter.leave(size)

    async with asyncio.TaskGroup() as group:
        for size in [10] * 20 + [40] * 20 + [5000]:  # the last one exceeds the limit and runs alone
            await limiter.enter(size)
            group.create_task(run(size))
    assert max(count for count, _ in peaks) == 4
    assert max(tokens for _, tokens in peaks[:-1]) <= 100
    assert peaks[-1] == (1, 5000)


@in_a_loop
async def test_a_cancelled_waiter_releases_its_place():
    limiter = routes.PromptLimiter(1, 10)
    await limiter.enter(10)
    cancelled, waiting = (asyncio.create_task(limiter.enter(10)) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    limiter.leave(10)
    await asyncio.wait_for(waiting, 60)
