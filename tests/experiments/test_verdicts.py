"""What may be said of a fit beside what costs nothing: the rule, how often it errs, and its statistics."""

from functools import cache

import numpy as np
import pytest
from scipy.stats import binomtest

from i2cl.experiments.evidence import verdicts
from i2cl.experiments.evidence.verdicts import LEVEL, mcnemar, paired_interval, rows_for, verdict, wilson

NOT_SHOWN = "not shown on {} rows; about {} rows would show a gain of 5 points, {} one of 10 (power 0.8)"
RULED_OUT = "a gain of 5 points over batch is ruled out on 160 rows (-3.3 to 2.1): do not use it"


@pytest.mark.parametrize(
    ("zero_shot", "batch", "n", "said"),
    [
        ((30, 5), (30, 10), 160, "better than batch by 12.5 points (4.7 to 20.0) on 160 rows"),
        ((6, 30), (9, 8), 160, "zero_shot is better by 15.0 points (7.7 to 21.9) on 160 rows: do not use it"),
        ((9, 0), (2, 11), 160, "batch is better by 5.6 points (0.9 to 10.2) on 160 rows: do not use it"),
        ((9, 0), (1, 2), 160, RULED_OUT),
        ((30, 1), (12, 6), 160, NOT_SHOWN.format(160, 780, 200)),
        ((4, 0), (4, 0), 4, NOT_SHOWN.format(4, "3,800", 950)),
    ],
)
def test_the_verdict_is_what_both_free_rows_and_the_interval_allow(zero_shot, batch, n, said):
    assert verdict({"zero_shot": zero_shot, "batch": batch}, n).verdict == said


def test_few_rows_are_no_reason_to_drop_a_fit_and_one_rival_alone_none_to_keep_it():
    result = verdict({"zero_shot": (3, 3)}, 20)
    assert result.verdict.startswith("not shown on 20 rows; about ")
    assert (result.difference, result.p) == (0, 1)
    assert result.low == -result.high < -0.2
    strong, none = (40, 0), (12, 3)
    assert mcnemar(*none) < LEVEL  # shown alone, and with Holm's correction where the other one is shown too
    assert verdict({"zero_shot": strong, "batch": none}, 160).verdict.startswith("better than batch")
    assert verdict({"zero_shot": (11, 3), "batch": (11, 2)}, 160).verdict.startswith("not shown")
    assert verdict({"batch": (11, 2)}, 160).verdict.startswith("better than batch")
    assert verdict({"zero_shot": strong, "batch": (9, 6)}, 160).verdict.startswith("not shown")


def message(monkeypatch, n, accuracies, alike, draws=2000):
    """Shares of the verdicts, where rows are alike hard for all methods with this probability."""
    for name in ("mcnemar", "paired_interval", "rows_for"):
        monkeypatch.setattr(verdicts, name, cache(getattr(verdicts, name)))
    rng, words = np.random.default_rng(0), []
    for _ in range(draws):
        hard = np.where(rng.random((3, n)) < alike, rng.random(n), rng.random((3, n)))
        mine, *rivals = hard < np.array(accuracies)[:, None]
        counts = [(int((mine & ~one).sum()), int((one & ~mine).sum())) for one in rivals]
        words.append(verdict(dict(zip(["zero_shot", "batch"], counts, strict=True)), n).verdict)
    return np.char.startswith(words, "better than").mean(), np.char.endswith(words, "do not use it").mean()


@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mine", [0.6, 0.8, 0.95])
def test_a_fit_that_gains_ten_points_is_rarely_advised_against_on_forty_rows(monkeypatch, mine, alike):
    assert message(monkeypatch, 40, (mine, mine - 0.1, mine - 0.1), alike)[1] <= 0.03


@pytest.mark.parametrize("n", [20, 40, 160])
@pytest.mark.parametrize("alike", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("other", [0.7, 0.4])
def test_a_fit_that_gains_nothing_is_rarely_told_to_pay(monkeypatch, n, alike, other):
    """Whether both rivals are as good as it or one of them."""
    assert message(monkeypatch, n, (0.7, 0.7, other), alike)[0] <= LEVEL


@pytest.mark.parametrize("alike", [0.0, 0.7, 0.95])
@pytest.mark.parametrize("gain", [0.05, 0.1])
def test_the_rows_that_are_asked_for_show_the_gain(monkeypatch, gain, alike):
    mine, other = 0.8, 0.8 - gain
    discordant = (1 - alike**2) * (mine * (1 - other) + other * (1 - mine)) + alike**2 * gain
    n = rows_for(gain, discordant)
    shown, _ = message(monkeypatch, n, (mine, other, other - 0.1), alike, 500)
    assert shown == pytest.approx(verdicts.POWER, abs=0.1)


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 3), (80, 160), (159, 160)])
def test_intervals_of_a_share_are_those_of_scipy(right, n):
    expected = binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right, n) == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize(("better", "worse"), [(1, 0), (6, 0), (0, 6), (10, 3), (40, 41), (300, 200)])
def test_the_paired_test_is_scipys_sign_test(better, worse):
    assert mcnemar(better, worse) == pytest.approx(binomtest(better, better + worse).pvalue)
    assert mcnemar(0, 0) == 1  # no row that differs is no evidence
    low, high = paired_interval(0, 0, 10)
    assert low == -high < 0


@pytest.mark.parametrize("n", [16, 160])
@pytest.mark.parametrize("chances", [(0.3, 0.1), (0.6, 0.01), (0.02, 0.02)])
def test_the_paired_interval_covers_the_true_difference(n, chances):
    up, down = chances
    drawn = np.random.default_rng(0).multinomial(n, [up, down, 1 - up - down], size=2000)
    result = [paired_interval(int(better), int(worse), n) for better, worse, _ in drawn]
    assert np.mean([low <= up - down <= high for low, high in result]) >= 0.93
