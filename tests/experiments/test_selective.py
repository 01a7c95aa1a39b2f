"""Thresholds that are shown to reach an accuracy: the guarantee simulated, and what is refused."""

import numpy as np
import pytest

from fitting import one_line
from i2cl.experiments.evidence import selective
from i2cl.experiments.evidence.selective import LEVEL, binomial_tail, min_rows, select, selection


@pytest.mark.parametrize(
    ("errors", "n", "chance"), [(0, 22, 0.1), (5, 100, 0.1), (30, 1000, 0.05), (9, 9, 0.3)]
)
def test_the_tail_is_that_of_scipy(errors, n, chance):
    stats = pytest.importorskip("scipy.stats", reason="scipy is the reference")
    assert binomial_tail(errors, n, chance) == pytest.approx(stats.binom.cdf(errors, n, chance), rel=1e-9)


def test_all_rows_right_is_shown_from_the_fewest_rows_on():
    for target in (0.8, 0.9, 0.95):
        n = min_rows(target)
        sure = np.linspace(0.5, 0.9, n)
        result = select(sure, np.ones(n, bool), target)
        assert (result.threshold, result.coverage, result.accuracy) == (0.5, 1.0, 1.0)
        message = f"needs at least {n} held-out rows, but there are {n - 1}"
        one_line(message, select, sure[1:], np.ones(n - 1, bool), target)


def test_a_threshold_means_the_same_when_it_is_typed_again():
    sure = np.random.default_rng(3).uniform(0.7, 1, 60)
    result = select(sure, np.ones(60, bool), 0.9)
    typed = float(f"{result.threshold:.6g}")
    assert typed == result.threshold
    assert (sure >= typed).mean() == result.coverage == 1


@pytest.mark.parametrize("target", [0.2, 1.0, float("nan"), -1.0])
def test_a_target_that_is_none_is_refused(target):
    one_line("target accuracy must be at least 0.5 and below 1", selective.require_target, target, 1000)


def test_the_order_of_rows_changes_nothing():
    random = np.random.default_rng(0)
    sure = random.permutation(np.linspace(0.4, 1, 200))
    right = random.random(200) < sure**0.3
    again = random.permutation(200)
    assert select(sure, right, 0.9) == select(sure[again], right[again], 0.9) is not None


def population(kind, random, n=4000):
    """Confidences and answers: trustworthy ones, too sure ones, or ones of no use."""
    sure = random.beta(8, 1, n)
    chance = {"trustworthy": sure, "too sure": sure**1.5, "useless": np.full(n, 0.89)}[kind]
    return sure, random.random(n) < chance


@pytest.mark.parametrize("kind", ["trustworthy", "too sure", "useless"])
def test_the_guarantee_holds_in_draws_from_a_population(kind):
    random = np.random.default_rng(1)
    sure, right = population(kind, random)
    broken = shown = 0
    for _ in range(400):
        rows = random.integers(0, len(sure), 120)
        result = select(sure[rows], right[rows], 0.9)
        if result is not None:
            shown += 1
            broken += right[sure >= result.threshold].mean() < 0.9
    # Four standard errors of a share of LEVEL over so many draws.
    assert broken / 400 <= LEVEL + 4 * (LEVEL * (1 - LEVEL) / 400) ** 0.5
    assert (shown > 40) is (kind != "useless")


def test_without_a_threshold_it_says_how_many_rows_would_show_one():
    random = np.random.default_rng(2)
    sure = np.linspace(1, 0.4, 100)
    right = np.ones(100, bool)
    right[[5, 15, 25]] = False  # 3 of the 40 surest: 7.5 %, where 10 % are allowed
    value = selection(sure, right, 0.9)
    assert set(value) == {"target", "rows", "needed"}
    needed = value["needed"]
    assert 100 < needed < 10_000
    often = 0
    for _ in range(50):  # that many rows of the same kind do show one, about every other time or more
        rows = random.integers(0, 100, needed)
        often += select(sure[rows] + random.random(needed) * 1e-6, right[rows], 0.9) is not None
    assert often > 15
    right[:40:4] = False
    assert selection(sure, right, 0.9)["needed"] is None
    assert selective.rows_needed(sure, np.zeros(100, bool), 0.9) is None
