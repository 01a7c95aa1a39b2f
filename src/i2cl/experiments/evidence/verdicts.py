"""What may be said of a fit beside what costs nothing, from the rows that one of two methods alone has right.

Nothing here needs scipy, so that `i2cl fit` runs without the extra ``experiments``. Unlike the intervals of
`i2cl.experiments.statistics`, which resample seeds as well, those here are for one fit on few rows, and have
a width also where every answer is right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, comb, floor, log10, sqrt
from statistics import NormalDist

LEVEL = 0.05  # of the tests, and what intervals leave out
POWER = 0.8  # with which the rows that a verdict asks for would show a gain
WORTHWHILE = 0.05  # gain below which a fit is not worth its trouble: five points
GAINS = (WORTHWHILE, 0.1)  # that a verdict tells the rows for
Z = NormalDist().inv_cdf(1 - LEVEL / 2)


@dataclass(frozen=True)
class Verdict:
    """What a comparison shows."""

    verdict: str  # whether to use the fit, in words
    against: str  # the best of the rivals on these rows, of those shown better than the fit if there are any
    difference: float  # accuracy minus that rival's, a share
    # low, high: its 95 % interval (`paired_interval`)
    low: float
    high: float
    p: float  # of the test against that rival (`mcnemar`), after Holm's correction over all rivals


def verdict(rivals: Mapping[str, tuple[int, int]], n: int) -> Verdict:
    """Whether a fit pays, from counts alone.
    It pays where it is shown better than every rival. It is not to be used where a rival is shown better, or
    where the interval against the best of them excludes a gain of `WORTHWHILE`. Anything else is not shown.
    Each rival has how many of the n rows the fit alone has right, and how many the rival alone.
    """
    ps = dict(zip(rivals, holm([mcnemar(*counts) for counts in rivals.values()]), strict=True))
    shown_better = [name for name, (up, down) in rivals.items() if ps[name] < LEVEL and down > up]
    against = min(shown_better or rivals, key=lambda name: rivals[name][0] - rivals[name][1])
    better, worse = rivals[against]
    difference, (low, high) = (better - worse) / n, paired_interval(better, worse, n)
    rows = f"{n} row{'s' * (n != 1)}"
    points = f"{100 * abs(difference):.1f} points"
    span, back = (f"({100 * one:.1f} to {100 * other:.1f})" for one, other in ((low, high), (-high, -low)))
    if low > 0 and all(ps[name] < LEVEL and up > down for name, (up, down) in rivals.items()):
        words = f"better than {against} by {points} {span} on {rows}"
    elif shown_better:
        words = f"{against} is better by {points} {back} on {rows}: do not use it"
    elif high < WORTHWHILE:
        most = f"{100 * WORTHWHILE:.0f} points"
        words = f"a gain of {most} over {against} is ruled out on {rows} {span}: do not use it"
    else:
        discordant = max((sum(counts) + 2) / (n + 2) for counts in rivals.values())
        five, ten = (f"{rows_for(gain, discordant):,}" for gain in GAINS)
        words = (
            f"not shown on {rows}; about {five} rows would show a gain of {100 * GAINS[0]:.0f} points, "
            f"{ten} one of {100 * GAINS[1]:.0f} (power {POWER:g})"
        )
    return Verdict(words, against, difference, low, high, ps[against])


def rows_for(gain: float, discordant: float) -> int:
    """How many rows would show a gain, to two digits, rounded up.
    Source: Connor, Biometrics 43(1), 1987, at the level of the first step of Holm's correction over two. The
    gain is a share, and so are the ``discordant`` rows, which one of the two methods alone has right.
    """
    apart = max(discordant, gain)
    level, power = NormalDist().inv_cdf(1 - LEVEL / 4), NormalDist().inv_cdf(POWER)
    exact = ((level * sqrt(apart) + power * sqrt(apart - gain**2)) / gain) ** 2
    unit = int(10 ** max(0, floor(log10(exact)) - 1))
    return ceil(exact / unit) * unit


def holm(ps: Sequence[float]) -> list[float]:
    """Corrected p-values, in the same order: Holm, Scandinavian Journal of Statistics 6(2), 1979."""
    qs, least = [0.0] * len(ps), 0.0
    for place, at in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        least = max(least, min(1.0, (len(ps) - place) * ps[at]))
        qs[at] = least
    return qs


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share: Wilson, Journal of the American Statistical Association 22(158), 1927."""
    share, spread = right / n, Z * Z / n
    half = sqrt(spread * share * (1 - share) + spread * spread / 4)
    middle = share + spread / 2
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mcnemar(better: int, worse: int) -> float:
    """Two-sided p-value of a difference, exact, from the rows that one of two methods alone has right.
    Were the methods equal, each of these rows would be either one's as likely: a sign test (McNemar,
    Psychometrika 12(2), 1947).
    """
    n = better + worse
    tail = sum(comb(n, k) for k in range(min(better, worse) + 1))
    return float(min(1, 2 * tail / 2**n))


def paired_interval(better: int, worse: int, n: int) -> tuple[float, float]:
    """The 95 % interval of the difference of two shares of the same n rows.
    Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37(4), 2012: Wald's, with one
    row more for each method that it alone has right.
    """
    up, down = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = Z * sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)
