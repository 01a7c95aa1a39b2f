"""Tasks by name, admission and classification, with a front end that stands in for vLLM's."""

import asyncio
import copy
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from fitting import one_line, weighted
from i2cl.interfaces.vllm import frontend, prompts
from i2cl.interfaces.vllm.engine import DROP, LOAD
from i2cl.interfaces.vllm.slots import DIGEST

from .standins import LLM, injection_for, parameters, params, vllm_config


@pytest.fixture
def llm(base, monkeypatch):
    monkeypatch.setattr(frontend, "TASKS", frontend.ServedTasks())
    monkeypatch.setattr(frontend, "parameters", parameters)
    return LLM(base, base.name)


TEXTS = ("this film", "nobody expected the river to rise", "good")


@pytest.mark.parametrize("caching", [True, False])
def test_mixed_tasks_match_the_library_scores(llm, base, task, caching):
    llm.llm_engine.vllm_config.cache_config.enable_prefix_caching = caching
    one, other = (injection_for(base, task, seed) for seed in (0, 1))
    whole = replace(other, task=replace(task, labels=("best film yet", "best film ever"))).with_head(
        scoring="sequence"
    )
    other = other.with_head(bias=(0.5, -0.5), temperature=1.75)
    words = weighted(base, whole)
    held = {"one": one, "other": other, "whole": whole, "words": words}
    for name, injection in held.items():
        frontend.load(llm, name, injection)
    assert llm.sent == [LOAD] * 4
    texts = [text for text in TEXTS for _ in held]
    result = frontend.classify(llm, texts, list(held) * len(TEXTS))
    for place, (text, name) in enumerate(zip(texts, list(held) * len(TEXTS), strict=True)):
        wanted = held[name].log_probs(base, [text])[0]
        torch.testing.assert_close(result[place].scores, wanted, rtol=0, atol=1e-5)
        assert result[place].label == held[name].predict(base, [text])[0]


def test_many_labels_are_split_over_several_prompts(llm, base, task, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_LABEL_TOKENS", 2)
    labels = ("positive", "negative", "good", "bad", "this")
    many = injection_for(base, replace(task, labels=labels, train=(), test=()))
    frontend.load(llm, "many", many)
    (result,) = frontend.classify(llm, TEXTS[:1], ["many"])
    torch.testing.assert_close(result.scores, many.log_probs(base, TEXTS[:1])[0], rtol=0, atol=1e-5)


def test_a_name_is_looked_up_for_every_request(llm, base, task):
    asked = params(i2cl="a", other=1)
    mine = asked.extra_args
    before = copy.deepcopy(mine)
    frontend.load(llm, "a", injection_for(base, task, 0))
    frontend.TASKS.admit(asked)
    first = asked.extra_args[DIGEST]
    frontend.load(llm, "a", injection_for(base, task, 1))
    frontend.TASKS.admit(asked)
    assert asked.extra_args[DIGEST] != first
    assert asked.extra_args["other"] == 1
    assert mine == before
    assert llm.sent == [LOAD, LOAD, DROP]
    assert set(llm.held) == {asked.extra_args[DIGEST]}


def test_an_edit_that_two_names_share_stays_until_both_are_gone(llm, base, task):
    for name in ("a", "b"):
        frontend.load(llm, name, injection_for(base, task))
    frontend.drop(llm, "a")
    assert llm.held
    frontend.drop(llm, "b")
    assert not llm.held
    one_line(r"no task 'b' is loaded \(of 0\)", frontend.drop, llm, "b")


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"i2cl": "moods"}, r"no task 'moods' is loaded \(of 1\): did you mean 'mood'\?"),
        ({"i2cl": 3}, "3 is not a task name"),
        ({"i2cl": ["mood"]}, "is not a task name"),
        ({DIGEST: "0" * 32}, "cannot be set by clients"),
    ],
)
def test_requests_for_unknown_tasks_are_rejected(llm, base, task, extra, reason):
    frontend.load(llm, "mood", injection_for(base, task))
    one_line(reason, frontend.TASKS.admit, SimpleNamespace(extra_args=extra))
    for fine in (None, {}, {"other": 1}):
        asked = SimpleNamespace(extra_args=fine)
        frontend.TASKS.admit(asked)
        assert asked.extra_args == fine


