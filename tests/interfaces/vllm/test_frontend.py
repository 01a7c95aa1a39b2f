"""Front end with stand-ins for vLLM: loaded tasks, admission and classification."""

import asyncio
import copy
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel, ConfigDict

from fitting import raises, weighted
from i2cl import Example
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble, plain_injection
from i2cl.interfaces.vllm import frontend
from i2cl.interfaces.vllm.engine import DROP, LOAD
from i2cl.interfaces.vllm.support import DIGEST

from .standins import LLM, injection_for, parameters, params


@pytest.fixture
def llm(base, monkeypatch):
    monkeypatch.setattr(frontend, "TASKS", frontend.ServedTasks())
    monkeypatch.setattr(frontend.ServedTask, "parameters", parameters)
    return LLM(base, base.name)


TEXTS = ("this film", "nobody expected the river to rise", "good")


def test_mixed_tasks_match_the_library(llm, base, task):
    plain, other = (injection_for(base, task, seed) for seed in (0, 1))
    several_tokens = replace(task, labels=("best film yet", "best film ever"))
    full_sequence = replace(other, task=several_tokens).with_head(scoring="sequence")
    other = other.with_head(bias=(0.5, -0.5), temperature=1.75)
    injections = {
        "plain": plain,
        "other": other,
        "whole": full_sequence,
        "words": weighted(base, full_sequence),
    }
    for name, injection in injections.items():
        frontend.load(llm, name, injection)
    assert llm.sent == [LOAD] * 4
    rows = [(text, name) for text in TEXTS for name in injections]
    answers = frontend.classify(llm, *map(list, zip(*rows, strict=True)))
    for (text, name), answer in zip(rows, answers, strict=True):
        injection = injections[name]
        expected = injection.log_probs(base, [text])[0]
        torch.testing.assert_close(answer.log_probs, expected, rtol=0, atol=1e-5)
        assert answer.label == injection.predict(base, [text])[0]
        if name == "words":
            assert answer.label_mass is None
        else:
            mass = injection.label_log_mass(base, [text]).exp().item()
            assert answer.label_mass == pytest.approx(mass, rel=1e-4)


def test_task_without_the_llm_is_refused(llm, base, task):
    shown = (Example("good", 0), Example("bad", 1))
    plain, config = plain_injection(base, task, shown), EnsembleConfig(experts=("tfidf",))
    without_llm = fit_ensemble(plain, config, WeightPrior(0.4, 0.2), shown, "cpu")
    raises("has no LLM part", frontend.load, llm, "texts", without_llm)
    assert not llm.sent


def test_many_labels_are_split_over_several_prompts(llm, base, task, monkeypatch):
    monkeypatch.setattr(frontend, "MAX_LABEL_TOKENS", 2)
    labels = ("positive", "negative", "good", "bad", "this")
    many = injection_for(base, replace(task, labels=labels, train=(), test=()))
    frontend.load(llm, "many", many)
    (answer,) = frontend.classify(llm, TEXTS[:1], ["many"])
    torch.testing.assert_close(answer.log_probs, many.log_probs(base, TEXTS[:1])[0], rtol=0, atol=1e-5)


def test_labels_with_a_common_prefix_share_its_prompt(llm, base, task):
    several_tokens = replace(task, labels=("best film yet", "best film ever"))
    frontend.load(llm, "whole", injection_for(base, several_tokens).with_head(scoring="sequence"))
    served = frontend.TASKS.get("whole")
    prompts = served.prompts((5, 6, 7))
    prefixes = {ids[:place] for ids in served.scorer.labels.sequences for place in range(len(ids))}
    assert sorted(prompt.prefix for prompt in prompts) == sorted(prefixes)
    assert {prompt.query for prompt in prompts} == {(5, 6, 7)}


