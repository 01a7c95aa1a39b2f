"""What greedy decoding of an export says, what makes programs say a label, and the calls that tell so."""

import json
import shlex
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from commands import run
from export.cases import TASK, decoder_of, injection_for, saved
from export.test_export_server import expected, serving
from export.test_whole_labels import Echo
from i2cl.core.injection import Injection
from i2cl.errors import I2CLError
from i2cl.export import Golden, export_gguf, export_hf, fold, gguf, golden, make_golden, verify, verify_gguf
from i2cl.export.greedy import calls
from i2cl.export.greedy.beams import beams_for, compared_sequences, search_whole, searches
from i2cl.export.greedy.calls import calls_of
from i2cl.export.greedy.labels import FORCE, biases_of, forced_sequences, grammar_of, label_in, shared_end
from i2cl.export.greedy.texts import TEXTS
from i2cl.export.llama_cpp import LlamaCpp
from i2cl.models.scoring import Questions
from i2cl.tasks import Task, Template

pytestmark = pytest.mark.filterwarnings("ignore::i2cl.models.encoding.ScoringWarning")
llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed (pip install 'i2cl[llama-cpp]')"
)

SHARED = Task("films", ("best film", "best ever", "bad film"), Template("Review: {text}\nVerdict:{label}"))
BEGUN = replace(SHARED, labels=("best", "best film", "bad"))
"""A label begins another one: both go with what ends them."""
NO_END = replace(SHARED, template=Template("{text} {label}"))
"""No token ends every prompt."""


def speaking():
    """A model that says "positive" or "negative" after anything: all other logits are 0."""
    decoder = decoder_of("llama")
    first, second = Questions(decoder, TASK).labels.first
    with torch.no_grad():
        head = decoder.model.lm_head.weight
        one = head[first].clone()
        head.zero_()
        head[first], head[second] = one, -one
    return decoder


def exported(folder, decoder, injection):
    export_hf(decoder, injection, folder, golden=lambda: make_golden(decoder, injection))
    return Golden.from_export(folder)


LONG = (
    [5, 6],
    [5, 7, 20],
    [5, 7, 21, 3, 22],
    [9],
    [10, 11, 12, 13, 14, 23],
    [10, 11, 24],
    [10, 25],
    [15, 26],
)
"""Tokens of labels: of several lengths, and of several that begin alike."""


def whole(logits, ids, label):
    """Log-probability of a label, token by token."""
    return sum(
        logits([*ids, *label[:place]]).float().log_softmax(-1)[token].item()
        for place, token in enumerate(label)
    )


def test_there_are_twenty_texts_of_several_kinds():
    assert len(set(TEXTS)) == 20
    assert {text[-1] for text in TEXTS} >= set("?!.)g")  # so that a shared end is the template's own
    lengths = sorted(len(text.split()) for text in TEXTS)
    assert lengths[0] <= 6
    assert lengths[-1] >= 25


@pytest.mark.parametrize("task", [TASK, SHARED, BEGUN], ids=["first", "shared", "begun"])
def test_golden_values_hold_what_the_folded_model_generates(task):
    decoder = decoder_of("llama")
    injection = replace(injection_for(decoder), task=task)
    made, model = make_golden(decoder, injection), fold(decoder, injection)
    longest = max(map(len, made.targets))
    assert (longest == 1) == (task is TASK)
    for prompt in made.prompts:
        ids = torch.tensor([prompt.ids])
        told = model.generate(ids, do_sample=False, max_new_tokens=longest)[0, ids.shape[1] :].tolist()
        assert prompt.greedy == told
    assert made.forced


def test_a_model_that_says_labels_is_left_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    decoder = speaking()
    made = exported(tmp_path / "out", decoder, injection_for(decoder))
    assert not made.forced
    assert {prompt.prediction for prompt in made.prompts} == set(TASK.labels)
    assert "sequence_bias" not in (tmp_path / "out" / "generation_config.json").read_text()
    assert run("verify", tmp_path / "out", "--device", "cpu") == 0
    told = "Plain greedy decoding answers 20 of 20 prompts with the expected label"
    assert told in capsys.readouterr().out
    with serving(made) as (url, seen):
        assert run("verify", tmp_path / "out", "--url", url) == 0
    assert len(seen) == len(made.prompts)  # the reply with log-probabilities is the answer
    assert told in capsys.readouterr().out


