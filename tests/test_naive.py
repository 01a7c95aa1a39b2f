"""Speed changes no results: the package against the paper's algorithm written the straightforward way."""

import sys
from pathlib import Path

import pytest
import torch

from i2cl import CalibrationConfig, Decoder, Example, Task, Template, calibrate, extract
from i2cl.injections.pool import InjectionPool
from tiny import tiny_model, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from naive import Naive

FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "qwen2", "gemma2", "phi", "falcon", "mixtral", "bloom"]
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = [
    Example("a warm film " + "indeed " * (3 * row % 7) + ("good" if row % 2 else "dull"), row % 2)
    for row in range(7)
]
TEXTS = ["warm", "a cold and lifeless film " * 3, "one of the best", "dull " * 9, "nothing at all"]
CONFIG = CalibrationConfig(epochs=5, noise=0.0, lr=0.05)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_fast_path_equals_the_naive_one(model_type):
    decoder = Decoder(tiny_model(model_type), tiny_tokenizer(), name=model_type)
    naive = Naive(decoder, TASK, CONFIG)
    steps = CONFIG.batches(len(SHOTS), seed=3)
    naive.extract(SHOTS)
    naive.calibrate(SHOTS, steps)
    context = extract(decoder, TASK, SHOTS)
    injection = calibrate(decoder, TASK, SHOTS, context, CONFIG, seed=3)
    wanted = naive.coefficients.detach().view(decoder.layers, 2, 2)
    assert (wanted - torch.tensor([CONFIG.init_lambda, CONFIG.init_beta])).abs().max() > 0.05
    torch.testing.assert_close(context.values.flatten(0, 1), naive.vectors, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(injection.coefficients, wanted, rtol=1e-3, atol=1e-3)
    plain = naive.scores(TEXTS)
    torch.testing.assert_close(injection.scores(decoder, TEXTS), plain, rtol=1e-3, atol=5e-3)
    assert injection.predict(decoder, TEXTS) == [TASK.labels[row] for row in plain.argmax(-1).tolist()]
    mixed = InjectionPool(decoder, {"films": injection}).scores(TEXTS, ["films"] * len(TEXTS))
    torch.testing.assert_close(torch.stack(mixed), plain, rtol=1e-3, atol=5e-3)
