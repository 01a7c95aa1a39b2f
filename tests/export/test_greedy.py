"""What greedy decoding of an export says, what makes programs say a label, and the calls that tell so."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from commands import run
from export.cases import BEGUN, SHARED, TASK, decoder_of, drawn, injection_for, scaled, with_golden
from export.test_export_server import expected, serving
from fitting import one_line
from i2cl.export import export_hf, fold, golden, greedy, make_golden, verify
from i2cl.export.greedy import FORCE, TEXTS, beams_for, compared_sequences, forced_sequences
from i2cl.models.scoring import Questions
from i2cl.tasks import Template

NO_END = replace(SHARED, template=Template("{text} {label}"))
"""No token ends every prompt."""


def speaking():
    """A model that says "positive" or "negative" after anything: all other logits are 0; and an injection."""
    decoder = decoder_of("llama")
    first, second = Questions(decoder, TASK).labels.first
    with torch.no_grad():
        head = decoder.model.lm_head.weight
        one = head[first].clone()
        head.zero_()
        head[first], head[second] = one, -one
    return decoder, injection_for(decoder)


LONG = [[5, 6], [5, 7, 20], [5, 7, 21, 3, 22], [9]]
LONG += [[10, 11, 12, 13, 14, 23], [10, 11, 24], [10, 25], [15, 26]]
"""Tokens of labels: of several lengths, and of several that begin alike."""


def whole(model, ids, label):
    """Log-probability of a label, token by token."""
    after = ((last_logits(model, [*ids, *label[:place]]), token) for place, token in enumerate(label))
    return sum(scores.float().log_softmax(-1)[token].item() for scores, token in after)


@torch.no_grad()
def last_logits(model, ids):
    return model(torch.tensor([ids])).logits[0, -1]


def said_by(model, ids, **options):
    """What a model generates behind a prompt."""
    return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def change_settings(folder, change):
    config = folder / "generation_config.json"
    kept = json.loads(config.read_text())
    config.write_text(json.dumps(kept | change(kept)))


def test_there_are_twenty_texts_of_several_kinds():
    assert len(set(TEXTS)) == 20
    assert {text[-1] for text in TEXTS} >= set("?!.)g")  # so that a shared end is the template's own
    lengths = [len(text.split()) for text in TEXTS]
    assert min(lengths) <= 6 < 25 <= max(lengths)


@pytest.mark.parametrize("task", [TASK, SHARED, BEGUN], ids=["first", "shared", "begun"])
def test_golden_values_hold_what_the_folded_model_generates(task):
    decoder, injection = drawn("llama", task)
    made, model = make_golden(decoder, injection), fold(decoder, injection)
    longest = max(map(len, made.targets))
    assert (longest == 1) == (task is TASK)
    for prompt in made.prompts:
        assert prompt.greedy == said_by(model, prompt.ids, do_sample=False, max_new_tokens=longest)
    assert made.forced


def test_a_model_that_says_labels_is_left_alone(tmp_path, said, monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    made = with_golden(export_hf, speaking(), tmp_path / "out")
    assert not made.forced
    assert {prompt.prediction for prompt in made.prompts} == set(TASK.labels)
    assert "sequence_bias" not in (tmp_path / "out" / "generation_config.json").read_text()
    message = "Plain greedy decoding answers 20 of 20 prompts with the token of the expected label"
    assert message in said("verify", tmp_path / "out", "--device", "cpu")
    with serving(made) as (url, seen):
        assert message in said("verify", tmp_path / "out", "--url", url)
    assert len(seen) == len(made.prompts)  # the reply with log-probabilities is the answer


def test_settings_that_change_what_is_said_are_found(tmp_path, said):
    made = with_golden(export_hf, speaking(), tmp_path / "out")
    change_settings(tmp_path / "out", lambda _: {"suppress_tokens": made.label_ids})
    printed = said("verify", tmp_path / "out", "--device", "cpu", code=1)
    for part in ("answers 0 of 2 prompts", "decode at temperature 0 without penalties", "does not hold"):
        assert part in printed
    record = json.loads(said("verify", tmp_path / "out", "--device", "cpu", "--json", code=1))
    assert record["greedy"] == {"right": 0, "of": 2}
    assert record["worst"] < record["tolerance"]
    assert {row["greedy"] for row in record["prompts"]} == {"no label"}


@pytest.mark.parametrize(("right", "passes"), [(19, True), (18, False)])
def test_nineteen_of_twenty_are_enough(tmp_path, monkeypatch, right, passes):
    monkeypatch.setattr(golden, "TEXTS", TEXTS)
    made = with_golden(export_hf, speaking(), tmp_path / "out")
    assert len(made.prompts) == 20
    wrong = {prompt.text for prompt in made.prompts[right:]}

    def says(golden, prompt):
        return " a film" if prompt.text in wrong else expected(golden, prompt)

    with serving(made, says=says) as (url, _):
        assert run("verify", tmp_path / "out", "--url", url) == (0 if passes else 1)


def by_hand(model, ids, sequences):
    """The label that the model's own logits choose, token by token among those of labels."""
    result = []
    while not (said := [one for one in sequences if list(one) == result]):
        allowed = sorted({one[len(result)] for one in sequences if list(one[: len(result)]) == result})
        after = last_logits(model, [*ids, *result])
        result.append(max(allowed, key=lambda token: after[token]))
    return said[0]


