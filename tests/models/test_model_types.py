"""The method on every model type: a context vector, its injection, four gradients; on some a falling loss.

Everything is compared with hooks of its own on the modules that the table names. That these modules are
the right ones is the residual identity's business (`test_architectures.py`).
"""

from functools import partial

import pytest
import torch

from fitting import close, injecting, left_as_found, made, random_edit, replacing
from i2cl import CalibrationConfig, Example, Task, Template, calibrate, extract
from i2cl.models.batching import make_batch
from i2cl.models.edits import AffineEdit
from tiny import CASES, PATHS

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = (Example("a warm film", 0), Example("dull", 1), Example("a funny, warm and funny film", 0))


@pytest.fixture(scope="module", params=CASES)
def decoder(request):
    return made(request.param)


def demonstrations(decoder):
    texts = [TASK.template.demonstration(shot.text, TASK.labels[shot.label]) for shot in SHOTS]
    return decoder.encoder(texts)


def test_context_vector_is_the_mean_of_the_sublayers_last_outputs(decoder):
    wanted = torch.zeros(decoder.layers, 2, decoder.d_model)

    def add(mean, output):
        mean.add_(output.detach().reshape(-1, decoder.d_model)[-1] / len(SHOTS))

    modules = [module for pair in decoder.sublayers for module in pair]
    adding = (partial(add, mean) for mean in wanted.flatten(0, 1))
    with torch.no_grad(), replacing(zip(modules, adding, strict=True)):
        for ids in demonstrations(decoder):
            decoder.model(input_ids=torch.tensor([ids]), use_cache=False)
    context = extract(decoder, TASK, SHOTS)
    assert context.context.abs().amax(-1).min() > 0
    assert close(context.context, wanted)


def test_injection_matches_plain_hooks(decoder):
    values, coefficients = random_edit(decoder, 1, 0.3, (0.5, 1.0))
    batch = make_batch(demonstrations(decoder), torch.device("cpu"))
    ends = torch.arange(len(SHOTS)), batch.last

    def edited(coefficients):
        return decoder.forward(batch, edit=AffineEdit.linear(values, coefficients))[:, 0]

    with torch.no_grad():
        plain = decoder.model(input_ids=batch.input_ids, use_cache=False).logits[ends]
        with injecting(decoder, values, coefficients):
            wanted = decoder.model(input_ids=batch.input_ids, use_cache=False).logits[ends]
        assert close(edited(coefficients), wanted)
        assert close(edited(torch.tensor([0.0, 1.0]).expand_as(coefficients)), plain)
    assert not (wanted - plain).abs().max() <= 0.1 * plain.abs().max()


def test_gradients_of_all_coefficients_match_finite_differences(decoder):
    values, coefficients = random_edit(decoder, 1, 0.3, (0.5, 1.0))
    coefficients.requires_grad_()
    ids = torch.tensor(demonstrations(decoder)[:1])

    def gradient(logits):
        (result,) = torch.autograd.grad(-logits.log_softmax(-1)[5], coefficients)
        return result

    with injecting(decoder, values, coefficients):
        wanted = gradient(decoder.model(input_ids=ids, use_cache=False).logits[0, -1])
    with decoder.frozen():
        batch = make_batch([tuple(ids[0].tolist())], torch.device("cpu"))
        result = gradient(decoder.forward(batch, edit=AffineEdit.linear(values, coefficients))[0, 0])
    assert result.shape == (decoder.layers, 2, 2)
    assert (result.abs() > 1e-6).all()
    assert (result - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("decoder", PATHS, indirect=True)
def test_calibration_reduces_the_loss_and_restores_the_model(decoder):
    config = CalibrationConfig(epochs=20, batch_size=len(SHOTS), lr=0.05)
    with left_as_found(decoder.model):
        result = calibrate(decoder, TASK, SHOTS, extract(decoder, TASK, SHOTS), config)
    assert result.history[-1] < result.history[0] - 0.1
