"""Verdict on a fit: significance tests against baselines on the same held-out rows.

`i2cl.experiments.statistics` resamples seeds as well; the intervals here are for one fit on few rows and have
a width even where every answer is right.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10, sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple

LEVEL = 0.05  # significance level of the tests; intervals cover 1 - LEVEL
POWER = 0.8  # power of the sample sizes that a verdict suggests
WORTHWHILE = 0.05  # a smaller gain over a baseline without a fit does not justify a fit
SMALLEST = 0.01  # no sample size is suggested for a smaller difference
Z = NormalDist().inv_cdf(1 - LEVEL / 2)

Outcome = Literal["better", "worse", "no_gain", "inconclusive", "unknown"]
Counts = tuple[int, int]  # rows that only the fit answers correctly, and rows that only the rival does


class Comparison(NamedTuple):
    """A fit compared with a rival on the same rows, by accuracy or by the micro-F1 of a multi-label task."""

    difference: float  # metric of the fit minus that of the rival, as a share
    low: float  # lower bound of its 95 % interval
    high: float  # upper bound of that interval
    p: float  # two-sided p-value
    spread: float  # mean square of the difference on a single row

    @classmethod
    def of_counts(cls, counts: Counts, n: int) -> "Comparison":
        """Compare two accuracies (`mcnemar`, `paired_interval`). The spread is the share of discordant rows,
        with one more for each method.
        """
        better, worse = counts
        interval = paired_interval(better, worse, n)
        return cls((better - worse) / n, *interval, mcnemar(better, worse), (better + worse + 2) / (n + 2))


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a fit with its rivals.

    Attributes:
        outcome: ``"better"`` than every free baseline, ``"worse"`` than some rival, ``"no_gain"``: a gain of
            `WORTHWHILE` over a free baseline is ruled out, ``"inconclusive"``, or ``"unknown"`` where the
            rows cannot support a verdict.
        verdict: the same in words.
        advice: what to do or measure next; empty if no rival calls for it.
        against: the strongest rival: a significantly better one if there is one, else the most accurate.
        difference: accuracy of the fit minus that rival's, as a share.
        low: lower bound of its 95 % interval (`paired_interval`).
        high: upper bound of that interval.
        p: p-value against that rival (`mcnemar`), with Holm's correction over all rivals.
    """

    outcome: Outcome
    verdict: str
    advice: str
    against: str
    difference: float
    low: float
    high: float
    p: float


def verdict(
    rivals: Mapping[str, Counts | Comparison],
    n: int,
    free: Collection[str],
    *,
    missing: Sequence[str] = (),
    cheaper: Collection[str] = (),
    parts: Collection[str] = (),
    advise: Callable[[str], str] = "use {} instead".format,
) -> Verdict:
    """Compare a fit with its rivals on the same rows.

    Args:
        rivals: for each rival, the rows that only the fit and only the rival answers correctly, or a
            comparison by another metric.
        n: number of rows.
        free: names of the rivals that need no fit: the fit has to beat each of them.
        missing: labels without a row among the n, which make every comparison meaningless.
        cheaper: names of rivals, besides the free ones, that the advice prefers if they are as accurate.
        parts: names of rivals that are members of the fit. One that is not cheaper gets advice only if it is
            `WORTHWHILE` ahead.
        advise: returns what to do, given the name of a rival that is more accurate.
    """
    compared = {
        name: rival if isinstance(rival, Comparison) else Comparison.of_counts(rival, n)
        for name, rival in rivals.items()
    }
    ps = dict(zip(compared, holm([comparison.p for comparison in compared.values()]), strict=True))
    worse_than = [
        name for name, comparison in compared.items() if ps[name] < LEVEL and comparison.difference < 0
    ]
    against = _strongest(compared, worse_than or compared)
    difference, low, high, *_ = compared[against]
    rows = f"{n} row{'s' * (n != 1)}"
    outcome: Outcome
    if missing:
        shown = ", ".join(map(repr, missing[:3])) + (f" and {len(missing) - 3} more" * (len(missing) > 3))
        outcome, words, advice = "unknown", f"none, because none of the {rows} is labelled {shown}", ""
    elif worse_than:
        outcome, advice = "worse", advise(against)
        words = f"{against} is significantly better by {_points(-difference)} {_interval(-high, -low)}"
        words += f" on {rows}"
    else:
        outcome, words = _not_worse(compared, n, free)
        if difference < 0 and against not in free:
            ahead = f"{against} is {_points(-difference)} ahead {_interval(-high, -low, ', not significant')}"
            worthwhile = -difference >= WORTHWHILE
            words = f"{ahead}. The fit is {words}" if worthwhile else f"{words}. {ahead}"
        members = [name for name in parts if name not in cheaper]
        advice = _advice_unless_worse(compared, outcome, free, [*free, *cheaper], members, advise)
    return Verdict(outcome, words, advice, against, difference, low, high, ps[against])


