"""The calls that make programs say a label, as they are printed; and what llama.cpp says."""

import importlib
import json
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, GenerationConfig

from commands import run
from export.cases import BEGUN, SHARED, TASK, decoder_of, drawn, llama_cpp, saved, scaled, with_golden
from export.test_export_server import serving
from export.test_greedy import speaking
from export.test_whole_labels import Echo, refusing
from i2cl.core.injection import Injection
from i2cl.export import Golden, calls, export_gguf, export_hf, golden, verify_gguf
from i2cl.export.calls import calls_of
from i2cl.export.golden import GoldenPrompt
from i2cl.export.greedy import TEXTS, biases_of, grammar_of, label_in
from i2cl.export.llama_cpp import LlamaCpp


def ran(code):
    """What a Python call prints."""
    with redirect_stdout(StringIO()) as message:
        exec(compile(code, "<call>", "exec"), {})
    return message.getvalue().strip("\n")


def vllm_call(made):
    (code,) = [call.code for call in calls_of(made, "out", "hf") if call.program == "vLLM"]
    return code


def prepared(folder, monkeypatch, task=TASK, case="llama"):
    """A base model and an artefact as folders, in the working directory."""
    saved(decoder_of(case), folder)
    replace(Injection.from_pretrained(folder / "artefact"), task=task).save_pretrained(folder / "artefact")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("task", [TASK, BEGUN], ids=["first", "begun"])
def test_the_call_of_transformers_runs_as_printed(tmp_path, monkeypatch, said, task):
    prepared(tmp_path, monkeypatch, task)
    printed = said("export", "artefact", "out", "--device", "cpu")
    record = json.loads(said("export", "artefact", "again", "--device", "cpu", "--json"))
    assert (record["forced"], record["greedy"]) == (True, {"right": 0, "of": 2})
    words = Golden.from_export("out").words
    assert record.get("structured_outputs") == ({"choice": words} if task is TASK else None)
    code = record["calls"]["transformers"].replace("again", "out")
    assert code in printed
    assert code in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ran(code).removesuffix("<|endoftext|>").strip() in task.labels


@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_the_call_of_peft_runs_as_printed(tmp_path, monkeypatch, said, refused):
    pytest.importorskip("peft", reason="peft is an extra")
    prepared(tmp_path, monkeypatch, case="phi")
    message = said("export", "artefact", "out", "--to", "peft", "--device", "cpu", "--json")
    code = json.loads(message)["calls"]["transformers"]
    assert code in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ran(code).removesuffix("<|endoftext|>") in TASK.labels
    assert biases_of(GenerationConfig.from_pretrained("out")) == Golden.from_export("out").sequence_bias
    assert run("verify", "out", "--device", "cpu") == 0
    (tmp_path / "out" / "generation_config.json").unlink()
    assert "lacks the labels' sequence_bias" in refused("verify", "out", "--device", "cpu")


def test_the_call_of_vllm_names_the_labels_as_they_stand_behind_the_prompt(tmp_path):
    made = with_golden(export_hf, drawn("llama"), tmp_path / "out")
    words = shlex.split(vllm_call(made).replace("\\\n", ""))
    assert words[:2] == ["curl", "http://localhost:8000/v1/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["temperature"], body["prompt"]) == (0, made.prompts[0].query)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for word, ids in zip(body["structured_outputs"]["choice"], made.spoken, strict=True):
        assert tokenizer(body["prompt"] + word)["input_ids"] == [*made.prompts[0].ids, *ids]
        assert len(ids) <= body["max_tokens"]
        assert all(body["logit_bias"][str(token)] == 100 for token in ids)


def completions(monkeypatch, echo):
    """An openai package whose client asks here; returns what it is sent."""
    seen = []

    def create(**asked):
        seen.append(asked)
        replies = [echo({"prompt": text})["choices"][0]["logprobs"] for text in asked["prompt"]]
        return SimpleNamespace(choices=[SimpleNamespace(logprobs=SimpleNamespace(**one)) for one in replies])

    client = SimpleNamespace(completions=SimpleNamespace(create=create))
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=lambda **_: client))
    return seen


@pytest.mark.parametrize("task", [SHARED, BEGUN], ids=["shared", "begun"])
def test_the_call_of_vllm_compares_whole_labels(tmp_path, monkeypatch, task):
    monkeypatch.setattr(golden, "TEXTS", TEXTS[::2])
    decoder, injection = drawn("llama", task)
    made = with_golden(export_hf, (decoder, scaled(injection, 0.1)), tmp_path / "out")
    seen = completions(monkeypatch, Echo(tmp_path / "out", generated=0))
    assert vllm_call(made) in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    for prompt in made.prompts:
        monkeypatch.setattr(calls, "TEXTS", (prompt.query.removeprefix("Review: ").split("\n")[0],))
        assert ran(vllm_call(made)) == prompt.prediction
        assert seen[-1]["prompt"] == [prompt.query + text for text in made.sequence_texts]
        assert (seen[-1]["model"], seen[-1]["max_tokens"], seen[-1]["echo"]) == ("out", 0, True)
    assert len({prompt.prediction for prompt in made.prompts}) > 1


