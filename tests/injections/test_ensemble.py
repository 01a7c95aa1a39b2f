"""Weights of a log-linear pool, and the settings that choose its members."""

import numpy as np
import pytest

from fitting import raises
from i2cl import encoders
from i2cl.injections import ensemble
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, cross_fitted, likely_weights
from i2cl.injections.temperature import best_temperature, log_softmax

PRIOR = WeightPrior(0.4, 0.2)


def drawn(rows, sharpness, seed=0):
    """Log-probabilities of two members: one knows the label as well as it says, the other guesses."""
    rng = np.random.default_rng(seed)
    good = log_softmax(sharpness * rng.normal(size=(rows, 3)))
    gold = np.array([rng.choice(3, p=np.exp(row)) for row in good])
    return np.stack([good, log_softmax(sharpness * rng.normal(size=(rows, 3)))]), gold


def test_weight_of_one_member_is_the_inverse_of_the_best_temperature():
    log_probs, gold = drawn(200, 3.0)
    (weight,) = likely_weights(2.5 * log_probs[:1], gold, [WeightPrior(0.4, 1e6)])
    assert 1 / weight == pytest.approx(best_temperature(2.5 * log_probs[0], gold), rel=1e-3)


def test_useless_member_loses_its_weight_with_enough_rows():
    log_probs, gold = drawn(2000, 3.0)
    good, useless = likely_weights(log_probs, gold, [WeightPrior(0.5, 1.0)] * 2)
    assert good == pytest.approx(1, abs=0.1)
    assert useless < 0.15


def test_few_rows_leave_the_weights_near_the_prior():
    log_probs, gold = drawn(2, 1.0)
    assert likely_weights(log_probs[:, :0], gold[:0], [PRIOR, PRIOR]) == pytest.approx((0.4, 0.4))
    assert likely_weights(log_probs, gold, [PRIOR, PRIOR]) == pytest.approx((0.4, 0.4), rel=0.5)


def test_impossible_labels_do_not_make_the_weights_nan():
    log_probs, gold = drawn(20, 3.0)
    log_probs[0, 0, gold[0]] = -np.inf
    assert np.isfinite(likely_weights(log_probs, gold, [PRIOR, PRIOR])).all()


def test_cross_fitted_rows_do_not_choose_their_own_weights():
    log_probs, gold = drawn(30, 3.0)
    changed = gold.copy()
    changed[4] = (gold[4] + 1) % 3
    before, after = (cross_fitted(log_probs, labels, [PRIOR, PRIOR]) for labels in (gold, changed))
    assert np.array_equal(before[4], after[4])
    assert not np.array_equal(before[5], after[5])
    typical = log_softmax(np.tensordot([0.4, 0.4], log_probs, 1))
    assert cross_fitted(log_probs, gold, [PRIOR, PRIOR], folds=0) == pytest.approx(typical)


def test_weights_of_rows_whose_labels_repeat_in_turn_come_from_every_label(monkeypatch):
    labels_seen = []
    monkeypatch.setattr(
        ensemble,
        "likely_weights",
        lambda log_probs, gold, priors: labels_seen.append(set(gold)) or [1.0] * len(priors),
    )
    gold = np.arange(100) % 10
    cross_fitted(np.zeros((2, 100, 10)), gold, [PRIOR, PRIOR])
    assert labels_seen == [{*range(10)}] * 10


def test_default_members_depend_on_what_is_installed(monkeypatch):
    assert EnsembleConfig().members() == ("llm", "tfidf")
    monkeypatch.setattr(encoders, "local_encoder", lambda: "minilm")
    monkeypatch.setattr(encoders, "encoder_source", lambda name: name)
    assert EnsembleConfig().members() == ("llm", "embeddings", "tfidf")
    assert EnsembleConfig(experts="tfidf, llm").members() == ("llm", "tfidf")
    assert EnsembleConfig(experts="tfidf,embeddings").members() == ("embeddings", "tfidf")


def test_ensemble_options_are_taken_out_of_the_options_of_a_method():
    config, rest = EnsembleConfig.take_from({"experts": "llm", "embeddings_c": "3", "steps": "2"})
    assert (config, rest) == (EnsembleConfig(experts=("llm",), embeddings_c=3), {"steps": "2"})
    raises(
        "option embeddings_c='x': Input should be a valid number",
        EnsembleConfig.take_from,
        {"embeddings_c": "x"},
    )


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ("llm,bert", "unknown expert 'bert': choose from llm, states, embeddings, tfidf"),
        ((), "experts is empty: choose from llm, states, embeddings, tfidf"),
    ],
)
def test_unusable_experts_are_refused(experts, message):
    raises(message, EnsembleConfig(experts=experts).members)
