"""The plugin in vLLM's server, over HTTP."""

import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

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
    asked = texts(3, seed=7)
    wanted = injections["t0"].log_probs(decoder, asked)

    def right():
        status, reply, headers = call(classify, {"model": "t0", "input": asked})
        assert status == 200
        probs = torch.tensor([one["probs"] for one in reply["data"]])
        torch.testing.assert_close(probs, wanted.softmax(-1), rtol=0, atol=1e-4)
        assert [one["label"] for one in reply["data"]] == injections["t0"].predict(decoder, asked)
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
    asked = texts(40, seed=11, most=30)
    digests = {}
    for name in ("t3", "t6"):
        _, reply, _ = call(listed, {"name": "turned", "artefact": str(folder / name)}, key=ADMIN)
        digests[reply["digest"]] = injections[name].log_probs(decoder, asked).softmax(-1)
    bodies = [{"model": "turned", "input": asked}] * 12
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
    print(f"\n{len(running)} requests of {len(asked)} texts under {reloads} reloads, {len(used)} versions")
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
        ({"model": "t0", "input": ["x"] * 2049}, 413, "has 2049 texts, and 2048 may come at once: send"),
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
    assert "beam search does not support tasks" in expected

    for name, path in (("team/mood", "team/mood"), ("team/other", "team%2Fother"), ("a b", "a%20b")):
        assert call(listed, {"name": name, "artefact": str(folder / "t2")}, key=ADMIN)[0] == 200
        assert call(f"{listed}/{path}", key=ADMIN, method="DELETE")[1]["name"] == name


def refused(url, body):
    """The message of a 400."""
    status, reply, _ = call(url, body)
    assert status == 400
    return json.loads(reply)["error"]["message"]


def test_over_http_a_task_is_refused_by_routes_that_would_ignore_it(server, decoder):
    model, named = str(decoder.name), {"vllm_xargs": {"i2cl": "t0"}}
    messages = [{"role": "user", "content": "a quiet morning"}]
    template = {"chat_template": "{{ messages[0]['content'] }}"}
    for path, body in (
        ("/generative_scoring", {"query": [5, 6], "items": [[7]], "label_token_ids": [8, 9]}),
        ("/v1/chat/completions/batch", {"messages": [messages], "max_tokens": 1} | template),
    ):
        assert "this route ignores tasks" in refused(f"{server}{path}", body | {"model": model} | named)
    complete, body = f"{server}/v1/completions", {"prompt": [5, 6], "max_tokens": 1}
    assert "'t0' is a task, not a model" in refused(complete, body | {"model": "t0"})
    assert "'i2cl' is not a field" in refused(complete, body | {"model": model, "i2cl": "t0"})


def test_over_http_systemone_refuses_a_task_instead_of_answering_without_it(tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_name("reference"))
    tokenizer.add_tokens(["yes", "no", "<|answer|>"])
    tokenizer.chat_template = "{{ messages[-1]['content'] }}<|answer|>"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = AutoConfig.for_model("qwen3", **sizes, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    decoder = Decoder.from_pretrained(str(tmp_path / "model"), dtype="float32", device="cpu")
    injection = random_injection(decoder, torch.Generator().manual_seed(0), "mood-colour-1")
    injection.save_pretrained(tmp_path / "mood")
    question = {"type": "choice", "criteria": dict.fromkeys(injection.task.labels)}
    body = {"model": str(tmp_path / "model"), "state": "a quiet morning", "questions": {"mood": question}}
    with serving(tmp_path, tmp_path / "model", {"mood": tmp_path / "mood"}) as url:
        ask = f"{url}/v1/systemone"
        assert call(ask, body)[0] == 200
        ignored = refused(ask, body | {"vllm_xargs": {"i2cl": "mood"}})
        unknown = refused(ask, body | {"model": "mood"})
    assert "this route ignores tasks" in ignored
    assert unknown == "'mood' is a task, not a model: send the texts to /v1/i2cl/classify"


def test_over_http_tasks_answer_the_same_after_sleep(server, decoder, artefacts):
    folder, injections = artefacts
    asked = texts(4, seed=21)
    load = {"name": "asleep", "artefact": str(folder / "t9")}
    assert call(f"{server}/sleep?level=1", {})[0] == 200
    status, reply, _ = call(f"{server}/v1/i2cl/tasks", load, key=ADMIN)
    assert call(f"{server}/wake_up", {})[0] == 200
    assert status == 503
    assert "the engine is asleep: wake it up" in reply
    status, reply, _ = call(f"{server}/v1/i2cl/classify", {"model": "t0", "input": asked})
    probs = torch.tensor([one["probs"] for one in reply["data"]])
    torch.testing.assert_close(
        probs, injections["t0"].log_probs(decoder, asked).softmax(-1), rtol=0, atol=1e-4
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