def test_a_server_is_sent_what_makes_it_say_whole_labels(tmp_path, refused):
    made = with_golden(export_hf, drawn("llama", SHARED), tmp_path / "out")
    with serving(made, echo=refusing) as (url, seen):
        assert run("verify", tmp_path / "out", "--url", url) == 0
    asked = [body for body in seen if "grammar" in body]
    assert len(asked) == len(made.prompts)
    for body in asked:
        assert body["grammar"] == 'root ::= "best film" | "best ever" | "bad film"'
        assert body["max_tokens"] == made.length
    with serving(made, echo=refusing, says=lambda *_: " best of all") as (url, _):
        assert run("verify", tmp_path / "out", "--url", url) == 1
    with serving(made, echo=refusing, says=lambda *_: None) as (url, _):
        assert "answers no text" in refused("verify", tmp_path / "out", "--url", url)


def test_labels_are_read_from_text():
    words = [" best\n", " best film\n", " bad"]
    texts = (" best\nA", "best film\n", " best fare", " bad.", " badly")
    assert [label_in(text, words, whole=True) for text in texts] == [0, 1, None, 2, None]
    assert label_in(" badly", [" bad"], whole=False) is None
    assert label_in("bad", [" bad"], whole=False) == 0


@llama_cpp
@pytest.mark.parametrize("task", [TASK, SHARED, BEGUN], ids=["first", "shared", "begun"])
def test_the_call_of_llama_cpp_runs_as_printed(tmp_path, monkeypatch, said, task):
    prepared(tmp_path, monkeypatch, task)
    record = json.loads(said("export", "artefact", "out.gguf", "--to", "gguf", "--device", "cpu", "--json"))
    made = Golden.from_export("out.gguf")
    assert record["grammar"] == made.grammar
    code = record["calls"]["llama.cpp"]
    assert code in importlib.import_module("gguf").GGUFReader("out.gguf").get_field("i2cl.usage").contents()
    said = ran(code).strip()
    assert said in task.labels
    assert task is TASK or said == made.prompts[0].prediction
    if task is not TASK:  # for text after text
        again = f"{code}\n{code[code.find('prompt = ') :].replace(TEXTS[0], TEXTS[1])}"
        assert ran(again).split("\n") == [prompt.prediction for prompt in made.prompts]


@llama_cpp
def test_logit_bias_alone_makes_llama_cpp_say_the_expected_label(tmp_path):
    import llama_cpp as library

    made = with_golden(export_gguf, drawn("llama"), tmp_path / "out.gguf")
    bias = {int(token): value for token, value in made.logit_bias(()).items()}
    model = library.Llama(str(tmp_path / "out.gguf"), verbose=False)
    for prompt in made.prompts:
        reply = model(prompt.query, max_tokens=1, temperature=0, logit_bias=bias)
        assert made.said_in(reply["choices"][0]["text"], whole=False) == prompt.prediction


@llama_cpp
def test_a_model_that_says_labels_does_so_in_llama_cpp(tmp_path, said):
    path = tmp_path / "out.gguf"
    with_golden(export_gguf, speaking(), path)
    assert verify_gguf(path).greedy == [True, True]
    assert "Plain greedy decoding answers 2 of 2" in said("verify", path)


@pytest.mark.parametrize("label", ["account access", "account"])
def test_an_answer_that_is_less_than_its_label_is_told_as_such(label):
    prompt = {"text": "", "ids": [1], "labels": [-1.0, -2.0], "top_ids": [], "top_logits": [], "greedy": [5]}
    fields = {"labels": [label, "bill"], "label_ids": [5, 6], "label_texts": [" account", " bill"]}
    fields |= {"prompts": [GoldenPrompt(**prompt, prediction=label)] * 20, "prompt": "{text}", "tail": []}
    fields |= {"spoken": [[5], [6]], "words": [], "end": None, "beams": 0, "artefact": {}}
    made = Golden(**fields)
    text = calls.usage(made, "out", "hf")
    part = label != "account"
    assert (made.forced, made.shortened) == (False, part)
    assert ("20 of 20 golden prompts with the token of the expected label" in text) == part
    assert ('"account access": " account"' in text) == part


@llama_cpp
def test_any_word_is_a_word_of_the_grammar(tmp_path):
    words = ['a "b" \\c', "l\ni\tn[e]s", "\u00e9t\u00e9 \u6771"]
    import llama_cpp as library

    export_gguf(*drawn("llama"), tmp_path / "out.gguf")
    with LlamaCpp(tmp_path / "out.gguf", 64) as model:
        grammar = library.LlamaGrammar.from_string(grammar_of(words), verbose=False)
        reply = model._model.create_completion("a", max_tokens=40, temperature=0, grammar=grammar)
    assert reply["choices"][0]["text"] in words
