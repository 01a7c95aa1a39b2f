"""Label priors of injections."""

import math
from dataclasses import replace

import pytest
import torch

from fitting import raises
from i2cl import Example, with_label_prior
from i2cl.injections.label_prior import FewTextsWarning, without_label_prior
from i2cl.methods.injecting import injection_predictor as predictor_of
from i2cl.methods.postprocessing import LabelPrior

TEXTS = ["a warm film", "dull", "one of the best of them all"]
UNLABELLED = [f"film number {number} is {number % 7}" + " indeed" * (number % 3) for number in range(40)]


def test_scores_match_the_wrapper(injection, decoder, task):
    rows = replace(task, train=tuple(Example(text, number % 2) for number, text in enumerate(UNLABELLED)))
    inner = predictor_of(injection, decoder, task)
    wrapper = LabelPrior().wrap(decoder, inner, rows, (), seed=0)
    result = with_label_prior(injection, decoder, rows.unlabelled(64, (), 0))
    wanted = wrapper.log_probs(TEXTS)
    assert torch.equal(result.log_probs(decoder, TEXTS), wanted)
    assert not torch.allclose(wanted, inner.log_probs(TEXTS).log_softmax(-1), atol=1e-2)
    assert result.predict(decoder, TEXTS) == [task.labels[best] for best in wanted.argmax(-1)]
    torch.testing.assert_close(result.log_probs(decoder, TEXTS[1:2]), wanted[1:2], atol=1e-5, rtol=1e-5)


def test_bias_is_log_prior_minus_log_mean(injection, decoder):
    mean = injection.log_probs(decoder, UNLABELLED).softmax(-1).double().mean(0)
    for prior in (None, (0.8, 0.2)):
        result = with_label_prior(injection, decoder, UNLABELLED, prior)
        wanted = (torch.tensor(prior or (0.5, 0.5)).double() / mean).log()
        torch.testing.assert_close(torch.tensor(result.label_bias).double(), wanted, atol=1e-5, rtol=1e-5)
        assert result.settings["label_prior"] == {"texts": 40, "prior": list(prior) if prior else None}
        again = with_label_prior(result, decoder, UNLABELLED, prior)
        assert again.label_bias == result.label_bias  # the old bias is not included


def test_results_without_the_bias_are_removed(injection, decoder):
    message = injection.with_report(metrics={"accuracy": 1.0}, evaluation={"rows": 3}, command="i2cl fit")
    result = with_label_prior(message, decoder, UNLABELLED)
    assert (result.metrics, result.evaluation, result.command) == ({}, {}, "")
    assert without_label_prior(injection) is injection
    plain = without_label_prior(result.with_report(metrics={"accuracy": 0.5}))
    assert (plain.label_bias, plain.metrics, plain.settings) == (None, {}, injection.settings)


def test_few_texts_give_a_warning_and_none_an_error(injection, decoder):
    with pytest.warns(FewTextsWarning, match="measured on 31 texts is unreliable: give at least 32"):
        result = with_label_prior(injection, decoder, UNLABELLED[:31])
    assert all(map(math.isfinite, result.label_bias))
    with_label_prior(injection, decoder, UNLABELLED[:32])
    raises("no texts were given", with_label_prior, injection, decoder, [])


@pytest.mark.parametrize(
    ("prior", "named"),
    [
        *((prior, "2 labels") for prior in ((0.5,), (0.5, 0.3, 0.2))),
        *((prior, "above 0") for prior in ((1.0, 0.0), (1.5, -0.5), (math.nan, 0.5))),
        *(((0.5, 0.3), "sum to 0.8"), ((math.inf, 0.5), "sum to inf")),
    ],
)
def test_invalid_priors_are_refused(injection, decoder, prior, named):
    raises(named, with_label_prior, injection, decoder, UNLABELLED, prior)


@pytest.mark.parametrize("bias", [(0.5,), (0.1, 0.2, 0.3), (math.nan, 0.0), (0.0, math.inf)])
def test_bias_of_the_wrong_size_is_refused(injection, bias):
    raises(r"label_bias .* 2 labels", injection.with_head, bias=bias)