def test_settings_that_change_what_is_said_are_found(tmp_path, capsys):
    decoder = speaking()
    made = exported(tmp_path / "out", decoder, injection_for(decoder))
    config = tmp_path / "out" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"suppress_tokens": made.label_ids}))
    assert run("verify", tmp_path / "out", "--device", "cpu") == 1
    printed = capsys.readouterr().out
    assert "answers 0 of 2 prompts" in printed
    assert "decode at temperature 0 without penalties" in printed
    assert "does not hold" in printed
    assert run("verify", tmp_path / "out", "--device", "cpu", "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["greedy"] == {"right": 0, "of": 2}
    assert told["worst"] < told["tolerance"]
    assert {row["greedy"] for row in told["prompts"]} == {"no label"}


@pytest.mark.parametrize(("right", "passes"), [(19, True), (18, False)])
def test_nineteen_of_twenty_are_enough(tmp_path, monkeypatch, right, passes):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    decoder = speaking()
    made = exported(tmp_path / "out", decoder, injection_for(decoder))
    assert len(made.prompts) == 20
    wrong = {prompt.text for prompt in made.prompts[right:]}

    def says(golden, prompt):
        return " a film" if prompt.text in wrong else expected(golden, prompt)

    with serving(made, says=says) as (url, _):
        assert run("verify", tmp_path / "out", "--url", url) == (0 if passes else 1)


def by_hand(logits, ids, sequences):
    """The label that the model's own logits choose, token by token among those of labels."""
    found = []
    while not (said := [one for one in sequences if list(one) == found]):
        allowed = sorted({one[len(found)] for one in sequences if list(one[: len(found)]) == found})
        after = logits([*ids, *found])
        found.append(max(allowed, key=lambda token: after[token]))
    return said[0]


@pytest.mark.parametrize("task", [TASK, SHARED, BEGUN, NO_END], ids=["first", "shared", "begun", "no-end"])
def test_generate_says_a_label_to_its_end_and_stops(tmp_path, monkeypatch, task):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    decoder = decoder_of("llama")
    injection = replace(injection_for(decoder), task=task)
    weak = replace(injection, context=injection.context * 0.1)  # so that texts decide
    made = exported(tmp_path / "out", decoder, weak)
    assert made.forced
    assert bool(made.tail) == (task is not NO_END)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")

    def logits(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0, -1]

    said = set()
    for prompt in made.prompts:
        ids = torch.tensor([prompt.ids])
        told = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :].tolist()
        if made.beams:
            wanted = max(made.spoken, key=lambda label: whole(logits, prompt.ids, label))
            assert told == wanted
        else:
            wanted = by_hand(logits, prompt.ids, made.spoken)
            assert told == [*wanted, made.end]
        said.add(tuple(wanted))
    assert bool(made.beams) == (task in (SHARED, BEGUN))
    assert len(said) > 1


@pytest.mark.parametrize("labels", [LONG, LONG[::-1][:7]], ids=["eight", "seven"])
def test_a_beam_for_each_label_finds_the_best_whole_one(labels):
    """Labels of one to six tokens, whose logits differ by tens, against every sum."""
    tail, found = (7, 8), set()
    assert beams_for(labels, tail) == len(labels)
    generation = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=0)
    search_whole(generation, len(labels), labels, 0)
    assert searches(generation, len(labels), labels)
    pairs = compared_sequences(labels, tail)
    generation.sequence_bias = [[list(tokens), value] for tokens, value in pairs.items()]
    for seed in range(4):
        model, draw = decoder_of("llama").model, torch.Generator().manual_seed(seed)
        head = model.lm_head.weight
        with torch.no_grad():
            head.copy_(3 * torch.randn(head.shape, generator=draw))

        def logits(ids, model=model):
            with torch.no_grad():
                return model(torch.tensor([ids])).logits[0, -1]

        for _ in range(10):
            ids = [*torch.randint(1, 200, (5,), generator=draw).tolist(), *tail]
            made = model.generate(torch.tensor([ids]), generation_config=generation)[0, len(ids) :].tolist()
            sums = [whole(logits, ids, label) for label in labels]
            assert made == list(labels[sums.index(max(sums))])
            found.add(tuple(made))
    assert len(found) > 2


