"""Class vectors: extraction class by class, their calibration by hand, and every use of the artefact."""

import json
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from i2cl import InjectionPool, extract_classes
from i2cl.artefact import DESCRIPTION, TENSORS
from i2cl.calibration import calibrate
from i2cl.classes import mixture
from i2cl.context import ContextVector, ExtractConfig, extract
from i2cl.decoder import Decoder
from i2cl.errors import I2CLError
from i2cl.export import fold
from i2cl.injection import Injection
from i2cl.recipe import CalibrationConfig
from i2cl.tasks import Example, Task, Template
from tiny import tiny_model, tiny_tokenizer

FAMILIES = ("llama", "gpt2", "gemma2")
TASK = Task("films", ("positive", "negative", "mixed"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = (
    Example("a warm film", 0),
    Example("dull", 1),
    Example("warm and dull", 2),
    Example("funny", 0),
    Example("a lifeless film", 1),
    Example("so so", 2),
)
UNEVEN = (*SHOTS, Example("the best of the year", 0))
TEXTS = ["a lifeless film", "the best of the year, by far", "hm"]
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@cache
def decoder_of(case):
    return Decoder(tiny_model(case), tiny_tokenizer(), name=f"tiny-{case}")


def fitted(case="llama", *, shots=SHOTS, writers="both", seed=0, start=None, batches=None, **config):
    decoder = decoder_of(case)
    vectors = extract_classes(decoder, TASK, shots, ExtractConfig(writers=writers))
    config = CalibrationConfig(**({"epochs": 2} | config))
    return calibrate(decoder, TASK, shots, vectors, config, seed=seed, start=start, batches=batches)


def scalars(injection):
    """lambda of each class and beta, as they were fitted: [layer, site, (lambda_1, ..., lambda_K, beta)]."""
    amount, beta = injection.coefficients.split(1, -1)
    return torch.cat([len(TASK.labels) * amount * injection.classes.weights, beta], dim=-1)


# Extraction


@pytest.mark.parametrize("config", [{}, {"writers": "hidden"}, {"token": "first"}, {"separator": False}])
@pytest.mark.parametrize("case", FAMILIES)
def test_each_class_alone(case, config):
    decoder, config = decoder_of(case), ExtractConfig(**config)
    vectors = extract_classes(decoder, TASK, UNEVEN, config)
    assert [one.demonstrations for one in vectors] == [3, 2, 2]
    for label, vector in enumerate(vectors):
        alone = extract(decoder, TASK, [shot for shot in UNEVEN if shot.label == label], config)
        assert torch.equal(vector.values, alone.values)
        assert vector.config == config
    whole = extract(decoder, TASK, UNEVEN, config)
    mean = ContextVector.mean(vectors, [one.demonstrations for one in vectors])
    torch.testing.assert_close(mean.values, whole.values, **CLOSE)


def test_every_class_needs_a_demonstration():
    with pytest.raises(I2CLError, match="class 'mixed' of task 'films' has no demonstration"):
        extract_classes(decoder_of("llama"), TASK, SHOTS[:2])
    with pytest.raises(I2CLError, match="no demonstrations were given"):
        extract_classes(decoder_of("llama"), TASK, [])
    with pytest.raises(I2CLError, match="demonstration 1 has label 3"):
        extract_classes(decoder_of("llama"), TASK, [Example("a film", 3)])


# A weighted sum as one vector and one lambda


@pytest.mark.parametrize("seed", range(5))
def test_a_weighted_sum_is_one_vector_times_lambda(seed):
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(3, 4, 2, 8, generator=generator)
    amounts = torch.randn(4, 2, 3, generator=generator)
    values, amount, weights = mixture(vectors, amounts)
    wanted = torch.einsum("kisd,isk->isd", vectors, amounts)
    torch.testing.assert_close(amount[..., None] * values, wanted, **CLOSE)
    torch.testing.assert_close(amount[..., None] * weights, amounts)
    torch.testing.assert_close(weights.abs().sum(-1), torch.ones(4, 2))


def test_amounts_of_one_sign_make_a_mean_and_their_sum():
    vectors = torch.randn(2, 1, 1, 4)
    for amounts in ([0.3, 0.1], [-0.3, -0.1]):
        values, amount, weights = mixture(vectors, torch.tensor([[amounts]]))
        assert amount.item() == pytest.approx(sum(amounts))
        torch.testing.assert_close(weights[0, 0], torch.tensor([0.75, 0.25]))
        torch.testing.assert_close(values, 0.75 * vectors[0] + 0.25 * vectors[1])


def test_amounts_that_cancel_out_or_are_zero_divide_by_nothing():
    vectors = torch.randn(2, 1, 1, 4)
    values, amount, _ = mixture(vectors, torch.tensor([[[0.5, -0.5]]]))
    assert amount.item() == 1
    torch.testing.assert_close(values, (vectors[0] - vectors[1]) / 2)
    values, amount, _ = mixture(vectors, torch.zeros(1, 1, 2))
    assert amount.item() == 0
    torch.testing.assert_close(values, vectors.mean(0))


@pytest.mark.parametrize("amount", [0.1, -0.7, 3.0])
def test_one_vector_stays_as_it_is_bit_for_bit(amount):
    vectors, amounts = torch.randn(1, 3, 2, 4), torch.full((3, 2, 1), amount)
    values, found, weights = mixture(vectors, amounts)
    assert torch.equal(values, vectors[0])
    assert torch.equal(found, amounts[..., 0])
    assert torch.equal(weights, torch.ones(3, 2, 1))


# Calibration


def loss_by_hand(case, values, chosen):
    """Cross-entropy of the first label token, row by row, with hooks of its own; values are all scalars."""
    decoder, losses = decoder_of(case), []
    vectors = torch.stack([one.values for one in extract_classes(decoder, TASK, SHOTS)])

    def hook(layer, index):
        def change(_module, _args, output):
            old = output[0] if isinstance(output, tuple) else output
            *amounts, keep = values[layer, index]
            added = sum(amount * vectors[label, layer, index] for label, amount in enumerate(amounts)) / 3
            new = added + keep * old
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return change

    with ExitStack() as stack:
        for layer, pair in enumerate(decoder.writers):
            for index, module in enumerate(pair):
                stack.callback(module.register_forward_hook(hook(layer, index)).remove)
        for row in chosen:
            query = tiny_tokenizer()(TASK.template.query(SHOTS[row].text))["input_ids"]
            label = tiny_tokenizer()(TASK.labels[SHOTS[row].label])["input_ids"][0]
            logits = decoder.model(torch.tensor([query]), use_cache=False).logits[0, -1].log_softmax(-1)
            losses.append(-logits[label])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("formula", ["linear", "add"])
@pytest.mark.parametrize("case", FAMILIES)
def test_one_step_by_hand(case, formula):
    first = torch.tensor([0.1, 0.1, 0.1, 1.0]).repeat(decoder_of(case).layers, 2, 1).requires_grad_()
    wanted = loss_by_hand(case, first, [0, 1, 4])
    (gradient,) = torch.autograd.grad(wanted, first)
    found = fitted(case, formula=formula, batches=[[0, 1, 4]], noise=0.0, lr=0.03, weight_decay=0.1)
    assert found.history == (pytest.approx(wanted.item(), rel=1e-5),)
    # The first step of AdamW goes the learning rate's length against the sign of the gradient.
    stepped = first * (1 - 0.03 * 0.1) - 0.03 * gradient.sign()
    if formula == "add":
        stepped = torch.cat([stepped[..., :-1], torch.ones_like(stepped[..., -1:])], dim=-1)
    sure = gradient.abs() > 1e-5
    assert sure.float().mean() > 0.9
    assert ((scalars(found) - stepped).abs() < 1e-4)[sure].all()


@pytest.mark.parametrize("formula", ["linear", "add", "balance"])
@pytest.mark.parametrize("case", FAMILIES)
def test_balanced_and_untrained_it_is_plain_i2cl(case, formula):
    decoder, config = decoder_of(case), CalibrationConfig(epochs=0, formula=formula)
    plain = calibrate(decoder, TASK, SHOTS, extract(decoder, TASK, SHOTS), config)
    found = fitted(case, epochs=0, formula=formula)
    torch.testing.assert_close(found.context.values, plain.context.values, **CLOSE)
    torch.testing.assert_close(found.coefficients, plain.coefficients)
    torch.testing.assert_close(found.scores(decoder, TEXTS), plain.scores(decoder, TEXTS), atol=1e-4, rtol=0)
    assert found.context.demonstrations == plain.context.demonstrations == len(SHOTS)


@pytest.mark.parametrize("config", [{"epochs": 8, "batch_size": 6}, {"optimizer": "lbfgs", "passes": 12}])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_loss_decreases_and_repeats_itself(case, config):
    found, again = fitted(case, **config), fitted(case, **config)
    assert min(found.history) < found.history[0] - 1e-3
    assert found.history == again.history
    assert scalars(found)[..., :-1].std(-1).max() > 1e-3  # the classes' lambdas have come apart
    assert torch.equal(found.context.values, again.context.values)
    assert torch.equal(found.coefficients, again.coefficients)


def test_sites_that_are_left_out_stay_untouched():
    found = fitted(writers="mlp", layers=(1,))
    untouched = torch.tensor([0.0, 1.0])
    assert (found.coefficients[0] == untouched).all()
    assert (found.coefficients[1, 0] == untouched).all()
    assert not (found.coefficients[1, 1] == untouched).any()


def test_the_whole_vector_is_the_weighted_sum_of_the_classes():
    found = fitted(epochs=4)
    wanted = torch.einsum("kisd,isk->isd", found.classes.values, found.classes.weights)
    torch.testing.assert_close(found.context.values, wanted, **CLOSE)
    vectors = extract_classes(decoder_of("llama"), TASK, SHOTS)
    assert torch.equal(found.classes.values, torch.stack([one.values for one in vectors]))


def test_start_coefficients_have_a_lambda_for_each_class():
    start = torch.tensor([0.3, -0.1, 0.2, 0.9]).expand(2, 2, 4)
    torch.testing.assert_close(scalars(fitted(epochs=0, start=start)), start)
    with pytest.raises(I2CLError, match=r"shape \(2, 2, 2\), but \(2, 2, 4\) is needed"):
        fitted(epochs=0, start=start[..., :2])


def test_vectors_that_do_not_fit():
    decoder, config = decoder_of("llama"), CalibrationConfig(epochs=1)
    vectors = extract_classes(decoder, TASK, SHOTS)
    with pytest.raises(I2CLError, match="2 class vectors were given, but task 'films' has 3 labels"):
        calibrate(decoder, TASK, SHOTS, vectors[:2], config)
    with pytest.raises(I2CLError, match="0 class vectors were given"):
        calibrate(decoder, TASK, SHOTS, [], config)
    other = extract(decoder, TASK, SHOTS, ExtractConfig(writers="mha"))
    with pytest.raises(I2CLError, match="context vectors do not match"):
        calibrate(decoder, TASK, SHOTS, [*vectors[:2], other], config)
    with pytest.raises(I2CLError, match=r"the model needs \(3, 2, 32\)"):
        calibrate(decoder_of("gemma2"), TASK, SHOTS, vectors, config)


# The artefact


@pytest.fixture
def saved(tmp_path):
    fitted().save_pretrained(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("writers", ["both", "mha", "hidden"])
def test_roundtrip_is_exact(tmp_path, writers):
    injection = fitted(writers=writers)
    injection.save_pretrained(tmp_path / "out")
    loaded = Injection.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.classes.values, injection.classes.values)
    assert torch.equal(loaded.classes.weights, injection.classes.weights)
    assert torch.equal(loaded.context.values, injection.context.values)
    decoder = decoder_of("llama")
    assert torch.equal(loaded.scores(decoder, TEXTS), injection.scores(decoder, TEXTS))


def test_a_reader_that_knows_no_classes_gets_a_plain_injection(saved, tmp_path):
    """The description has no key of its own, and two of the tensors are all that predictions need."""
    replace(fitted(), classes=None).save_pretrained(tmp_path / "plain")
    described = [json.loads((folder / DESCRIPTION).read_text()) for folder in (saved, tmp_path / "plain")]
    assert described[0] == described[1]
    assert described[0]["format_version"] == 1
    tensors, plain = load_file(saved / TENSORS), load_file(tmp_path / "plain" / TENSORS)
    assert set(plain) == {"context_vector", "coefficients"}
    assert all(torch.equal(tensors[name], value) for name, value in plain.items())
    loaded = Injection.from_pretrained(tmp_path / "plain")
    assert loaded.classes is None
    decoder = decoder_of("llama")
    assert torch.equal(loaded.scores(decoder, TEXTS), fitted().scores(decoder, TEXTS))


@pytest.mark.parametrize("name", ["class_vectors", "class_weights"])
def test_a_damaged_artefact(saved, name):
    tensors = load_file(saved / TENSORS)
    save_file({key: value for key, value in tensors.items() if key != name}, saved / TENSORS)
    with pytest.raises(I2CLError, match=r"class_vectors and class_weights have shapes .* are described"):
        Injection.from_pretrained(saved)
    save_file(tensors | {name: tensors[name][:1].contiguous()}, saved / TENSORS)
    with pytest.raises(I2CLError, match=r"class_vectors and class_weights have shapes .* are described"):
        Injection.from_pretrained(saved)


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_pool_and_export_need_no_change(case):
    decoder, injection = decoder_of(case), fitted(case, epochs=3)
    wanted = injection.scores(decoder, TEXTS)
    pooled = InjectionPool(decoder, {"films": injection}).scores(TEXTS, ["films"] * len(TEXTS))
    torch.testing.assert_close(torch.stack(pooled), wanted, **CLOSE)
    plain = replace(injection, coefficients=torch.tensor([0.0, 1.0]).expand_as(injection.coefficients))
    folded = plain.scores(Decoder(fold(decoder, injection), tiny_tokenizer()), TEXTS)
    torch.testing.assert_close(folded, wanted, **CLOSE)
