"""Verdicts on a fit: the rule, its simulated error rates, and its statistics."""

from functools import cache

import numpy as np
import pytest

from i2cl.experiments.evidence import verdicts
from i2cl.experiments.evidence.verdicts import LEVEL, mcnemar, paired_interval, rows_for, verdict

FREE = ("zero_shot", "batch")
RULED_OUT = "worth little: a gain of 5 points over batch is ruled out on 160 rows (95 % interval -3.3 to 2.1)"
ZERO_SHOT_BETTER = "zero_shot is significantly better by 15.0 points (95 % interval 7.7 to 21.9) on 160 rows"
BATCH_BETTER = "batch is significantly better by 5.6 points (95 % interval 0.9 to 10.2) on 160 rows"


@pytest.mark.parametrize(
    ("zero_shot", "batch", "n", "outcome", "words"),
    [
        (
            *((30, 5), (30, 10), 160, "better"),
            "significantly better than batch by 12.5 points (95 % interval 4.7 to 20.0) on 160 rows",
        ),
        ((6, 30), (9, 8), 160, "worse", ZERO_SHOT_BETTER),
        ((9, 0), (2, 11), 160, "worse", BATCH_BETTER),
        ((9, 0), (1, 2), 160, "no_gain", RULED_OUT),
        (
            *((30, 1), (12, 6), 160, "inconclusive"),
            "not significantly different from batch (+3.8 points) on 160 rows",
        ),
    ],
)
def test_verdict_against_free_baselines(zero_shot, batch, n, outcome, words):
    result = verdict({"zero_shot": zero_shot, "batch": batch}, n, FREE)
    assert (result.outcome, result.verdict) == (outcome, words)


def test_verdict_on_few_rows_is_inconclusive():
    result = verdict({"zero_shot": (3, 3)}, 20, FREE)
    assert result.outcome == "inconclusive"
    assert (result.difference, result.p) == (0, 1)
    assert result.low == -result.high < -0.2


def test_a_fit_has_to_beat_every_free_baseline():
    strong, weak = (40, 0), (12, 3)
    assert mcnemar(*weak) < LEVEL  # significant alone, and with Holm's correction beside a stronger effect
    assert verdict({"zero_shot": strong, "batch": weak}, 160, FREE).outcome == "better"
    assert verdict({"zero_shot": (11, 3), "batch": (11, 2)}, 160, FREE).outcome == "inconclusive"
    assert verdict({"batch": (11, 2)}, 160, FREE).outcome == "better"
    assert verdict({"zero_shot": strong, "batch": (9, 6)}, 160, FREE).outcome == "inconclusive"


def test_better_rival_is_named_with_advice_even_if_not_significant():
    rivals = {"zero_shot": (8, 1), "batch": (6, 1), "embeddings": (0, 3)}
    result = verdict(rivals, 15, FREE, advise="combine it with {}".format)
    assert result.against == "embeddings"
    assert result.difference == pytest.approx(-0.2)
    assert result.verdict.startswith(
        "embeddings is 20.0 points ahead (95 % interval -6.7 to 42.0, not significant). "
        "The fit is not significantly different from batch"
    )
    assert result.advice == (
        "combine it with embeddings; about 56 held-out rows would show a difference of 20.0 points "
        "from embeddings"
    )


def test_a_small_lead_that_is_not_significant_is_not_followed():
    result = verdict({"zero_shot": (60, 1), "batch": (60, 1), "few_shot": (0, 2)}, 160, FREE)
    assert result.outcome == "better"
    assert result.verdict.endswith(
        "on 160 rows. few_shot is 1.2 points ahead (95 % interval -1.2 to 3.6, not significant)"
    )
    assert result.advice == "about 1,300 held-out rows would show a difference of 1.2 points from few_shot"


def test_a_cheaper_rival_that_is_as_accurate_is_preferred():
    rivals = {"zero_shot": (60, 1), "batch": (60, 1), "embeddings": (9, 9), "few_shot": (40, 1)}
    result = verdict(rivals, 160, FREE, cheaper=("embeddings",))
    number = rows_for(0.05, 20 / 162)
    rows = f"about {number} held-out rows would show a difference of 5.0 points from embeddings"
    assert (result.outcome, result.advice) == ("better", f"use embeddings instead; {rows}")
    assert verdict(rivals, 160, FREE).advice == rows


def test_an_own_member_is_advised_only_if_it_is_cheaper_or_well_ahead():
    rivals = {"zero_shot": (60, 1), "batch": (60, 1), "llm": (5, 9), "tfidf": (9, 9)}
    parts = {"parts": ("llm", "tfidf"), "cheaper": ("tfidf",)}
    assert verdict(rivals, 160, FREE, **parts).advice.startswith("use tfidf instead; ")
    assert verdict(rivals | {"tfidf": (40, 1)}, 160, FREE, **parts).advice == ""
    assert verdict(rivals | {"llm": (2, 12)}, 160, FREE, **parts).advice.startswith("use llm instead")


