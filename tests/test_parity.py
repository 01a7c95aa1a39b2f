"""Numbers of the paper's released code on a small Llama, reproduced through the public API.

The released code drew its batches at random; the recorded ones are given to `calibrate`, and both
sides trained without noise, so that every number is determined.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from i2cl import CalibrationConfig, Decoder, Example, Task, Template, calibrate, extract
from i2cl.models.scoring import LabelScorer

FOLDER = Path(__file__).parent / "data" / "parity"
CLOSE = {"atol": 1e-5, "rtol": 0}
RECORD = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))
TASK = Task("parity", tuple(RECORD["labels"]), Template("Review: {text}\nSentiment: {label}"))
SHOWN = [Example(**demonstration) for demonstration in RECORD["demonstrations"]]


@pytest.fixture(scope="module")
def golden():
    return load_file(FOLDER / "golden.safetensors")


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained(str(FOLDER), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def context(decoder):
    return extract(decoder, TASK, SHOWN)


def logits(decoder, edit=None):
    """Logits of the whole vocabulary after each recorded query."""
    scorer = LabelScorer(decoder, TASK)
    queries = scorer.queries([query["text"] for query in RECORD["queries"]])
    rows = torch.empty(len(queries), decoder.model.config.vocab_size)
    with torch.no_grad():
        for batch, result in decoder.run_batches(queries, partial(decoder.forward, edit=edit)):
            rows[list(batch.rows)] = result[:, 0]
    return rows


def test_context_vector_and_logits_without_it_and_with_it(context, golden, decoder):
    torch.testing.assert_close(context.context, golden["context_vector"], **CLOSE)
    torch.testing.assert_close(logits(decoder), golden["zero_shot_logits"], **CLOSE)
    first = calibrate(decoder, TASK, SHOWN, context, CalibrationConfig(epochs=0))
    torch.testing.assert_close(logits(decoder, first.edit()), golden["initial_logits"], **CLOSE)
    assert not torch.allclose(golden["initial_logits"], golden["zero_shot_logits"], atol=1e-3)


def test_calibrated_coefficients_and_logits(context, golden, decoder):
    """The recorded float32 numbers carry their own rounding over forty steps: layers in float64 differ by
    1.2e-5, and so does float32 on some processors."""
    config = CalibrationConfig.recipe("released", epochs=8, noise=0.0)
    batches = RECORD["calibration"]["batches"]
    calibrated = calibrate(decoder, TASK, SHOWN, context, config, batches=batches)
    torch.testing.assert_close(calibrated.coefficients, golden["coefficients"], **CLOSE)
    result = logits(decoder, calibrated.edit())
    torch.testing.assert_close(result, golden["calibrated_logits"], atol=2e-5, rtol=0)
    assert not torch.allclose(golden["calibrated_logits"], golden["initial_logits"], atol=1e-3)
