"""Decision APIs as clients use them: openai, LiteLLM, and the curl commands of the guide."""

import json
import re
import shlex
import urllib.request
from pathlib import Path

import pytest

from i2cl import Decoder, Injection, load_task
from i2cl.errors import I2CLError

from .conftest import make_injection
from .test_serve import serving

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

GUIDE = Path(__file__).parents[3] / "docs" / "guide" / "decisions.md"
TEXT = load_task("mood-colour-1").test[0].text
CHOICES = [{"value": value} for value in ("negative", "positive")]
QUESTION = {"type": "choice", "name": "films", "instructions": "Sentiment?", "choices": CHOICES}
STATE_QUESTION = {"films": {"type": "choice", "criteria": {"negative": None, "positive": None}}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URL of a server with the task "films", and the task's probabilities by label."""
    folder = tmp_path_factory.mktemp("served")
    decoder = Decoder.from_pretrained("reference")
    make_injection(decoder, 0).save_pretrained(folder / "films")
    injection = Injection.from_pretrained(folder / "films")
    probabilities = injection.log_probs(decoder, [TEXT])[0].softmax(-1).tolist()
    with serving(folder) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
        yield url, dict(zip(injection.task.labels, probabilities, strict=True))


def test_openai_client_decides(served):
    openai = pytest.importorskip("openai", reason="needs openai")
    url, expected = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    if not hasattr(client, "decisions"):
        pytest.skip("needs openai 3.57 or later")
    reply = client.decisions.create(model="reference", input=TEXT, questions=[QUESTION])
    (answer,) = reply.answers
    assert answer.choice == max(expected, key=expected.get)
    assert {item.value: item.probability for item in answer.probabilities} == pytest.approx(
        expected, abs=1e-5
    )
    assert reply.usage.input_tokens > 0
    wrong = QUESTION | {"choices": [*CHOICES, {"value": "neutral"}]}
    with pytest.raises(openai.BadRequestError, match="has no label 'neutral'") as refused:
        client.decisions.create(model="reference", input=TEXT, questions=[wrong])
    assert refused.value.param == "questions[0]"


def test_litellm_decides_by_openai_route(served):
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    url, expected = served
    reply = litellm.decisions(
        model="openai/films", input=TEXT, questions=[QUESTION], api_base=f"{url}/v1", api_key="none"
    )
    (answer,) = reply.answers
    assert {item.value: item.probability for item in answer.probabilities} == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("provider", ["hosted_vllm", "strands_decider"])
def test_litellm_decides_by_systemone_route(served, provider):
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    if not hasattr(litellm, "systemone"):
        pytest.skip("needs litellm 1.110 or later")
    url, expected = served
    reply = litellm.systemone(
        model=f"{provider}/films", state=TEXT, questions=STATE_QUESTION, api_base=url, api_key="none"
    )
    assert dict(reply.answers["films"].probabilities) == pytest.approx(expected, abs=1e-5)


def test_litellm_chats_with_a_task_as_hosted_vllm_model(served):
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    url, expected = served
    messages = [{"role": "user", "content": TEXT}]
    reply = litellm.completion(model="hosted_vllm/films", messages=messages, api_base=f"{url}/v1")
    assert reply.choices[0].message.content == max(expected, key=expected.get)


def curl_examples():
    """Return path and JSON body of each curl command in the guide, with the response that the guide shows."""
    pattern = re.compile(r"```console\n(curl .*?)```\n\n```json\n(.*?)```", re.DOTALL)
    for command, response in pattern.findall(GUIDE.read_text(encoding="utf-8")):
        words = shlex.split(command)
        yield words[1].partition(":8000")[2], words[words.index("-d") + 1], json.loads(response)


def comparable(value):
    """Return JSON without fields that differ by machine or request."""
    if isinstance(value, dict):
        return {
            key: comparable(item) for key, item in value.items() if key not in {"id", "created", "digest"}
        }
    return [comparable(item) for item in value] if isinstance(value, list) else value


def assert_close(actual, expected):
    """Compare JSON; numbers may differ by the rounding in the guide."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key in expected:
            assert_close(actual[key], expected[key])
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, abs=2e-3)
    else:
        assert actual == expected


@pytest.fixture(scope="module")
def guide_server(tmp_path_factory):
    """URL of a server with the task of the guide."""
    from i2cl.interfaces.cli import main

    folder = tmp_path_factory.mktemp("guide")
    try:
        options = ["--experts", "llm", "--evaluate", "0"]
        main(["fit", "reference", "mood-colour-1", "-o", str(folder / "mood"), *options])
    except SystemExit as end:
        if end.code:
            raise I2CLError("the fit of the guide failed: see its output") from None
    with serving(folder) as url:
        yield url


def test_curl_examples_of_the_guide_answer_as_shown(guide_server):
    examples = [*curl_examples()]
    assert [path for path, _, _ in examples] == ["/v1/decisions", "/v1/systemone"]
    for path, body, expected in examples:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(guide_server + path, body.encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert_close(comparable(json.load(reply)), comparable(expected))
