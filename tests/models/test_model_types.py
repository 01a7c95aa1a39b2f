"""The method on every model type: an injection and its gradients.

Everything is compared with hooks of its own on the modules that the table names. That these modules are
the right ones is the residual identity's business (`test_architectures.py`).
"""

import pytest
import torch

from fitting import close, injecting, new_decoder, random_edit
from i2cl import Example, Task, Template
from i2cl.models.batching import make_batch
from i2cl.models.edits import AffineEdit
from tiny import CASES

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = (Example("a warm film", 0), Example("dull", 1), Example("a funny, warm and funny film", 0))


@pytest.fixture(scope="module", params=CASES)
def decoder(request):
    return new_decoder(request.param)


def demonstrations(decoder):
    texts = [TASK.template.demonstration(shot.text, TASK.labels[shot.label]) for shot in SHOTS]
    return decoder.encoder(texts)


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
