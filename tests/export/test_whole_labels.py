"""Exports of a task whose labels share their first token: whole label sequences are recorded and checked."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from export.cases import BEGUN, SHARED, decoder_of, drawn, injection_for, stored, with_golden
from export.test_export_server import serving
from fitting import one_line, weighted
from i2cl import Decoder, I2CLError
from i2cl.export import (
    Golden,
    export_gguf,
    export_hf,
    export_peft,
    fold,
    golden,
    greedy,
    make_golden,
    verify,
    verify_gguf,
)
from i2cl.models.scoring import next_token_log_probabilities

TEXTS = ("a warm film", "dull and long", "two hours")  # without the letter that all labels begin with


@pytest.fixture(autouse=True)
def _texts(monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    monkeypatch.setattr(greedy, "ENOUGH", 0)  # random models say no label: see test_greedy.py


@pytest.fixture
def export(tmp_path):
    """A folded tiny Llama with its golden values."""
    with_golden(export_hf, drawn("llama", SHARED), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("scoring", ["auto", "full"])
@pytest.mark.parametrize("task", [SHARED, BEGUN], ids=["shared", "begun"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_golden_labels_are_those_of_the_injection(task, dtype, scoring):
    decoder, injection = drawn("llama", task, dtype=dtype)
    injection = replace(injection, scoring=scoring)
    made = make_golden(decoder, injection)
    decoder.model.float()
    assert [prompt.prediction for prompt in made.prompts] == injection.predict(decoder, TEXTS)
    scores = injection.questions(decoder).scores(TEXTS, edit=injection.edit())
    torch.testing.assert_close(torch.tensor([prompt.whole for prompt in made.prompts]), scores)
    firsts = {task.labels[prompt.labels.index(max(prompt.labels))] for prompt in made.prompts}
    assert {prompt.prediction for prompt in made.prompts} - firsts  # first tokens would name other labels


def test_labels_that_differ_in_their_first_token_are_recorded_by_it():
    made = make_golden(*drawn("llama", replace(SHARED, labels=("best", "film"))))
    assert made.sequences == []
    assert all(prompt.whole == [] for prompt in made.prompts)


def test_the_export_holds_and_a_change_that_only_later_tokens_show_is_found(export):
    outcome = verify(export, device="cpu")
    assert (outcome.passed, outcome.worst < 1e-5, bool(outcome.unchecked)) == (True, True, False)
    assert len({row["found"] for row in outcome.rows()}) > 1
    assert all(row["found"] == row["expected"] for row in outcome.rows())
    value = Golden.from_export(export)
    first = value.label_ids[0]
    assert not any(first in prompt.ids for prompt in value.prompts)
    state = load_file(export / "model.safetensors")
    state["model.embed_tokens.weight"][first] *= -1
    save_file(state, export / "model.safetensors", metadata={"format": "pt"})
    outcome = verify(export, device="cpu")
    assert not outcome.passed
    firsts = [pytest.approx(prompt.labels, rel=1e-4) for prompt in value.prompts]
    assert [list(answer.labels) for answer in outcome.answers] == firsts


def test_llama_cpp_holds(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install 'i2cl[gguf]')")
    with_golden(export_gguf, drawn("llama", SHARED), tmp_path / "out.gguf")
    outcome = verify_gguf(tmp_path / "out.gguf")
    assert (outcome.passed, outcome.worst < 1e-5) == (True, True)
    assert all(row["found"] == row["expected"] for row in outcome.rows())


# Labels that are told by their words: the head's rows of their first tokens are changed

MIXED = replace(SHARED, labels=("best film", "best ever", "bad film", "film bad", "a long film"))


def told_by_words(**overrides):
    decoder, injection = drawn("llama", MIXED, **overrides)
    return decoder, weighted(decoder, injection)


def answers_of(folder, decoder, injection):
    """What plain `generate` says to some prompts, as labels."""
    model, made = AutoModelForCausalLM.from_pretrained(folder), Golden.from_export(folder)
    said = []
    for ids in injection.questions(decoder).queries(TEXTS):
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=made.longest, do_sample=False)
        said.append(made.said(tokens[0, len(ids) :].tolist()))
    return said


@pytest.mark.parametrize("case", ["llama", "phi", "granite", "gpt_neox"])
def test_a_folded_model_in_memory_tells_labels_by_their_words(case):
    decoder, injection = drawn(case, MIXED)
    injection = weighted(decoder, injection)
    folded = Decoder(fold(decoder, injection), decoder.tokenizer)
    labels, queries = injection.questions(decoder).labels, injection.questions(decoder).queries(TEXTS)
    result = next_token_log_probabilities(folded, queries)[:, list(labels.first)].log_softmax(-1)
    torch.testing.assert_close(result, injection.scores(decoder, TEXTS).log_softmax(-1), atol=1e-4, rtol=1e-4)
    one_line("give a Decoder", fold, decoder.model, injection)


def test_tokens_that_stand_for_labels_are_named(tmp_path):
    for write in (export_hf, export_gguf):
        one_line("leave out --no-golden", write, *told_by_words(), tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_a_folded_head_tells_labels_by_their_words(tied, tmp_path, monkeypatch):
    decoder, injection = told_by_words(tie_word_embeddings=tied)
    expected = injection.predict(decoder, TEXTS)
    with monkeypatch.context() as never:
        never.setattr(greedy, "ENOUGH", 2)  # so that a bias makes it say a label
        with_golden(export_hf, (decoder, injection), tmp_path / "out")
        assert answers_of(tmp_path / "out", decoder, injection) == expected
    assert [one.prediction for one in Golden.from_export(tmp_path / "out").prompts] == expected
    outcome = verify(tmp_path / "out", device="cpu")
    assert (outcome.passed, outcome.worst < 1e-5) == (True, True)
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert state["model.embed_tokens.weight"].equal(decoder.model.get_input_embeddings().weight)
    changed = (state["lm_head.weight"] != decoder.model.lm_head.weight).any(1).nonzero()[:, 0].tolist()
    assert set(changed) <= set(injection.questions(decoder).labels.first)
    assert len(changed) >= 3


@pytest.mark.parametrize("made", [told_by_words, partial(drawn, "llama")], ids=["words", "first tokens"])
def test_the_card_says_which_label_each_answer_stands_for(tmp_path, made):
    made = with_golden(export_hf, made(), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    (block,) = [part for part in card.split("```json\n")[1:] if "stands for a label" in card]
    assert json.loads(block.split("```")[0]) == dict(zip(made.labels, made.label_texts, strict=True))


def test_the_command_says_that_an_answer_stands_for_a_label(tmp_path, said):
    base = Decoder.from_pretrained(str(stored(decoder_of("llama"), tmp_path / "base")), device="cpu")
    weighted(base, replace(injection_for(base), task=MIXED)).save_pretrained(tmp_path / "artefact")
    message = said("export", tmp_path / "artefact", tmp_path / "out", "--to", "hf")
    assert "An answer is one token, which stands for a label" in message


def test_a_temperature_is_folded_with_the_words(tmp_path):
    decoder, injection = told_by_words()
    injection = replace(injection, temperature=2.0)
    made = make_golden(decoder, injection, fold_temperature=True)
    export_hf(decoder, injection, tmp_path / "out", golden=lambda: made, fold_temperature=True)
    assert verify(tmp_path / "out", device="cpu").worst < 1e-5
    among = torch.tensor([one.labels for one in made.prompts]).log_softmax(-1)
    torch.testing.assert_close(among, injection.scores(decoder, TEXTS).float(), atol=1e-5, rtol=1e-4)


def test_llama_cpp_tells_labels_by_their_words(tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (pip install 'i2cl[gguf]')")
    with_golden(export_gguf, told_by_words(), tmp_path / "out.gguf")
    outcome = verify_gguf(tmp_path / "out.gguf")
    assert (outcome.passed, outcome.worst < 1e-5) == (True, True)


def test_an_adapter_cannot_hold_the_words(tmp_path):
    pytest.importorskip("peft", reason="peft is not installed (pip install 'i2cl[peft]')")
    with pytest.raises(I2CLError, match=r"scored by several words each.*--to hf"):
        export_peft(*told_by_words(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Echo:
    """Completes with a checkpoint, and echoes a prompt's tokens with their log-probabilities.

    Args:
        folder: of the checkpoint.
        bos: whether the first token is left out of the reply, as llama-cpp-python does with BOS.
        generated: new tokens in the reply.
        late: whether every token has what was predicted behind it, as llama-cpp-python has without BOS.
    """

    def __init__(self, folder, *, bos=False, generated=1, late=False):
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.golden = Golden.from_export(folder)
        self.bos, self.generated, self.late = bos, generated, late

    def __call__(self, body):
        ids = body["prompt"] if isinstance(body["prompt"], list) else self.encoded(body["prompt"])
        with torch.no_grad():
            value = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        behind = value if self.late else value[:-1]
        wanted = ids if self.late else ids[1:]
        values = behind[torch.arange(len(wanted)), wanted].tolist()
        values = ([None, *values[1:]] if self.late else [None, *values])[self.bos :] + [-0.5] * self.generated
        usage = {"prompt_tokens": len(ids), "completion_tokens": self.generated}
        return {"choices": [{"text": "x", "logprobs": {"token_logprobs": values}}], "usage": usage}

    def encoded(self, text):
        prompt = next(one for one in self.golden.prompts if text.startswith(one.query))
        rest = text.removeprefix(prompt.query)
        return prompt.ids + self.golden.sequences[self.golden.sequence_texts.index(rest)]


@pytest.mark.parametrize(
    ("takes", "reply"), [(str, {}), *(((list, str), one) for one in ({}, {"generated": 0}, {"bos": True}))]
)
def test_a_server_that_echoes_is_checked_by_whole_sequences(export, said, reply, takes):
    with serving(Golden.from_export(export), echo=Echo(export, **reply), takes=takes) as (url, seen):
        record = json.loads(said("verify", export, "--url", url, "--json"))
    assert (record["worst"] < 1e-5, record["unchecked"]) == (True, None)
    assert all(row["found"] == row["expected"] for row in record["prompts"])
    echoed = [body for body in seen if body.get("echo")]
    assert len(echoed) == 3 * len(record["prompts"])
    assert all(body["max_tokens"] == 1 and body["temperature"] == 0 for body in echoed)


def test_labels_that_are_not_among_the_first_tokens_are_compared_all_the_same(export, said, refused):
    """As vLLM with a fit that says no label: its most probable tokens are other ones."""

    def others(*_):
        return {"top_logprobs": [{" other": -0.5}]}

    value = Golden.from_export(export)
    with serving(value, echo=Echo(export), shape=others) as (url, seen):
        assert "The most probable whole label answers 3 of 3 prompts" in said("verify", export, "--url", url)
    assert all(body["max_tokens"] == 1 for body in seen)  # nothing is generated
    with serving(value, shape=others, echo=refusing) as (url, _):
        assert "ask for more with --logprobs" in refused("verify", export, "--url", url)


def test_a_server_with_another_model_is_found_out(export, said):
    value = Golden.from_export(export)
    other = Echo(export)
    with torch.no_grad():
        other.model.get_input_embeddings().weight[value.label_ids[0]] *= -1
    with serving(value, echo=other) as (url, _):
        assert "does not hold" in said("verify", export, "--url", url, "--tolerance", "0.01", code=1)


def refusing(body):
    """As llama.cpp's own server."""


def ignoring(body):
    """The prompt's tokens are left out."""
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 1}
    return {"choices": [{"logprobs": {"token_logprobs": [-0.5]}}], "usage": usage}


def miscounting(body):
    return ignoring({"prompt": [*body["prompt"], 0]})


def silent(body):
    return {"choices": [{"logprobs": None}]}


@pytest.mark.parametrize("echo", [refusing, ignoring, miscounting, silent, "late"])
def test_a_server_that_tells_no_sequences_names_no_label(export, said, echo):
    shown = Echo(export, late=True) if echo == "late" else echo
    with serving(Golden.from_export(export), echo=shown) as (url, _):
        printed = said("verify", export, "--url", url)
        assert "holds" in printed
        record = json.loads(said("verify", export, "--url", url, "--json"))
    assert {row["found"] for row in record["prompts"]} == {"-"}
    assert "whole label sequences were not checked" in record["unchecked"].lower()
    assert record["unchecked"].lower() in " ".join(printed.lower().split())
