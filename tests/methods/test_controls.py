"""Variants of I2CL: unseen and corrupted demonstrations, and demonstrations in the prompt."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fitting import (
    FAMILIES,
    SHOWN,
    TEXTS,
    first_tokens,
    fit,
    injecting,
    new_decoder,
    plain_logits,
    shown_string,
)
from i2cl import CalibrationConfig, Example, Template, calibrate, extract
from i2cl.methods.i2cl_variants import CorruptionConfig, corrupt

CLOSE = {"atol": 2e-5, "rtol": 1e-5}


def test_unseen_variant_injects_the_vector_of_other_demonstrations(films, demonstrations):
    decoder = new_decoder("llama")
    seen = fit("i2cl", decoder, films, demonstrations, epochs=2)
    unseen = fit("i2cl_unseen", decoder, films, demonstrations, epochs=2)
    assert torch.equal(seen.injection.coefficients, unseen.injection.coefficients)
    assert not torch.equal(seen.injection.context, unseen.injection.context)
    assert unseen.cost.held_out == len(SHOWN)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_i2cl_over_icl_injects_into_demonstrations(model_type, films, demonstrations):
    decoder = new_decoder(model_type)
    predictor = fit("i2cl_over_icl", decoder, films, demonstrations, epochs=2)
    prompts = [shown_string(films) + films.template.query(text) for text in TEXTS]
    with (
        torch.no_grad(),
        injecting(decoder, predictor.injection.context, predictor.injection.coefficients),
    ):
        expected = plain_logits(decoder, prompts).log_softmax(-1)[:, first_tokens(decoder, films)]
    torch.testing.assert_close(predictor.log_probs(TEXTS), expected, **CLOSE)


@pytest.mark.parametrize("model_type", [*FAMILIES, "bloom", "mistral-sliding"])
def test_i2cl_over_icl_calibration_can_cache_demonstrations(model_type, films, demonstrations, monkeypatch):
    """Caching the demonstrations once per step gives the same coefficients."""
    options = {"epochs": 2, "noise": 0.0}
    shared = fit("i2cl_over_icl", new_decoder(model_type), films, demonstrations, **options)
    monkeypatch.setattr("i2cl.core.calibration.common_prefix", lambda _queries: ())
    whole = fit("i2cl_over_icl", new_decoder(model_type), films, demonstrations, **options)
    assert not torch.equal(whole.injection.coefficients, torch.tensor([0.1, 1.0]).expand(2, 2, 2))
    torch.testing.assert_close(
        shared.injection.coefficients, whole.injection.coefficients, atol=1e-4, rtol=1e-4
    )


CORRUPTIONS = ("random_label", "random_order", "without_format")


def corrupted_inputs(corruption, task, demonstrations, seed):
    """Return the inputs of the corrupted stage; the random draw itself is tested below."""
    if corruption == "without_format":
        return replace(task, template=Template("{text} {label}", task.template.separator)), demonstrations
    _, drawn = corrupt(task, demonstrations, CorruptionConfig(corruption=corruption), seed)
    field = "label" if corruption == "random_label" else "text"
    pairs = zip(demonstrations, drawn, strict=True)
    return task, [replace(old, **{field: getattr(new, field)}) for old, new in pairs]


@pytest.mark.parametrize("stage", ["vectorization", "calibration"])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_one_stage_sees_corrupted_demonstrations(corruption, stage, films, demonstrations):
    decoder, config = new_decoder("llama"), CalibrationConfig(epochs=2)
    films = replace(films, template=Template(films.template.format, separator="\n\n"))
    options = {"epochs": 2, "corruption": corruption, "stage": stage}
    predictor = fit("i2cl_corrupted", decoder, films, demonstrations, 3, **options)
    stages = [(films, demonstrations), (films, demonstrations)]
    stages[stage == "calibration"] = corrupted_inputs(corruption, films, demonstrations, 3)
    assert stages[0] != stages[1]
    vector = extract(decoder, *stages[0])
    injection = calibrate(decoder, *stages[1], vector, config, seed=3)
    assert torch.equal(predictor.injection.context, vector.context)
    assert torch.equal(predictor.injection.coefficients, injection.coefficients)
    asked = replace(injection, task=films)  # queries keep the template
    assert torch.equal(predictor.log_probs(TEXTS).log_softmax(-1), asked.log_probs(decoder, TEXTS))
    intact = fit("i2cl", decoder, films, demonstrations, 3, epochs=2).injection
    assert torch.equal(predictor.injection.context, intact.context) == (stage == "calibration")
    assert not torch.equal(predictor.injection.coefficients, intact.coefficients)


def test_corruption_changes_only_what_it_names(films):
    films = replace(films, labels=("a", "b", "c"))
    examples = [Example(f"one  two\nthree two, {number} films", number % 2) for number in range(60)]
    draws = {}
    for corruption in CORRUPTIONS:
        config = CorruptionConfig(corruption=corruption)
        draws[corruption] = corrupt(films, examples, config, 0)
        assert corrupt(films, examples, config, 0) == draws[corruption]
    assert [name for name, (task, _) in draws.items() if task != films] == ["without_format"]
    assert draws["without_format"][1] == tuple(examples)

    _, labelled = draws["random_label"]
    assert [example.text for example in labelled] == [example.text for example in examples]
    counts = Counter(example.label for example in labelled)
    assert set(counts) == {0, 1, 2}
    assert min(counts.values()) > 10
    assert any(old.label == new.label for old, new in zip(examples, labelled, strict=True))

    _, ordered = draws["random_order"]
    for old, new in zip(examples, ordered, strict=True):
        assert (Counter(new.text.split()), new.label) == (Counter(old.text.split()), old.label)
    assert len({tuple(new.text.split().index(word) for word in ("one", "films")) for new in ordered}) > 5
    for name in ("random_label", "random_order"):
        assert corrupt(films, examples, CorruptionConfig(corruption=name), 1)[1] != draws[name][1]
