"""Temperature scaling changes probabilities and never predictions."""

import math

import pytest
import torch

from fitting import raises
from i2cl import with_label_prior, with_temperature
from i2cl.core.injection import TEMPERATURE_BOUNDS
from i2cl.models.scoring import label_log_probs

TEXTS = ["a warm film", "dull", "one of the best of them all"]
UNLABELLED = [f"film number {number} is {number % 7}" for number in range(32)]
BIAS = (0.75, -0.5)


@pytest.mark.parametrize("bias", [None, BIAS])
def test_temperature_is_applied_after_the_label_prior(injection, decoder, bias):
    plain = injection.with_head(bias=bias).log_probs(decoder, TEXTS).double()
    result = with_temperature(injection.with_head(bias=bias), 2.5).log_probs(decoder, TEXTS)
    wanted = (plain / 2.5).log_softmax(-1).float()
    torch.testing.assert_close(result, wanted, atol=1e-6, rtol=0)
    odds = (result[:, 1] - result[:, 0]) * 2.5
    torch.testing.assert_close(odds.double(), plain[:, 1] - plain[:, 0], atol=1e-5, rtol=0)


def test_temperature_1_does_not_change_scores(injection, decoder):
    scores = injection.log_probs(decoder, TEXTS)
    assert torch.equal(with_temperature(injection, 1.0).log_probs(decoder, TEXTS), scores)
    assert with_temperature(injection, 0.5).predict(decoder, TEXTS) == injection.predict(decoder, TEXTS)


def test_predictions_do_not_change_even_for_scores_one_bit_apart():
    low = -torch.rand(3000, generator=torch.Generator().manual_seed(0)) * 20
    pairs = torch.stack([low, low.nextafter(torch.tensor(0.0))], -1)
    pairs = torch.cat([pairs, pairs.flip(-1), low[:, None].expand(-1, 2)])
    for temperature in (*TEMPERATURE_BOUNDS, 0.3, 2.2, 117.0):
        for bias in (None, torch.tensor(BIAS)):
            wanted = label_log_probs(pairs, bias, 1.0).argmax(-1)
            result = label_log_probs(pairs, bias, temperature)
            assert torch.equal(result.argmax(-1), wanted)
            assert torch.equal(result.softmax(-1).argmax(-1), wanted)  # as used by tables and the server


def test_arguments_of_another_type_are_refused(injection):
    message = "injection must be of type Injection, not str: load it with Injection.from_pretrained"
    raises(f"^{message}$", with_temperature, "mood", 2.0)
    for temperature in ("x", None, [2.0]):
        raises("is not a number: give one above 0$", with_temperature, injection, temperature)


def test_impossible_labels_keep_probability_zero():
    result = label_log_probs(torch.tensor([[-math.inf, -1.0, -2.0]]), None, 2.0)
    torch.testing.assert_close(result.exp()[0, 1:], torch.tensor([-0.5, -1.0]).softmax(-1))
    assert result[0, 0] == -math.inf


def test_metrics_are_kept_and_a_label_prior_resets_the_temperature(injection, decoder):
    message = injection.with_report(metrics={"accuracy": 1.0}, evaluation={"rows": 3}, command="i2cl fit")
    result = with_temperature(message, 2.0)
    assert (result.metrics, result.evaluation, result.command) == (message.metrics, message.evaluation, "")
    assert with_temperature(result, 3.0).temperature == 3
    result = with_label_prior(with_temperature(injection, 2.0), decoder, UNLABELLED)
    assert result.temperature == 1
    assert result.label_bias == with_label_prior(injection, decoder, UNLABELLED).label_bias


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e-4, 1e4])
def test_a_temperature_that_is_none_is_refused(injection, bad):
    raises(
        r"^temperature .* is not a number from 0.001 to 1000: change it$", with_temperature, injection, bad
    )