@pytest.mark.parametrize("task", [TASK, SHARED, BEGUN, NO_END], ids=["first", "shared", "begun", "no-end"])
def test_generate_says_a_label_to_its_end_and_stops(tmp_path, monkeypatch, task):
    monkeypatch.setattr(golden, "TEXTS", TEXTS[::2])
    decoder, injection = drawn("llama", task)
    made = with_golden(export_hf, (decoder, scaled(injection, 0.1)), tmp_path / "out")  # so that texts decide
    assert made.forced
    assert bool(made.tail) == (task is not NO_END)
    model, said = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), set()
    for prompt in made.prompts:
        value = said_by(model, prompt.ids, do_sample=False, max_new_tokens=20)
        if made.beams:
            assert value == max(made.spoken, key=lambda label: whole(model, prompt.ids, label))
        else:
            assert value == [*by_hand(model, prompt.ids, made.spoken), made.end]
        said.add(tuple(value))
    assert bool(made.beams) == (task in (SHARED, BEGUN))
    assert len(said) > 1


@pytest.mark.parametrize("labels", [LONG, LONG[::-1][:7]], ids=["eight", "seven"])
def test_a_beam_for_each_label_finds_the_best_whole_one(labels):
    """Labels of one to six tokens, whose logits differ by tens, against every sum."""
    tail, result = (7, 8), set()
    assert beams_for(labels, tail) == len(labels)
    generation = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=0)
    greedy.search_whole(generation, len(labels), labels, 0)
    assert greedy.searches(generation, len(labels), labels)
    pairs = compared_sequences(labels, tail)
    generation.sequence_bias = [[list(tokens), value] for tokens, value in pairs.items()]
    for seed in range(4):
        model, draw = decoder_of("llama").model, torch.Generator().manual_seed(seed)
        head = model.lm_head.weight
        with torch.no_grad():
            head.copy_(3 * torch.randn(head.shape, generator=draw))
        for _ in range(5):
            ids = [*torch.randint(1, 200, (5,), generator=draw).tolist(), *tail]
            made = said_by(model, ids, generation_config=generation)
            sums = [whole(model, ids, label) for label in labels]
            assert made == list(labels[sums.index(max(sums))])
            result.add(tuple(made))
    assert len(result) > 2


def test_whether_beams_can_compare():
    assert beams_for([[5, 6], [5, 7]], (1,)) == 2
    assert beams_for([[5, 6], [5, 7]], ()) == 0  # a bias would be for any place
    assert beams_for([[5, 6], [6, 7]], (1,)) == 0  # 6 would end the second label
    assert beams_for([[5], [6]], (1,)) == 0  # one token each needs no search
    assert beams_for([[5, 100 + place] for place in range(65)], (1,)) == 0
    expected = dict.fromkeys([(1, 2, 5), (1, 2, 5, 7), (1, 2, 5, 7, 8)], FORCE)
    expected |= {(1, 2, 9): 3 * FORCE, (1, 2, 5, 6): 2 * FORCE}
    assert compared_sequences([[5, 6], [5, 7, 8], [9]], (1, 2)) == expected


@pytest.mark.parametrize("change", [{"num_beams": 2}, {"length_penalty": 1.0}, {"eos_token_id": 0}, None])
def test_a_lost_search_or_bias_is_named(tmp_path, change):
    with_golden(export_hf, drawn("llama", SHARED if change else TASK), tmp_path / "out")
    change_settings(tmp_path / "out", lambda kept: change or {"sequence_bias": kept["sequence_bias"][1:]})
    lost = "the beam search over whole labels" if change else "the labels' sequence_bias"
    one_line(f"lacks {lost}", verify, tmp_path / "out")


def test_the_bias_is_for_the_end_of_a_prompt_alone():
    expected = dict.fromkeys([(1, 2, 5), (1, 2, 8)], FORCE)
    expected |= dict.fromkeys([(1, 2, 5, 6), (1, 2, 5, 7), (1, 2, 8, 0)], 2 * FORCE)
    expected |= dict.fromkeys([(1, 2, 5, 6, 0), (1, 2, 5, 7, 0)], 3 * FORCE)
    assert forced_sequences([[5, 6], [5, 7], [8]], (), (1, 2), 0) == expected
    assert forced_sequences([[5], [6]], (0.5, -1.0), (), None) == {(5,): 100.5, (6,): 99.0}
    again = forced_sequences([[5, 6, 5, 7], [5, 6, 8]], (), (), None)
    assert (again[(5, 6, 5)], again[(5, 6, 8)]) == (2 * FORCE, 3 * FORCE)  # 5 alone lifts 5 once more
    assert forced_sequences([[5, 0]], (), (), 0) == {(5,): FORCE, (5, 0): 2 * FORCE}
    assert greedy.shared_end([(1, 2, 3, 4), (9, 3, 4), (5, 3, 4)]) == (3, 4)
    assert greedy.shared_end([(1, 2), (1, 3)]) == ()


def test_whole_labels_that_cannot_be_forced_right_are_told(tmp_path, said, monkeypatch):
    monkeypatch.setattr(golden, "TEXTS", TEXTS[::2])
    for task, code, message in (
        (SHARED, 0, "A search over whole labels (3 beams) answers 10 of 10 prompts"),
        (NO_END, 1, "That is too few: compare log-probabilities of whole labels"),  # token by token
    ):
        with_golden(export_hf, drawn("llama", task), tmp_path / str(code))
        assert message in said("verify", tmp_path / str(code), "--device", "cpu", code=code)
