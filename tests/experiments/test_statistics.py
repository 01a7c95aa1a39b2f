"""Intervals and tests, against simulation, enumeration and scipy."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest, norm, permutation_test, ttest_1samp, ttest_rel

from fitting import raises
from i2cl.errors import I2CLError
from i2cl.experiments.evidence.verdicts import holm
from i2cl.experiments.statistics import ALPHA, Comparison, Difference, accuracy, difference


def simulated(rng, seeds=5, queries=100, *, ease=0.8, hardness=None, seed_sd=0.4):
    """Correctness: ease plus effects of query and seed plus noise, above 0."""
    hardness = rng.standard_normal(queries) if hardness is None else hardness
    luck = seed_sd * rng.standard_normal((seeds, 1))
    return ease + luck + hardness + rng.standard_normal((seeds, queries)) > 0


def expected(ease, seed_sd=0.4):
    return norm.cdf(ease / np.sqrt(2 + seed_sd**2))


def one(*answers):
    """One task, with a string of 1 (correct) and 0 per seed."""
    return [np.array([[answer == "1" for answer in row] for row in answers])]


def test_accuracy_over_tasks_and_of_one_seed():
    result = accuracy(one("1100", "1000", "1111"))
    assert result.mean == pytest.approx(7 / 12)
    assert result.sd == pytest.approx(np.std([0.5, 0.25, 1.0], ddof=1))
    assert (result.seeds, result.queries) == (3, 4)
    assert 0 <= result.low < result.mean < result.high <= 1
    result = accuracy([*one("10", "11"), *one("00000000", "11110000")])
    assert result.mean == pytest.approx((0.75 + 0.25) / 2)
    assert result.sd == pytest.approx(np.std([(0.5 + 0) / 2, (1 + 0.5) / 2], ddof=1))
    assert (result.seeds, result.queries) == (2, 10)
    result = accuracy(one("1100110011"))
    assert result.sd == 0
    assert result.low < 0.6 < result.high
    result = accuracy([np.ones((5, 7), bool), np.ones((5, 11), bool), np.ones((5, 3), bool)])
    assert (result.mean, result.sd, result.low, result.high) == (1, 0, 1, 1)


def gathered(tasks, resamples, rng):
    """Reference bootstrap: draw indices, take the submatrix, average."""
    for _ in range(resamples):
        seeds = rng.integers(len(tasks[0]), size=len(tasks[0]))
        queries = [rng.integers(task.shape[1], size=task.shape[1]) for task in tasks]
        yield np.mean([task[np.ix_(seeds, drawn)].mean() for task, drawn in zip(tasks, queries, strict=True)])


def test_interval_equals_bootstrap_by_indexing():
    rng = np.random.default_rng(0)
    luck = np.linspace(-0.8, 0.8, 6)[:, None]  # equal in both tasks, so shared seeds widen the interval
    tasks = [luck + rng.standard_normal((6, n)) > ease for n, ease in ((20, -0.5), (80, 0.5))]
    low, high = np.quantile(list(gathered(tasks, 8000, rng)), (0.025, 0.975))
    result = accuracy(tasks, resamples=20_000)
    assert result.low == pytest.approx(low, abs=0.01)
    assert result.high == pytest.approx(high, abs=0.01)
    apart = [single.high - single.low for single in (accuracy([task]) for task in tasks)]
    assert high - low > 1.15 * np.hypot(*apart) / 2  # the width with independent seeds per task
    rng = np.random.default_rng(1)
    hardness = rng.standard_normal(60)
    ours, theirs = (simulated(rng, queries=60, ease=ease, hardness=hardness) for ease in (0.9, 0.4))
    paired = ours.astype(float) - theirs
    low, high = np.quantile(list(gathered([paired], 8000, rng)), (0.025, 0.975))
    result = difference([ours], [theirs], resamples=20_000)
    assert result.mean == pytest.approx(paired.mean())
    assert result.low == pytest.approx(low, abs=0.01)
    assert result.high == pytest.approx(high, abs=0.01)


def test_interval_covers_the_true_accuracy():
    """Resampling only queries would cover 73 % here, and only seeds 78 %."""
    rng = np.random.default_rng(2)
    result = [accuracy([simulated(rng)], resamples=400, seed=number) for number in range(200)]
    covered = np.mean([one.low <= expected(0.8) <= one.high for one in result])
    assert 0.89 <= covered <= 0.99


def test_interval_covers_the_true_difference():
    rng = np.random.default_rng(3)
    truth = expected(0.8) - expected(0.5)
    covered, widths, unpaired = [], [], []
    for number in range(200):
        hardness = rng.standard_normal(100)
        ours, theirs = ([simulated(rng, ease=ease, hardness=hardness)] for ease in (0.8, 0.5))
        result = difference(ours, theirs, resamples=400, permutations=1, seed=number)
        covered.append(result.low <= truth <= result.high)
        widths.append(result.high - result.low)
        single = [accuracy(results, resamples=400, seed=number) for results in (ours, theirs)]
        unpaired.append(np.hypot(*(a.high - a.low for a in single)))
    assert 0.89 <= np.mean(covered) <= 0.99
    assert np.mean(widths) < 0.95 * np.mean(unpaired)


@pytest.mark.parametrize(("better", "worse"), [(7, 1), (9, 3), (2, 0), (5, 5), (0, 12)])
def test_one_seed_is_mcnemars_exact_test(better, worse):
    ours = one("1" * better + "0" * worse + "1" * 20 + "0" * 10)
    theirs = one("0" * better + "1" * worse + "1" * 20 + "0" * 10)
    result = difference(ours, theirs)
    assert result.p_queries == pytest.approx(binomtest(better, better + worse).pvalue)
    assert result.mean == pytest.approx((better - worse) / (better + worse + 30))


@pytest.mark.parametrize(("sizes", "draws"), [((9,), 9999), ((4, 7), 9999), ((60, 35), 999), ((400,), 1501)])
def test_p_queries_equals_scipy_permutation_test(sizes, draws):
    rng = np.random.default_rng(len(sizes))
    ours, theirs = ([rng.random((3, n)) < share for n in sizes] for share in (0.7, 0.6))
    each = [(a.astype(float) - b).mean(0) / len(a[0]) for a, b in zip(ours, theirs, strict=True)]
    moved = np.concatenate(each) / len(sizes)
    options = {"permutation_type": "samples", "vectorized": True, "rng": np.random.default_rng(0)}
    summed = lambda values, axis: values.sum(axis).round(12)  # noqa: E731
    expected = permutation_test((moved[moved != 0],), summed, n_resamples=draws, **options)
    assert difference(ours, theirs, permutations=draws).p_queries == expected.pvalue


def test_sampled_permutations_and_cancelling_differences():
    ours, theirs = one("1" * 60 + "0" * 40), one("0" * 60 + "1" * 40)
    exact = binomtest(60, 100).pvalue
    assert difference(ours, theirs, permutations=20_000).p_queries == pytest.approx(exact, abs=0.006)
    assert difference(one("1" * 90), one("0" * 90), permutations=999).p_queries == pytest.approx(2 / 1000)
    results = [np.random.default_rng(0).random((5, 40)) < 0.5]
    assert difference(results, results) == Difference(0.0, 0.0, 0.0, 1.0, 1.0, seeds=len(results[0]))
    assert difference(one("11"), one("10")).p == 1
    # sums of 0.1 do not cancel exactly in floating point, but ties must still count
    assert np.sum([0.1] * 3 + [-0.1] * 3) != 0
    result = difference(one("1110000000"), one("0001110000"))
    assert (result.mean, result.p_queries, result.p_seeds) == (0, 1, 1)


def test_single_seed_is_paired_with_every_seed():
    rng = np.random.default_rng(5)
    ours, fixed = rng.random((5, 50)) < 0.8, rng.random((1, 50)) < 0.6
    result = difference([ours], [fixed])
    assert result == difference([ours], [np.repeat(fixed, 5, axis=0)])
    back = difference([fixed], [ours])
    assert (back.mean, back.p) == (-result.mean, result.p)
    assert (back.low, back.high) == pytest.approx((-result.high, -result.low))
    rng = np.random.default_rng(6)
    ours, theirs = ([rng.random((5, 80)) < share] for share in (0.6, 0.5))
    assert accuracy(ours) == accuracy(ours)
    assert difference(ours, theirs) == difference(ours, theirs, seed=0)
    assert difference(ours, theirs) != difference(ours, theirs, seed=1)
    assert accuracy(ours, resamples=50) != accuracy(ours, resamples=50, seed=1)


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        # in order: 0.005 * 4, 0.01 * 3, 0.03 * 2, and 0.04 * 1, which is below the one before
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        *(([0.4, 0.7, 0.4], [1, 1, 1]), ([0.7, 0.6, 1.0], [1, 1, 1]), ([0.2], [0.2]), ([], [])),
        *(([0.04, 0.01], [0.04, 0.02]), ([0.03, 0.04], [0.06, 0.06])),
    ],
)
def test_holm_correction(given, corrected):
    assert holm(given) == pytest.approx(corrected)


CLEAR = Difference(0.1, 0.05, 0.15, 0.001, 0.002, seeds=4)


def test_significant_needs_tests_interval_and_seeds():
    clear = Comparison(CLEAR, q=0.01)
    assert clear.significant
    assert replace(clear, difference=replace(CLEAR, mean=-0.1, low=-0.15, high=-0.05)).significant
    assert not replace(clear, q=0.05).significant
    assert not replace(clear, difference=replace(CLEAR, low=0.0)).significant
    for seeds in (1, 2, 3):
        assert not Comparison(replace(CLEAR, seeds=seeds), q=0.01).significant
    ours, theirs = [np.ones((1, 60), bool)], [np.arange(60)[None] % 2 == 0]
    result = difference(ours, theirs, drawn=False)
    assert result.p == result.p_queries < ALPHA
    assert Comparison(result, result.p).significant
    assert not Comparison(difference(ours, theirs), result.p).significant


def test_p_seeds_equals_paired_t_test():
    rng = np.random.default_rng(7)
    ours, theirs = ([rng.random((5, n)) < share for n in (30, 70)] for share in (0.8, 0.6))
    macro = [np.mean([task.mean(1) for task in tasks], axis=0) for tasks in (ours, theirs)]
    result = difference(ours, theirs)
    assert result.p_seeds == pytest.approx(ttest_rel(*macro).pvalue)
    assert result.p == max(result.p_queries, result.p_seeds)
    result = difference(one(*["1" * 12] * 4), one(*["0" * 10 + "11"] * 4))
    assert (result.p_seeds, result.p) == (0, result.p_queries)
    assert difference(one("1" * 12), one("0" * 12)).p_seeds == 1


EASE = 0.8
POINTS = norm.pdf(EASE / np.sqrt(2)) / np.sqrt(2)
"""Standard deviation of the effect of a seed."""


def test_family_wise_error_rate_of_equal_methods():
    """Compare 8 equal methods with a ninth on 500 queries, where a seed has an effect of 4.4 points."""
    rng, seeds = np.random.default_rng(4), 4
    families, false = 300, 0
    for _ in range(families):
        hardness = rng.standard_normal(500, np.float32)
        luck = 4.4 / 100 / POINTS * rng.standard_normal((9, seeds, 1))
        reference, *others = EASE + luck + hardness + rng.standard_normal((9, seeds, 500), np.float32) > 0
        accuracies = np.stack(others).mean(2) - reference.mean(1)
        if min(holm(ttest_1samp(accuracies, 0, axis=1).pvalue)) >= ALPHA:
            continue  # larger p-values are not rejected either
        result = [difference([other], [reference], resamples=400, permutations=999) for other in others]
        corrected = holm([one.p for one in result])
        shown = [Comparison(one, q).significant for one, q in zip(result, corrected, strict=True)]
        false += any(shown)
    assert false / families < 0.07


@pytest.mark.parametrize(("luck", "taste", "wrong"), [(0.25, 0, "p_queries"), (0, 1.5, "p_seeds")])
def test_larger_p_controls_errors_where_one_test_does_not(luck, taste, wrong):
    """Two equal methods that differ by an effect of the seed, or of the query."""
    rng = np.random.default_rng(5)
    result = []
    for _ in range(200):
        liked = taste * rng.standard_normal((2, 1, 100))
        made = luck * rng.standard_normal((2, 6, 1)) + liked + rng.standard_normal((2, 6, 100)) > -EASE
        result.append(difference([made[0]], [made[1]], resamples=1, permutations=499))
    assert np.mean([getattr(one, wrong) < ALPHA for one in result]) > 0.15
    assert np.mean([one.p < ALPHA for one in result]) < 0.08


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (one("10"), one("100"), "run both methods on the same"),
        (one("10"), [*one("10"), *one("10")], "run both methods on the same"),
        (one("10", "11"), one("10", "11", "01"), r"\[2, 3\] seeds: run both with the same seeds"),
        ([*one("10"), *one("10", "11")], one("10"), "give every task the same seeds"),
        ([], [], "give one boolean array"),
        ([np.zeros((0, 3), bool)], one("101"), "give a non-empty boolean array"),
        (one("101"), [np.zeros((1, 0), bool)], "give a non-empty boolean array"),
    ],
)
def test_results_that_cannot_be_paired_raise(ours, theirs, says):
    raises(says, difference, ours, theirs)


@pytest.mark.parametrize("tasks", [np.ones((5, 8), bool), [np.ones((5, 8))]])
def test_invalid_arrays_raise(tasks):
    """An array instead of a list, or floats; jaxtyping raises a TypeError if it checks shapes."""
    with pytest.raises((I2CLError, TypeError), match=r"boolean array|type"):
        accuracy(tasks)