def test_whether_beams_can_compare():
    assert beams_for([[5, 6], [5, 7]], (1,)) == 2
    assert beams_for([[5, 6], [5, 7]], ()) == 0  # a bias would be for any place
    assert beams_for([[5, 6], [6, 7]], (1,)) == 0  # 6 would end the second label
    assert beams_for([[5], [6]], (1,)) == 0  # one token each needs no search
    assert beams_for([[5, 100 + place] for place in range(65)], (1,)) == 0
    assert compared_sequences([[5, 6], [5, 7, 8], [9]], (1, 2)) == {
        (1, 2, 9): 3 * FORCE,
        (1, 2, 5): FORCE,
        (1, 2, 5, 6): 2 * FORCE,
        (1, 2, 5, 7): FORCE,
        (1, 2, 5, 7, 8): FORCE,
    }


@pytest.mark.parametrize("change", [{"num_beams": 2}, {"length_penalty": 1.0}, {"eos_token_id": 0}])
def test_a_lost_search_is_named(tmp_path, change):
    decoder = decoder_of("llama")
    exported(tmp_path / "out", decoder, replace(injection_for(decoder), task=SHARED))
    config = tmp_path / "out" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(I2CLError, match="lacks the beam search over whole labels"):
        verify(tmp_path / "out")


def test_the_bias_is_for_the_end_of_a_prompt_alone():
    found = forced_sequences([[5, 6], [5, 7], [8]], (), (1, 2), 0)
    assert found == {
        (1, 2, 5): FORCE,
        (1, 2, 5, 6): 2 * FORCE,
        (1, 2, 5, 6, 0): 3 * FORCE,
        (1, 2, 5, 7): 2 * FORCE,
        (1, 2, 5, 7, 0): 3 * FORCE,
        (1, 2, 8): FORCE,
        (1, 2, 8, 0): 2 * FORCE,
    }
    assert forced_sequences([[5], [6]], (0.5, -1.0), (), None) == {(5,): 100.5, (6,): 99.0}
    again = forced_sequences([[5, 6, 5, 7], [5, 6, 8]], (), (), None)
    assert (again[(5, 6, 5)], again[(5, 6, 8)]) == (2 * FORCE, 3 * FORCE)  # 5 alone lifts 5 once more
    assert forced_sequences([[5, 0]], (), (), 0) == {(5,): FORCE, (5, 0): 2 * FORCE}
    assert shared_end([(1, 2, 3, 4), (9, 3, 4), (5, 3, 4)]) == (3, 4)
    assert shared_end([(1, 2), (1, 3)]) == ()


def test_a_lost_bias_is_named(tmp_path):
    decoder = decoder_of("llama")
    exported(tmp_path / "out", decoder, injection_for(decoder))
    config = tmp_path / "out" / "generation_config.json"
    kept = json.loads(config.read_text())
    config.write_text(json.dumps(kept | {"sequence_bias": kept["sequence_bias"][1:]}))
    with pytest.raises(I2CLError, match="lacks the labels' sequence_bias"):
        verify(tmp_path / "out")


def test_whole_labels_that_cannot_be_forced_right_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    decoder = decoder_of("llama")
    for task, code, told in (
        (SHARED, 0, "A search over whole labels (3 beams) answers 20 of 20 prompts"),
        (NO_END, 1, "That is too few: compare log-probabilities of whole labels"),  # token by token
    ):
        exported(tmp_path / str(code), decoder, replace(injection_for(decoder), task=task))
        assert run("verify", tmp_path / str(code), "--device", "cpu") == code
        assert told in capsys.readouterr().out


# The calls


def ran(code):
    """What a Python call prints."""
    with redirect_stdout(StringIO()) as told:
        exec(compile(code, "<call>", "exec"), {})
    return told.getvalue().strip("\n")


def prepared(folder, monkeypatch, task=TASK, case="llama"):
    """A base model and an artefact as folders, in the working directory."""
    saved(decoder_of(case), folder)
    replace(Injection.from_pretrained(folder / "artefact"), task=task).save_pretrained(folder / "artefact")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("task", [TASK, BEGUN], ids=["first", "begun"])
