"""Confidence thresholds for a target accuracy: simulated guarantee and bad input."""

import numpy as np
import pytest

from fitting import raises
from i2cl.experiments.evidence import selective
from i2cl.experiments.evidence.selective import LEVEL, min_rows, select, selection


def test_min_rows_without_errors_pass_the_test():
    for target in (0.8, 0.9, 0.95):
        n = min_rows(target)
        sure = np.linspace(0.5, 0.9, n)
        result = select(sure, np.ones(n, bool), target)
        assert (result.threshold, result.coverage, result.accuracy) == (0.5, 1.0, 1.0)
        message = f"needs at least {n} held-out rows, but there are {n - 1}"
        raises(message, select, sure[1:], np.ones(n - 1, bool), target)


def test_printed_threshold_selects_the_same_rows():
    sure = np.random.default_rng(3).uniform(0.7, 1, 60)
    result = select(sure, np.ones(60, bool), 0.9)
    typed = float(f"{result.threshold:.6g}")
    assert typed == result.threshold
    assert (sure >= typed).mean() == result.coverage == 1


@pytest.mark.parametrize("target", [0.2, 1.0, float("nan"), -1.0])
def test_target_out_of_range_is_rejected(target):
    raises("target accuracy must be at least 0.5 and below 1", selective.require_target, target, 1000)


def test_selection_does_not_depend_on_row_order():
    random = np.random.default_rng(0)
    sure = random.permutation(np.linspace(0.4, 1, 200))
    right = random.random(200) < sure**0.3
    again = random.permutation(200)
    assert select(sure, right, 0.9) == select(sure[again], right[again], 0.9) is not None


def population(kind, random, n=4000):
    """Confidences and correctness: calibrated, overconfident, or uninformative."""
    sure = random.beta(8, 1, n)
    chance = {"calibrated": sure, "overconfident": sure**1.5, "uninformative": np.full(n, 0.89)}[kind]
    return sure, random.random(n) < chance


@pytest.mark.parametrize("kind", ["calibrated", "overconfident", "uninformative"])
def test_threshold_misses_the_target_at_most_at_the_level(kind):
    random = np.random.default_rng(1)
    sure, right = population(kind, random)
    broken = shown = 0
    for _ in range(400):
        rows = random.integers(0, len(sure), 120)
        result = select(sure[rows], right[rows], 0.9)
        if result is not None:
            shown += 1
            broken += right[sure >= result.threshold].mean() < 0.9
    # LEVEL plus four standard errors over these draws
    assert broken / 400 <= LEVEL + 4 * (LEVEL * (1 - LEVEL) / 400) ** 0.5
    assert (shown > 40) is (kind != "uninformative")


def test_rows_needed_without_a_threshold():
    random = np.random.default_rng(2)
    sure = np.linspace(1, 0.4, 100)
    right = np.ones(100, bool)
    right[[5, 15, 25]] = False  # 3 errors among the 40 most confident: 7.5 %, and 10 % are allowed
    value = selection(sure, right, 0.9)
    assert set(value) == {"target", "rows", "needed"}
    needed = value["needed"]
    assert 100 < needed < 10_000
    often = 0
    for _ in range(50):  # at least about half of such samples give a threshold
        rows = random.integers(0, 100, needed)
        often += select(sure[rows] + random.random(needed) * 1e-6, right[rows], 0.9) is not None
    assert often > 15
    right[:40:4] = False
    assert selection(sure, right, 0.9)["needed"] is None
    assert selective.rows_needed(sure, np.zeros(100, bool), 0.9) is None