def test_a_task_name_is_resolved_for_every_request(llm, base, task):
    request = params(i2cl="a", other=1)
    caller_args = request.extra_args
    before = copy.deepcopy(caller_args)
    frontend.load(llm, "a", injection_for(base, task, 0))
    frontend.TASKS.admit(request)
    first = request.extra_args[DIGEST]
    frontend.load(llm, "a", injection_for(base, task, 1))
    frontend.TASKS.admit(request)
    assert request.extra_args[DIGEST] != first
    assert request.extra_args["other"] == 1
    assert caller_args == before
    assert llm.sent == [LOAD, LOAD, DROP]
    assert llm.loaded == {request.extra_args[DIGEST]}


def test_a_shared_edit_stays_loaded_until_both_its_tasks_are_dropped(llm, base, task):
    for name in ("a", "b"):
        frontend.load(llm, name, injection_for(base, task))
    frontend.drop(llm, "a")
    assert llm.loaded
    frontend.drop(llm, "b")
    assert not llm.loaded
    raises(r"no task 'b' is loaded \(of 0\)", frontend.drop, llm, "b")


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
    raises(reason, frontend.TASKS.admit, SimpleNamespace(extra_args=extra))
    for plain in (None, {}, {"other": 1}):
        request = SimpleNamespace(extra_args=plain)
        frontend.TASKS.admit(request)
        assert request.extra_args == plain


def test_verify_calls_the_original_and_rejects_unknown_tasks(llm):
    calls = []
    verify = partial(frontend.wrap_verify, lambda params, *args: calls.append(args))
    verify(params(), "config")
    assert calls == [("config",)]
    raises("no task", verify, params(i2cl="a"), "config")


class Body(BaseModel):
    """A request of vLLM, which keeps unknown fields."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None


class BodyWithTasks(Body):
    vllm_xargs: dict[str, str] | None = None
    use_beam_search: bool = False


def check_model(body):
    """Return what ``BaseServing._check_model`` returns on a server of the model "base"."""

    async def original(serving, request):
        return None if request.model in {None, "base"} else f"no model {request.model}"

    serving = SimpleNamespace(create_error_response=lambda message: message)
    return asyncio.run(frontend.wrap_check_model(original, serving, body))


@pytest.mark.parametrize(
    "body",
    [
        Body(model="base", vllm_xargs={"i2cl": "mood"}),
        Body(model="base", i2cl="mood"),
        BodyWithTasks(i2cl="mood"),
        Body(model="mood"),
        BodyWithTasks(model="mood"),
        BodyWithTasks(vllm_xargs={"i2cl": "mood"}, use_beam_search=True),
    ],
)
def test_a_task_that_vllm_would_ignore_is_rejected(llm, base, task, body):
    frontend.load(llm, "mood", injection_for(base, task))
    assert re.search("answered without its task: send texts to /v1/i2cl/classify", check_model(body))


def test_requests_without_a_misplaced_task_are_unaffected(llm, base, task):
    for name in ("mood", "base"):  # a task may have the model's name
        frontend.load(llm, name, injection_for(base, task))
    plain_beams = BodyWithTasks(use_beam_search=True)
    for body in (Body(), Body(model="base", other=1, vllm_xargs={"other": "x"}), plain_beams):
        assert check_model(body) is None
    assert check_model(BodyWithTasks(model="base", vllm_xargs={"i2cl": "mood"})) is None
    assert check_model(Body(model="else")) == "no model else"


def test_a_task_of_another_model_and_bad_questions_are_refused(llm, base, task):
    other = injection_for(base, task)
    other = replace(other, base=replace(other.base, weights="0" * 16))
    raises("weights", frontend.load, llm, "a", other)
    raises("needs a name", frontend.load, llm, " ", injection_for(base, task))
    assert not llm.sent
    assert not frontend.TASKS.by_name
    frontend.load(llm, "a", other, force=True)
    frontend.load(llm, "a", injection_for(base, task))
    for texts, names, reason in (
        (["x"], [], "1 texts, but 0 tasks"),
        ([" "], ["a"], "text 1 is empty"),
        (["x"], ["b"], "no task 'b'"),
    ):
        raises(reason, frontend.classify, llm, texts, names)