def test_a_request_keeps_its_task_version(llm, base, task):
    """Under reloads and a drop, until nobody holds it."""
    one, other = (injection_for(base, task, seed) for seed in (0, 1))
    frontend.load(llm, "a", one)
    served = frontend.TASKS.get("a")
    digest = served.packed.digest
    with frontend.TASKS.in_use(served):
        frontend.load(llm, "a", other)
        frontend.drop(llm, "a")
        each = served.label_prompts.prompts((5, 6, 7), prompts.EngineLimits.of(vllm_config()))[0]
        assert llm.answer(each.ids, parameters(served, each))
        assert digest in llm.held
        frontend.load(llm, "a", one)
        frontend.load(llm, "a", other)
        assert digest in llm.held
    frontend.load(llm, "b", other)
    assert set(llm.held) == {frontend.TASKS.get("a").packed.digest}


def test_beam_search_rejects_tasks_and_verify_calls_the_original(llm):
    beams = partial(frontend.wrap_beam_search, lambda request, *args: args)
    assert beams(SimpleNamespace(vllm_xargs=None), 4) == (4,)
    assert beams(SimpleNamespace(vllm_xargs={"other": 1}), 4) == (4,)
    one_line("beam search does not support tasks", beams, SimpleNamespace(vllm_xargs={"i2cl": "mood"}), 4)
    seen = []
    verify = partial(frontend.wrap_verify, lambda params, *args: seen.append(args))
    verify(params(), "config")
    assert seen == [("config",)]
    one_line("no task", verify, params(i2cl="a"), "config")


class Body(BaseModel):
    """A request of vLLM's, which keeps fields that it does not know."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None


class BodyWithTasks(Body):
    vllm_xargs: dict[str, str] | None = None


def checked(body):
    """What ``BaseServing._check_model`` returns on a server of the model "base"."""

    async def original(serving, request):
        return None if request.model in {None, "base"} else f"no model {request.model}"

    serving = SimpleNamespace(create_error_response=lambda message: message)
    return asyncio.run(frontend.wrap_check_model(original, serving, body))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (Body(model="base", vllm_xargs={"i2cl": "mood"}), "route ignores tasks .*: send the texts to"),
        (Body(model="base", i2cl="mood"), "'i2cl' is not a field of this route: send .*classify$"),
        (BodyWithTasks(i2cl="mood"), r'not a field .*classify, or name the task in "vllm_xargs"'),
        (Body(model="mood"), "'mood' is a task, not a model: send the texts to .*classify$"),
        (BodyWithTasks(model="mood"), "'mood' is a task, not a model: .* in \"vllm_xargs\": "),
    ],
)
def test_a_task_that_vllm_would_ignore_is_rejected(llm, base, task, body, problem):
    frontend.load(llm, "mood", injection_for(base, task))
    assert re.search(problem, checked(body))


def test_requests_without_a_misplaced_task_pass_as_before(llm, base, task):
    for name in ("mood", "base"):  # a task may have the model's name
        frontend.load(llm, name, injection_for(base, task))
    for body in (Body(), Body(model="base", other=1, vllm_xargs={"other": "x"}), Body(vllm_xargs=None)):
        assert checked(body) is None
    assert checked(BodyWithTasks(model="base", vllm_xargs={"i2cl": "mood"})) is None
    assert checked(Body(model="else")) == "no model else"


def test_a_task_of_another_model_and_bad_questions_are_refused(llm, base, task):
    other = injection_for(base, task)
    other = replace(other, base=replace(other.base, weights="0" * 16))
    one_line("weights", frontend.load, llm, "a", other)
    one_line("needs a name", frontend.load, llm, " ", injection_for(base, task))
    assert not llm.sent
    assert not frontend.TASKS.served
    frontend.load(llm, "a", other, force=True)
    frontend.load(llm, "a", injection_for(base, task))
    for texts, names, reason in (
        (["x"], [], "1 texts, but 0 tasks"),
        ([" "], ["a"], "text 1 is empty"),
        (["x"], ["b"], "no task 'b'"),
    ):
        one_line(reason, frontend.classify, llm, texts, names)