def test_the_call_of_transformers_runs_as_printed(tmp_path, monkeypatch, capsys, task):
    prepared(tmp_path, monkeypatch, task)
    assert run("export", "artefact", "out", "--device", "cpu") == 0
    printed = capsys.readouterr().out
    assert run("export", "artefact", "again", "--device", "cpu", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["forced"]
    assert record["greedy"] == {"right": 0, "of": 2}
    words = Golden.from_export("out").words
    assert record.get("structured_outputs") == ({"choice": words} if task is TASK else None)
    code = record["calls"]["transformers"].replace("again", "out")
    assert code in printed
    assert code in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ran(code).removesuffix("<|endoftext|>").strip() in task.labels


@pytest.mark.filterwarnings("ignore:.*lora_bias")
def test_the_call_of_peft_runs_as_printed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft", reason="peft is an extra")
    prepared(tmp_path, monkeypatch, case="phi")
    assert run("export", "artefact", "out", "--to", "peft", "--device", "cpu", "--json") == 0
    code = json.loads(capsys.readouterr().out)["calls"]["transformers"]
    assert code in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert ran(code).removesuffix("<|endoftext|>") in TASK.labels
    assert biases_of(GenerationConfig.from_pretrained("out")) == Golden.from_export("out").sequence_bias
    assert run("verify", "out", "--device", "cpu") == 0
    (tmp_path / "out" / "generation_config.json").unlink()
    assert run("verify", "out", "--device", "cpu") == 2
    assert "lacks the labels' sequence_bias" in capsys.readouterr().err


def test_the_call_of_vllm_names_the_labels_as_they_stand_behind_the_prompt(tmp_path):
    decoder = decoder_of("llama")
    made = exported(tmp_path / "out", decoder, injection_for(decoder))
    (code,) = [call.code for call in calls_of(made, "out", "hf") if call.program == "vLLM"]
    words = shlex.split(code.replace("\\\n", ""))
    assert words[:2] == ["curl", "http://localhost:8000/v1/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["temperature"] == 0
    assert body["prompt"] == made.prompts[0].query
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

    def client(**_):
        return SimpleNamespace(completions=SimpleNamespace(create=create))

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(OpenAI=client))
    return seen


@pytest.mark.parametrize("task", [SHARED, BEGUN], ids=["shared", "begun"])
def test_the_call_of_vllm_compares_whole_labels(tmp_path, monkeypatch, task):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    decoder = decoder_of("llama")
    weak = replace(injection_for(decoder), task=task)
    made = exported(tmp_path / "out", decoder, replace(weak, context=weak.context * 0.1))
    seen = completions(monkeypatch, Echo(tmp_path / "out", generated=0))
    told = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert next(call.code for call in calls_of(made, "out", "hf") if call.program == "vLLM") in told
    for prompt in made.prompts:
        monkeypatch.setattr(calls, "TEXTS", (prompt.query.removeprefix("Review: ").split("\n")[0],))
        (code,) = [call.code for call in calls_of(made, "out", "hf") if call.program == "vLLM"]
        assert ran(code) == prompt.prediction
        assert seen[-1]["prompt"] == [prompt.query + text for text in made.sequence_texts]
        assert (seen[-1]["model"], seen[-1]["max_tokens"], seen[-1]["echo"]) == ("out", 0, True)
    assert len({prompt.prediction for prompt in made.prompts}) > 1


def test_a_server_is_sent_what_makes_it_say_whole_labels(tmp_path, capsys):
    decoder = decoder_of("llama")
    made = exported(tmp_path / "out", decoder, replace(injection_for(decoder), task=SHARED))

    def echo(_):
        return None

    with serving(made, echo=echo) as (url, seen):
        assert run("verify", tmp_path / "out", "--url", url) == 0
    asked = [body for body in seen if "grammar" in body]
    assert len(asked) == len(made.prompts)
    for body in asked:
        assert body["grammar"] == 'root ::= "best film" | "best ever" | "bad film"'
        assert body["max_tokens"] == made.length
    with serving(made, echo=echo, says=lambda *_: " best of all") as (url, _):
        assert run("verify", tmp_path / "out", "--url", url) == 1
    with serving(made, echo=echo, says=lambda *_: None) as (url, _):
        assert run("verify", tmp_path / "out", "--url", url) == 2
    assert "answers no text" in capsys.readouterr().err


def test_labels_are_read_from_text():
    words = [" best\n", " best film\n", " bad"]
    assert [
        label_in(text, words, whole=True) for text in (" best\nA", "best film\n", " best fare", " bad.")
    ] == [0, 1, None, 2]
    assert label_in(" badly", words, whole=True) is None
    assert label_in(" badly", [" bad"], whole=False) is None
    assert label_in("bad", [" bad"], whole=False) == 0


# GGUF


@llama_cpp
@pytest.mark.parametrize("task", [TASK, SHARED, BEGUN], ids=["first", "shared", "begun"])
def test_the_call_of_llama_cpp_runs_as_printed(tmp_path, monkeypatch, capsys, task):
    pytest.importorskip("gguf")
    prepared(tmp_path, monkeypatch, task)
    assert run("export", "artefact", "out.gguf", "--to", "gguf", "--device", "cpu", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["grammar"] == Golden.from_export("out.gguf").grammar
    code = record["calls"]["llama.cpp"]
    assert code in gguf.import_package("gguf").GGUFReader("out.gguf").get_field("i2cl.usage").contents()
    said = ran(code).strip()
    assert said in task.labels
    made = Golden.from_export("out.gguf")
    assert task is TASK or said == made.prompts[0].prediction
    start = code.find("prompt = ")
    if task is not TASK:  # for text after text
        again = f"{code}\n{code[start:].replace(TEXTS[0], TEXTS[1])}"
        assert ran(again).split("\n") == [prompt.prediction for prompt in made.prompts]


@llama_cpp
def test_logit_bias_alone_makes_llama_cpp_say_the_expected_label(tmp_path):
    pytest.importorskip("gguf")
    import llama_cpp as library

    decoder = decoder_of("llama")
    injection = injection_for(decoder)
    export_gguf(decoder, injection, tmp_path / "out.gguf", golden=lambda: make_golden(decoder, injection))
    made = Golden.from_export(tmp_path / "out.gguf")
    bias = {int(token): value for token, value in made.logit_bias(()).items()}
    model = library.Llama(str(tmp_path / "out.gguf"), verbose=False)
    for prompt in made.prompts:
        reply = model(prompt.query, max_tokens=1, temperature=0, logit_bias=bias)
        assert made.said_in(reply["choices"][0]["text"], whole=False) == prompt.prediction


@llama_cpp
def test_a_model_that_says_labels_does_so_in_llama_cpp(tmp_path, capsys):
    pytest.importorskip("gguf")
    decoder = speaking()
    injection, path = injection_for(decoder), tmp_path / "out.gguf"
    export_gguf(decoder, injection, path, golden=lambda: make_golden(decoder, injection))
    assert verify_gguf(path).greedy == [True, True]
    assert run("verify", path) == 0
    assert "Plain greedy decoding answers 2 of 2" in capsys.readouterr().out


@llama_cpp
def test_any_word_is_a_word_of_the_grammar(tmp_path):
    pytest.importorskip("gguf")
    words = ['a "b" \\c', "l\ni\tn[e]s", "\u00e9t\u00e9 \u6771"]
    import llama_cpp as library

    decoder = decoder_of("llama")
    export_gguf(decoder, injection_for(decoder), tmp_path / "out.gguf")
    with LlamaCpp(tmp_path / "out.gguf", 64) as model:
        grammar = library.LlamaGrammar.from_string(grammar_of(words), verbose=False)
        reply = model._model.create_completion("a", max_tokens=40, temperature=0, grammar=grammar)
    assert reply["choices"][0]["text"] in words


def test_transformers_refuses_the_file_and_would_drop_its_biases(tmp_path, monkeypatch, capsys):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    prepared(tmp_path, monkeypatch)
    assert run("export", "artefact", "out.gguf", "--to", "gguf", "--no-golden", "--device", "cpu") == 0
    assert "transformers refuses it" in capsys.readouterr().out
    with pytest.raises(ValueError, match="architecture granite is not supported"):
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf")
    monkeypatch.setattr(gguf, "CLASS", "llama")
    assert run("export", "artefact", "llama.gguf", "--to", "gguf", "--no-golden", "--device", "cpu") == 0
    taken = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="llama.gguf")
    assert not [name for name in taken.state_dict() if name.endswith(".bias")]  # and not a word about it
