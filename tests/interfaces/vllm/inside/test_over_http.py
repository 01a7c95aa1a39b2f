"""The plugin in vLLM's server, over HTTP."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from i2cl.export import make_golden, verify_server
from i2cl.models.decoder import Decoder
from i2cl.models.loading import resolve_name
from processes import until

from .conftest import serving
from .engines import ADMIN, USER, call, followed, random_injection, texts


def test_over_http_tasks_are_loaded_queried_and_dropped(tmp_path, server, decoder, artefacts, monkeypatch):
    folder, injections = artefacts
    classify, listed = f"{server}/v1/i2cl/classify", f"{server}/v1/i2cl/tasks"
    complete = f"{server}/v1/completions"
    queries = texts(3, seed=7)
    wanted = injections["t0"].log_probs(decoder, queries)

    def right():
        status, reply, headers = call(classify, {"model": "t0", "input": queries})
        assert status == 200
        probs = torch.tensor([one["probs"] for one in reply["data"]])
        torch.testing.assert_close(probs, wanted.softmax(-1), rtol=0, atol=1e-4)
        assert [one["label"] for one in reply["data"]] == injections["t0"].predict(decoder, queries)
        assert reply["labels"] == list(injections["t0"].task.labels)
        assert len(headers["X-I2CL-Digest"]) == 64

    def completion(task):
        xargs = {} if task is None else {"vllm_xargs": {"i2cl": task}}
        body = {"model": str(decoder.name), "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0}
        return call(complete, body | {"logprobs": 1, "return_tokens_as_token_ids": True} | xargs)

    right()
    for task in ("t0", "t1", None):
        status, reply, _ = completion(task)
        assert status == 200
        values = reply["choices"][0]["logprobs"]
        token, value = int(values["tokens"][0].removeprefix("token_id:")), values["token_logprobs"][0]
        assert abs(value - float(followed(decoder, injections.get(task), [5, 6, 7, 8], [token])[0])) < 1e-4

    assert call(classify, {"model": "t0", "input": "x"}, key=None)[0] == 401
    assert call(complete, {"prompt": [5], "vllm_xargs": {"i2cl": "t0"}}, key=None)[0] == 401
    assert call(listed, key=None)[0] == 401
    assert call(listed)[0] == 403
    for bad, code in (
        ({"model": "t9", "input": "x"}, 404),
        ({"model": "t0", "input": " "}, 400),
        ({"model": "t0", "input": 3}, 400),
        ({"model": "t0"}, 400),
    ):
        assert call(classify, bad)[0] in {code, 422 if code == 400 else code}
        right()
    for bad in ("t9", 3, ["t0"], ""):
        assert completion(bad)[0] == 400
        right()

    status, reply, _ = call(listed, {"name": "new", "artefact": str(folder / "t2")}, key=ADMIN)
    assert status == 200
    assert [one["name"] for one in call(listed, key=ADMIN)[1]["data"]] == ["t0", "t1", "new"]
    assert completion("new")[0] == 200
    assert call(listed, {"name": "bad", "artefact": str(tmp_path)}, key=ADMIN)[0] == 400
    assert call(f"{listed}/new", key=ADMIN, method="DELETE")[0] == 200
    assert call(f"{listed}/new", key=ADMIN, method="DELETE")[0] == 404
    assert completion("new")[0] == 400
    assert call(classify, {"model": "new", "input": "x"})[0] == 404
    right()

    monkeypatch.setenv("VLLM_API_KEY", USER)
    golden = make_golden(decoder, injections["t0"])
    outcome = verify_server(golden, server, task="t0", tolerance=1e-4)
    print(f"\nverify over HTTP: {outcome.worst:.1e}")
    assert outcome.passed
    assert not verify_server(golden, server, task="t1").passed


def test_over_http_classify_keeps_its_version_during_reloads(server, decoder, artefacts):
    folder, injections = artefacts
    classify, listed = f"{server}/v1/i2cl/classify", f"{server}/v1/i2cl/tasks"
    queries = texts(40, seed=11, most=30)
    digests = {}
    for name in ("t3", "t6"):
        _, reply, _ = call(listed, {"name": "turned", "artefact": str(folder / name)}, key=ADMIN)
        digests[reply["digest"]] = injections[name].log_probs(decoder, queries).softmax(-1)
    bodies = [{"model": "turned", "input": queries}] * 12
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(call, classify, body) for body in bodies]
        reloads = 0
        end = time.monotonic() + 600
        while not all(one.done() for one in running):
            assert time.monotonic() < end
            body = {"name": "turned", "artefact": str(folder / ("t3", "t6")[reloads % 2])}
            assert call(listed, body, key=ADMIN)[0] == 200
            reloads += 1
    used = set()
    for one in running:
        status, reply, headers = one.result()
        assert status == 200
        used.add(headers["X-I2CL-Digest"])
        probs = torch.tensor([each["probs"] for each in reply["data"]])
        torch.testing.assert_close(probs, digests[headers["X-I2CL-Digest"]], rtol=0, atol=1e-4)
    print(f"\n{len(running)} requests of {len(queries)} texts under {reloads} reloads, {len(used)} versions")
    assert reloads > 2
    assert used == set(digests)


def test_over_http_errors_say_why_and_what_to_do(server, decoder, artefacts):
    folder, _ = artefacts
    classify, listed = f"{server}/v1/i2cl/classify", f"{server}/v1/i2cl/tasks"
    for body, code, words in (
        (
            {"model": "t0", "input": ["x", "the " * 400]},
            413,
            "text 2 takes .* and 255 fit into the context: ",
        ),
        (
            {"model": "t0", "input": ["x"] * 2049},
            413,
            "the request has 2049 texts, but the limit is 2048: split",
        ),
        ({"model": "t0", "input": []}, 400, "at least 1 item"),
    ):
        status, expected, _ = call(classify, body)
        assert status == code
        error = json.loads(expected)["error"]
        assert re.search(words, error["message"])
        assert error.keys() >= {"message", "type", "code"}

    beams = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 2}
    body = {"model": str(decoder.name), "prompt": [5, 6, 7]} | beams
    assert call(f"{server}/v1/completions", body)[0] == 200
    status, expected, _ = call(f"{server}/v1/completions", body | {"vllm_xargs": {"i2cl": "t0"}})
    assert status == 400
    assert "and without beam search" in expected

    for name, path in (("team/mood", "team/mood"), ("team/other", "team%2Fother"), ("a b", "a%20b")):
        assert call(listed, {"name": name, "artefact": str(folder / "t2")}, key=ADMIN)[0] == 200
        assert call(f"{listed}/{path}", key=ADMIN, method="DELETE")[1]["name"] == name


def test_http_routes_that_would_ignore_a_task_refuse_it(server, decoder):
    model, named = str(decoder.name), {"vllm_xargs": {"i2cl": "t0"}}
    messages = [{"role": "user", "content": "a quiet morning"}]
    template = {"chat_template": "{{ messages[0]['content'] }}"}
    complete, prompt = "/v1/completions", {"prompt": [5, 6], "max_tokens": 1}
    scoring = {"query": [5, 6], "items": [[7]], "label_token_ids": [8, 9]}
    for path, body in (
        ("/generative_scoring", scoring | {"model": model} | named),
        ("/v1/chat/completions/batch", {"messages": [messages], "model": model} | template | named),
        (complete, prompt | {"model": "t0"}),
        (complete, prompt | {"model": model, "i2cl": "t0"}),
    ):
        status, reply, _ = call(f"{server}{path}", body)
        assert status == 400
        assert "this request would be answered without its task: send texts to" in reply


def probabilities(decoder, injection, text):
    values = injection.log_probs(decoder, [text])[0].softmax(-1).tolist()
    return dict(zip(injection.task.labels, values, strict=True))


def choice(name, labels):
    choices = [{"value": label} for label in labels]
    return {"type": "choice", "name": name, "instructions": "Which?", "choices": choices}


def test_over_http_decisions_of_many_tasks_match_the_library(server, decoder, artefacts):
    _, injections = artefacts
    text = "a quiet morning on the letter"
    questions = [choice(name, injections[name].task.labels) for name in ("t0", "t1")]
    status, reply, _ = call(f"{server}/v1/decisions", {"model": "x", "input": text, "questions": questions})
    assert status == 200
    for name, answer in zip(("t0", "t1"), reply["answers"], strict=True):
        values = {item["value"]: item["probability"] for item in answer["probabilities"]}
        assert values == pytest.approx(probabilities(decoder, injections[name], text), abs=1e-5)


def test_over_http_openai_and_litellm_get_decisions(server, decoder, artefacts, monkeypatch):
    _, injections = artefacts
    text, labels = "a quiet morning on the letter", injections["t0"].task.labels
    expected = pytest.approx(probabilities(decoder, injections["t0"], text), abs=1e-5)
    openai = pytest.importorskip("openai", reason="needs openai")
    client = openai.OpenAI(base_url=f"{server}/v1", api_key=USER, max_retries=0)
    answer = client.decisions.create(model="t0", input=text, questions=[choice("x", labels)]).answers[0]
    assert {item.value: item.probability for item in answer.probabilities} == expected
    with pytest.raises(openai.BadRequestError, match="has no label 'other'"):
        client.decisions.create(model="t0", input=text, questions=[choice("x", ["other", labels[0]])])
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    api = {"api_base": f"{server}/v1", "api_key": USER}
    reply = litellm.decisions(model="openai/t0", input=text, questions=[choice("x", labels)], **api)
    assert {item.value: item.probability for item in reply.answers[0].probabilities} == expected


def test_http_questions_without_a_task_are_answered_by_vllm(tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_name("reference"))
    tokenizer.add_tokens(["yes", "no", *"AB", "<|answer|>"])
    tokenizer.chat_template = "{{ messages[-1]['content'] }}<|answer|>"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model("qwen3", **sizes, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    decoder = Decoder.from_pretrained(str(tmp_path / "model"), dtype="float32", device="cpu")
    injection = random_injection(decoder, torch.Generator().manual_seed(0), "mood-colour-1")
    injection.save_pretrained(tmp_path / "mood")
    text, labels = "a quiet morning", injection.task.labels
    mood, place = ({"type": "choice", "criteria": dict.fromkeys(names)} for names in (labels, "ab"))
    with serving(tmp_path, tmp_path / "model", {"mood": tmp_path / "mood"}) as url:

        def ask(questions, **fields):
            return call(f"{url}/v1/systemone", {"state": text, "questions": questions} | fields)

        status, plain, _ = ask({"place": place})
        assert (status, plain["diagnostics"]["place"].keys()) == (200, {"label_mass", "argmax_is_label"})
        status, mixed, _ = ask({"place": place, "mood": mood})
        for name in ("place", "mood"):
            assert sum(mixed["answers"][name]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
        own = plain["answers"]["place"]["probabilities"]
        assert mixed["answers"]["place"]["probabilities"] == pytest.approx(own, abs=1e-5)
        expected = pytest.approx(probabilities(decoder, injection, text), abs=1e-5)
        assert mixed["answers"]["mood"]["probabilities"] == expected
        assert [item["answered_by"] for item in mixed["diagnostics"].values()] == ["vllm", "task"]
        for fields in ({"model": "mood"}, {"vllm_xargs": {"i2cl": "mood"}}):
            _, reply, _ = ask({"x": mood}, **fields)
            assert reply["answers"]["x"]["probabilities"] == expected
            status, reply, _ = ask({"x": place}, **fields)
            assert (status, "task 'mood' has no label 'a'" in reply) == (400, True)
        status, reply, _ = call(f"{url}/v1/decisions", {"input": text, "questions": [choice("x", "ab")]})
        assert (status, "no task answers these questions" in reply) == (400, True)


def test_over_http_tasks_answer_the_same_after_sleep(server, decoder, artefacts):
    folder, injections = artefacts
    queries = texts(4, seed=21)
    load = {"name": "asleep", "artefact": str(folder / "t9")}
    assert call(f"{server}/sleep?level=1", {})[0] == 200
    status, reply, _ = call(f"{server}/v1/i2cl/tasks", load, key=ADMIN)
    assert call(f"{server}/wake_up", {})[0] == 200
    assert status == 503
    assert "the engine is asleep: wake it up" in reply
    status, reply, _ = call(f"{server}/v1/i2cl/classify", {"model": "t0", "input": queries})
    probs = torch.tensor([one["probs"] for one in reply["data"]])
    torch.testing.assert_close(
        probs, injections["t0"].log_probs(decoder, queries).softmax(-1), rtol=0, atol=1e-4
    )


def test_over_http_work_stops_when_the_client_leaves(server):
    def figures():
        with urlopen(f"{server}/metrics", timeout=60) as reply:
            lines = [line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if line[0] != "#"]
        outcome = {name.partition("{")[0]: 0.0 for name, _ in lines}
        for name, value in lines:
            outcome[name.partition("{")[0]] += float(value)
        return outcome["vllm:request_success_total"], outcome["vllm:num_requests_running"]

    before, _ = figures()
    body = json.dumps({"model": "t0", "input": texts(2000, seed=12)}).encode()
    address = server.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as client:
        head = f"POST /v1/i2cl/classify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {USER}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: figures()[0] != before)
    until(lambda: not figures()[1])
    done, _ = figures()
    time.sleep(1)
    print(f"\n{done - before:.0f} of 2000 texts were done")
    assert figures() == (done, 0)
    assert done - before < 1900