def test_no_rows_are_suggested_where_a_difference_is_ruled_out():
    rivals = {"zero_shot": (60, 1), "batch": (60, 1), "embeddings": (2, 2)}
    assert verdict(rivals, 160, FREE, cheaper=("embeddings",)).advice == "use embeddings instead"
    assert verdict(rivals, 160, FREE).advice == ""


def test_advice_names_the_rows_that_would_show_a_lead():
    result = verdict({"zero_shot": (30, 1), "batch": (12, 6)}, 160, FREE)
    rows = rows_for(6 / 160, (18 + 2) / 162)
    assert result.advice == f"about {rows} held-out rows would show a difference of 3.8 points from batch"


def test_no_advice_for_a_fit_that_is_significantly_better_than_all():
    result = verdict({"zero_shot": (60, 1), "batch": (60, 1), "few_shot": (30, 2)}, 160, FREE)
    assert (result.outcome, result.advice) == ("better", "")


def test_a_lead_over_baselines_that_is_ruled_out_advises_to_use_the_best():
    result = verdict({"zero_shot": (9, 0), "batch": (1, 2)}, 160, FREE)
    assert (result.outcome, result.advice) == ("no_gain", "use batch instead")


def test_a_significantly_better_rival_decides_the_verdict():
    rivals = {"zero_shot": (60, 1), "batch": (60, 1), "embeddings": (2, 30)}
    result = verdict(rivals, 160, FREE)
    assert (result.outcome, result.against) == ("worse", "embeddings")
    assert result.verdict.startswith("embeddings is significantly better by 17.5 points")
    assert result.advice == "use embeddings instead"


@pytest.fixture(scope="module")
def _cached_statistics():
    """Compute the statistics of each pair of counts once for all simulations."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mcnemar", "paired_interval", "rows_for"):
            patch.setattr(verdicts, name, cache(getattr(verdicts, name)))
        yield


def simulate(n, accuracies, shared, draws=2000):
    """Simulate verdicts; ``shared`` is the probability that a row is equally hard for all methods.

    Returns:
        The shares of fits that are called better, and worse or without gain.
    """
    numbers = np.random.default_rng(0).random((draws, 7, n))
    difficulty = np.where(numbers[:, :3] < shared, numbers[:, 3:4], numbers[:, 4:])
    correct = difficulty < np.array(accuracies)[:, None]
    fit, rivals = correct[:, :1], correct[:, 1:]
    counts = np.stack([(fit & ~rivals).sum(-1), (rivals & ~fit).sum(-1)], -1)
    distinct, repeats = np.unique(counts, axis=0, return_counts=True)
    rivals_of = (dict(zip(FREE, map(tuple, pair), strict=True)) for pair in distinct.tolist())
    outcomes = np.array([verdict(pair, n, FREE).outcome for pair in rivals_of])
    return [repeats[np.isin(outcomes, names)].sum() / draws for names in (["better"], ["worse", "no_gain"])]


@pytest.mark.usefixtures("_cached_statistics")
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mine", [0.6, 0.8, 0.95])
def test_fit_with_ten_points_gain_is_rarely_advised_against(mine, shared):
    assert simulate(40, (mine, mine - 0.1, mine - 0.1), shared)[1] <= 0.03


@pytest.mark.usefixtures("_cached_statistics")
@pytest.mark.parametrize("n", [20, 40, 160])
@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("other", [0.7, 0.4])
def test_fit_without_gain_is_rarely_called_better(n, shared, other):
    """Both rivals are as good as the fit, or only one of them is."""
    assert simulate(n, (0.7, 0.7, other), shared)[0] <= LEVEL


@pytest.mark.usefixtures("_cached_statistics")
@pytest.mark.parametrize("shared", [0.0, 0.7, 0.95])
@pytest.mark.parametrize("gain", [0.05, 0.1])
def test_suggested_number_of_rows_detects_the_gain(gain, shared):
    mine, other = 0.8, 0.8 - gain
    discordant = (1 - shared**2) * (mine * (1 - other) + other * (1 - mine)) + shared**2 * gain
    n = rows_for(gain, discordant)
    shown, _ = simulate(n, (mine, other, other - 0.1), shared, 500)
    assert shown == pytest.approx(verdicts.POWER, abs=0.1)


def test_methods_that_answer_alike_do_not_differ():
    assert mcnemar(0, 0) == 1
    low, high = paired_interval(0, 0, 10)
    assert low == -high < 0


@pytest.mark.parametrize("n", [16, 160])
@pytest.mark.parametrize("chances", [(0.3, 0.1), (0.6, 0.01), (0.02, 0.02)])
def test_paired_interval_covers_the_true_difference(n, chances):
    up, down = chances
    drawn = np.random.default_rng(0).multinomial(n, [up, down, 1 - up - down], size=2000)
    result = [paired_interval(int(better), int(worse), n) for better, worse, _ in drawn]
    assert np.mean([low <= up - down <= high for low, high in result]) >= 0.93