def _advice_unless_worse(
    rivals: Mapping[str, Comparison],
    outcome: Outcome,
    free: Collection[str],
    cheap: Collection[str],
    members: Collection[str],
    advise: Callable[[str], str],
) -> str:
    """Return the advice against the strongest rival that the fit is not significantly better than.

    A cheap rival is recommended as soon as it is as accurate as the fit, any other rival if it is
    `WORTHWHILE` ahead. In either case, say how many rows would show a difference.
    """
    level_with = [
        name
        for name, comparison in rivals.items()
        if (comparison.difference <= 0 or comparison.p >= LEVEL)
        and (name not in members or comparison.difference <= -WORTHWHILE)
    ]
    if not level_with:
        return ""
    nearest = _strongest(rivals, level_with)
    rows, lead = _rows_to_show(nearest, rivals[nearest]), -rivals[nearest].difference
    if lead >= (0 if nearest in cheap else WORTHWHILE) or (outcome == "no_gain" and nearest in free):
        return "; ".join(filter(None, [advise(nearest), rows]))
    return rows


def _rows_to_show(rival: str, compared: Comparison) -> str:
    """Say how many rows would show a difference that is not significant; empty if it is ruled out."""
    size = abs(compared.difference)
    if size < SMALLEST and compared.low > -WORTHWHILE and compared.high < WORTHWHILE:
        return ""
    gain = size if size >= SMALLEST else WORTHWHILE
    rows = f"{rows_for(gain, compared.spread):,}"
    return f"about {rows} held-out rows would show a difference of {_points(gain)} from {rival}"


def _not_worse(rivals: Mapping[str, Comparison], n: int, free: Collection[str]) -> tuple[Outcome, str]:
    """Outcome and words against the free baselines, none of which is significantly better.

    The fit is better than every baseline only if every comparison is significant, so these tests need no
    correction for multiplicity (Berger, Technometrics 24(4), 1982).
    """
    baselines = {name: comparison for name, comparison in rivals.items() if name in free}
    level_with = [
        name for name, comparison in baselines.items() if comparison.difference <= 0 or comparison.p >= LEVEL
    ]
    best = _strongest(baselines, level_with or baselines)
    difference, low, high, *_ = baselines[best]
    rows = f"{n} row{'s' * (n != 1)}"
    if low > 0 and not level_with:
        return (
            "better",
            f"significantly better than {best} by {_points(difference)} {_interval(low, high)} on {rows}",
        )
    if high < WORTHWHILE:
        gain = f"a gain of {100 * WORTHWHILE:.0f} points over {best} is ruled out on {rows}"
        return "no_gain", f"worth little: {gain} {_interval(low, high)}"
    ahead = _points(difference, sign=True)
    return "inconclusive", f"not significantly different from {best} ({ahead}) on {rows}"


def _strongest(rivals: Mapping[str, Comparison], names: Collection[str]) -> str:
    return min(names, key=lambda name: rivals[name].difference)


def _points(difference: float, *, sign: bool = False) -> str:
    return f"{100 * difference:{'+' if sign else ''}.1f} points"


def _interval(low: float, high: float, more: str = "") -> str:
    return f"(95 % interval {100 * low:.1f} to {100 * high:.1f}{more})"


def rows_for(gain: float, spread: float) -> int:
    """Number of rows that detect a gain with power `POWER`, rounded up to two digits.

    Source: Connor, Biometrics 43(1), 1987.

    Args:
        gain: difference of the two accuracies, as a share.
        spread: see `Comparison`; for accuracies, the share of rows that exactly one of the two methods
            answers correctly.
    """
    apart = max(spread, gain)
    exact = ((Z * sqrt(apart) + NormalDist().inv_cdf(POWER) * sqrt(apart - gain**2)) / gain) ** 2
    unit = int(10 ** max(0, floor(log10(exact)) - 1))
    return ceil(exact / unit) * unit


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values with Holm's correction, in the same order.

    Source: Holm, Scandinavian Journal of Statistics 6(2), 1979.
    """
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        corrected[index] = largest
    return corrected


def wilson(right: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion.

    Source: Wilson, Journal of the American Statistical Association 22(158), 1927.
    """
    from scipy.stats import binomtest

    low, high = binomtest(right, n).proportion_ci(1 - LEVEL, method="wilson")
    return float(low), float(high)


def mcnemar(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of a difference between two methods on the same rows.

    ``better`` and ``worse`` are the rows that only the first and only the second method answers correctly.
    Source: McNemar, Psychometrika 12(2), 1947, as a sign test.
    """
    from scipy.stats import binomtest

    n = better + worse
    return float(binomtest(better, n).pvalue) if n else 1.0


def paired_interval(better: int, worse: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two accuracies on the same n rows.

    Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37(4), 2012: Wald's interval
    with one more discordant row for each method.
    """
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = Z * sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)
