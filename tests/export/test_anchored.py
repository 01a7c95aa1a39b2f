"""An anchored injection is one as any other: stored, in a pool, in the weights, an adapter, a GGUF file."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from export.cases import TASK
from fitting import one_line
from i2cl import AnchoredConfig, Decoder, Example, anchor
from i2cl.export import export_gguf, export_hf, export_peft, fold, golden, make_golden, verify
from i2cl.models.scoring import Questions
from tiny import tiny_folder

WORDS = ("a warm film", "dull, dull", "kind all the way", "no")
SHOWN = [Example(text, row % 2) for row, text in enumerate(WORDS)]
TEXTS = ["fine", "a lifeless film, by far"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def own(folder, tmp_path):
    """The same base without generation settings."""
    shutil.copytree(folder, tmp_path / "base", ignore=shutil.ignore_patterns("generation_config.json"))
    return tmp_path / "base"


@pytest.fixture(scope="module")
def decoder(folder):
    return Decoder.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def anchored(decoder):
    result = anchor(decoder, TASK, SHOWN, AnchoredConfig(reach=3.0, steps=2, say_label=False))
    assert result.context.values.abs().max() > 0
    return result


@pytest.fixture
def biased(anchored):
    return replace(anchored, label_bias=(0.25, -0.5))


def test_generate_follows_the_label_prior_of_a_checkpoint(anchored, decoder, folder, tmp_path, said):
    plain = anchored.scores(decoder, golden.TEXTS).log_softmax(-1)
    between = (plain[:, 1] - plain[:, 0]).mean().item()  # a prior that turns some answers and not others
    biased = replace(anchored, label_bias=(between, 0.0))
    wanted = biased.predict(decoder, golden.TEXTS)
    assert wanted != anchored.predict(decoder, golden.TEXTS)
    biased.save_pretrained(tmp_path / "artefact")
    words = ("export", tmp_path / "artefact", tmp_path / "out", "--model", folder, "--json")
    record, ids = json.loads(said(*words)), Questions(decoder, TASK).labels.first
    assert record["prior_kept"] is True
    sent = {str(ids[0]): 100.0 + min(between, 0), str(ids[1]): 100.0 - max(between, 0)}
    assert record["logit_bias"] == pytest.approx(sent)  # on top of what makes it say a label

    result = verify(tmp_path / "out")
    assert result.passed
    assert [row["found"] for row in result.rows()] == wanted
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="float32")
    for text, label in zip(golden.TEXTS, wanted, strict=True):
        query = torch.tensor(Questions(decoder, TASK).queries([text]))
        made = model.generate(query, max_new_tokens=1, do_sample=False)
        assert made[0, -1] == ids[TASK.labels.index(label)]

    config = tmp_path / "out" / "generation_config.json"
    kept = json.loads(config.read_text())
    for left in (None, [[[7], 1.0]], [[[ids[0]], 0.1], [[ids[1]], 0.0]]):
        config.write_text(json.dumps(kept | {"sequence_bias": left}))
        one_line("lacks the label prior", verify, tmp_path / "out")


@pytest.mark.parametrize("form", [list, dict])
def test_a_label_prior_stands_beside_what_the_base_generates_by(biased, decoder, own, tmp_path, form):
    first = Questions(decoder, TASK).labels.first
    of_own = Decoder.from_pretrained(str(own))
    settings = of_own.model.generation_config
    settings.eos_token_id = 7
    settings.sequence_bias = [[[3, 4], 1.5]] if form is list else {(3, 4): 1.5}
    known = make_golden(decoder, biased)
    export_hf(of_own, biased, tmp_path / "out", golden=lambda: known)
    made = GenerationConfig.from_pretrained(tmp_path / "out")
    assert made.eos_token_id == 7
    result = golden.greedy.biases_of(made)
    assert result == {(3, 4): 1.5} | known.sequence_bias
    assert [result[(*known.tail, token)] for token in first] == [100.25, 99.5]
    settings.sequence_bias = [[[*known.tail, first[0]], 1.5]]
    message = f"label token {first[0]} already"
    one_line(message, export_hf, of_own, biased, tmp_path / "new", golden=lambda: known)


def test_a_base_without_generation_settings_keeps_those_of_its_config(anchored, own, tmp_path):
    config = json.loads((own / "config.json").read_text()) | {"eos_token_id": 7}
    (own / "config.json").write_text(json.dumps(config))
    of_own = Decoder.from_pretrained(str(own))
    biased = replace(anchored, base=of_own.base, label_bias=(0.25, -0.5))
    export_hf(own, biased, tmp_path / "out", golden=lambda: make_golden(of_own, biased))
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 7


def test_golden_values_of_another_prior_are_refused(anchored, biased, decoder, folder, tmp_path):
    for one, other in ((biased, anchored), (anchored, biased)):
        made = partial(make_golden, decoder, other)
        one_line("another label prior", export_hf, folder, one, tmp_path / "out", golden=made)


def test_what_cannot_hold_a_label_prior_says_what_to_send(biased, decoder, folder, tmp_path, said):
    for export in (export_peft, export_gguf):
        one_line("leave it out with --drop-prior", export, decoder, biased, tmp_path / "out")
    one_line("leave it out with --drop-prior", fold, decoder, biased)
    one_line("tokens that the golden values name", export_hf, decoder, biased, tmp_path / "out")
    whole = replace(biased, scoring="full")
    made = partial(make_golden, decoder, whole)
    one_line("scored as whole sequences", export_hf, decoder, whole, tmp_path / "out", golden=made)
    biased.save_pretrained(tmp_path / "artefact")
    words = ["export", tmp_path / "artefact", tmp_path / "out", "--model", folder, "--drop-prior"]
    message, ids = said(*words), Questions(decoder, TASK).labels.first
    assert "positive +0.2500, negative -0.5000" in message
    assert f'"logit_bias": {{"{ids[0]}": 100.0000, "{ids[1]}": 99.2500}}' in message
    assert verify(tmp_path / "out").passed
    kept = golden.greedy.biases_of(GenerationConfig.from_pretrained(tmp_path / "out"))
    assert all(value % 100 == 0 for value in kept.values())  # they make it say a label, whatever the prior
