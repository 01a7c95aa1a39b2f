"""Log-loss, Brier score, ECE, risk-coverage curve, and the best temperature."""

import numpy as np
import pytest
from scipy import optimize
from sklearn import calibration, metrics

from i2cl.experiments.confidence import BINS, confidence, highest, reliability, risk_coverage
from i2cl.injections import temperature
from i2cl.injections.temperature import TYPICAL_TEMPERATURE, best_temperature, likely_temperature, log_softmax


def drawn(seed=0, queries=400, labels=4, sharper=1.0):
    """Draw labels from the probabilities of scores, and return the scores times ``sharper``."""
    rng = np.random.default_rng(seed)
    scores = log_softmax(2 * rng.standard_normal((queries, labels)))
    return scores * sharper, np.array([rng.choice(labels, p=np.exp(row)) for row in scores])


def measured(scores, gold):
    return confidence(scores, gold, scores.argmax(1))


def test_metrics_of_four_queries():
    """Three correct at .9, .8 and .6, and an error at .7; each query has its own bin."""
    scores = np.log([[0.9, 0.1], [0.3, 0.7], [0.8, 0.2], [0.4, 0.6]])
    result = measured(scores, np.array([0, 0, 0, 1]))
    assert result.log_loss == pytest.approx(-np.log([0.9, 0.3, 0.8, 0.6]).mean())
    assert result.brier == pytest.approx(2 * np.mean([0.1**2, 0.7**2, 0.2**2, 0.4**2]))
    assert result.ece == pytest.approx(np.mean([0.1, 0.7, 0.2, 0.4]))
    assert result.aurc == pytest.approx(np.mean([0, 0, 1 / 3, 1 / 4]))


@pytest.mark.parametrize("labels", [2, 5])
def test_log_loss_and_brier_score_equal_scikit_learn(labels):
    scores, gold = drawn(labels=labels, sharper=1.7)
    probabilities, known = np.exp(log_softmax(scores)), range(labels)
    result = measured(scores, gold)
    assert result.log_loss == pytest.approx(metrics.log_loss(gold, probabilities, labels=known))
    hits = np.eye(labels)[gold]
    each = [metrics.brier_score_loss(hits[:, label], probabilities[:, label]) for label in known]
    assert result.brier == pytest.approx(sum(each))


def test_calibration_error_equals_scikit_learn_quantile_bins():
    scores, gold = drawn(queries=20 * BINS, sharper=2)
    sure, right = highest(scores), scores.argmax(1) == gold
    hits, means = calibration.calibration_curve(right, sure, n_bins=BINS, strategy="quantile")
    ours = reliability(sure, right)
    np.testing.assert_allclose(ours[0], means)
    np.testing.assert_allclose(ours[1], hits)
    assert measured(scores, gold).ece == pytest.approx(np.abs(hits - means).mean())


def test_metrics_do_not_depend_on_the_order_of_ties():
    """With equal confidence .75 and 3 of 4 correct, the calibration error is 0 in any order."""
    scores, gold = drawn(queries=BINS + 1)
    sure, hits = reliability(highest(scores), scores.argmax(1) == gold)
    sizes = np.array([2, *[1] * (BINS - 1)])
    assert measured(scores, gold).ece == pytest.approx((sizes * np.abs(sure - hits)).sum() / sizes.sum())
    scores = np.log(np.tile([0.75, 0.25], (60, 1)))
    for order in (np.arange(60), np.random.default_rng(1).permutation(60)):
        result = measured(scores, (order % 4 == 0).astype(int))
        assert result.ece == pytest.approx(0, abs=1e-12)
        assert result.aurc == pytest.approx(0.25)


def test_risk_coverage_uses_the_given_predictions():
    scores = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    coverage, risk = risk_coverage(highest(scores), np.array([True, True, False, False]))
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert risk == pytest.approx([0, 0, 1 / 3, 1 / 2])
    scores, one, none = np.log([[0.5, 0.5]]), np.array([1]), np.array([0])
    assert (confidence(scores, one, one).aurc, confidence(scores, one, none).aurc) == (0, 1)


@pytest.mark.parametrize("sharper", [0.4, 1, 2.2, 7])
def test_best_temperature_recovers_the_scale_of_the_scores(sharper):
    scores, gold = drawn(queries=20_000, sharper=sharper)
    assert best_temperature(scores, gold) == pytest.approx(sharper, rel=0.05)


def searched(loss):
    """Minimize a loss over the log temperature; return the temperature and the loss."""
    result = optimize.minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-9})
    return np.exp(result.x), result.fun


def test_best_temperature_equals_scipy_minimize():
    scores, gold = drawn(queries=200, sharper=3)

    def loss(log_temperature):
        return measured(log_softmax(scores, np.exp(log_temperature)), gold).log_loss

    expected, least = searched(loss)
    result = best_temperature(scores, gold)
    assert result == pytest.approx(expected, rel=1e-4)
    assert measured(log_softmax(scores, result), gold).log_loss <= least + 1e-12


def test_temperature_is_finite_for_any_scores():
    scores, _ = drawn(queries=30)
    assert best_temperature(scores, scores.argmax(1)) == pytest.approx(temperature.MIN_TEMPERATURE)
    assert best_temperature(scores, scores.argmin(1)) == pytest.approx(temperature.MAX_TEMPERATURE)
    assert best_temperature(np.zeros((3, 2)), np.array([0, 1, 1])) == 1
    scores = np.array([[0.0, -65504.0], [-65504.0, 0.0]])
    result = measured(scores, np.array([1, 1]))
    assert result.log_loss == pytest.approx(65504 / 2)
    assert np.isfinite(best_temperature(scores, np.array([1, 1])))
    scores = np.array([[0.0, -1.0, -np.inf], [-2.0, 0.0, -np.inf], [0.0, -1.0, -np.inf]])
    result = likely_temperature(scores, np.array([0, 1, 2]))
    assert TYPICAL_TEMPERATURE < result <= temperature.MAX_TEMPERATURE


def test_temperature_with_prior_minimizes_loss_plus_prior():
    scores, gold = drawn(queries=20_000, sharper=6.0)
    few = likely_temperature(scores[:5], gold[:5])
    assert likely_temperature(scores[:0], gold[:0]) == TYPICAL_TEMPERATURE
    assert likely_temperature(np.zeros((3, 2)), np.array([0, 1, 1])) == TYPICAL_TEMPERATURE
    assert likely_temperature(scores, gold) == pytest.approx(6, rel=0.05)
    assert abs(np.log(few / TYPICAL_TEMPERATURE)) < abs(
        np.log(best_temperature(scores[:5], gold[:5]) / TYPICAL_TEMPERATURE)
    )
    assert likely_temperature(scores[:5], gold[:5], 2.4, 1e-6) == pytest.approx(2.4, rel=1e-3)
    scores, gold = drawn(queries=30, sharper=4)

    def objective(log_temperature):
        own = measured(log_softmax(scores, np.exp(log_temperature)), gold).log_loss * len(gold)
        return own + (log_temperature - np.log(TYPICAL_TEMPERATURE)) ** 2 / (
            2 * temperature.TEMPERATURE_SPREAD**2
        )

    assert likely_temperature(scores, gold) == pytest.approx(searched(objective)[0], rel=1e-4)
