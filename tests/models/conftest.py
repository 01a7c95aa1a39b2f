"""A checkpoint and gradients for the tests of precision and offloading."""

from importlib.util import find_spec

import pytest
import torch

from fitting import random_edit
from i2cl import Decoder
from i2cl.models.batching import make_batch
from i2cl.models.edits import AffineEdit
from i2cl.models.training import Backward
from tiny import tiny_folder

WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes whose rows are whole blocks of 4-bit codes."""

TEXTS = ["this film is good", "a bad and dull film indeed", "fine"]

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("accelerate") is None,
    reason="needs bitsandbytes and accelerate: pip install 'i2cl[quant]'",
)


def saved(folder, model_type="llama", **overrides):
    return str(tiny_folder(folder, model_type, **overrides))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def plain(checkpoint):
    return Decoder.from_pretrained(checkpoint)


def edit_of(decoder):
    """An edit, and its coefficients, to which gradients flow."""
    values, _ = random_edit(decoder)
    coefficients = torch.tensor([0.3, 1.1]).repeat(decoder.layers, 2, 1).requires_grad_()
    return AffineEdit.linear(values, coefficients), coefficients


def gradients(decoder, scale=1.0, through=None):
    """Gradient of a label's log-probability with respect to every lambda and beta."""
    edit, coefficients = edit_of(decoder)
    batch = make_batch([(5, 9, 2, 7, 30), (11, 40, 3)], decoder.device)
    with decoder.frozen(), torch.enable_grad():
        value = decoder.forward(batch, edit=edit)[:, 0].float().log_softmax(-1)[:, 7].mean()
        (through or Backward([coefficients]))(value * scale)
    return coefficients.grad / scale


def look(decoder):
    """Run without gradients."""
    decoder.capture(make_batch([(5, 9, 2)], decoder.device))


def flags(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}
