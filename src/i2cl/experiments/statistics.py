"""Confidence intervals of accuracies, and significance tests between methods, over seeds and queries.

Intervals use the pigeonhole bootstrap, which resamples seeds and queries independently (Owen, Annals of
Applied Statistics 1(2), 2007). No bootstrap is exact for such data (McCullagh, Bernoulli 6(2), 2000). This
one is too wide if most of the variance is interaction of seed and query, and too narrow if few seeds differ
much: with 5 seeds, their variance is underestimated by a fifth. Results without any variation get an interval
of width 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import ttest_1samp

from i2cl.errors import I2CLError

# Whether a method predicted correctly: one array per task, all with the same seeds.
Result = Sequence[Bool[np.ndarray, "_seeds _queries"]]
# Per task: correct (1) or not (0), or the difference of that between two methods.
Cells = list[Float[np.ndarray, "_seeds _queries"]]

ALPHA = 0.05  # significance level of the tests; intervals cover 1 - ALPHA
MIN_SEEDS = 4  # with fewer seeds, their variance is too uncertain for a statement about other demonstrations
DECIMALS = 12  # rounding makes mathematically equal numbers equal: tests count ties, intervals may end at 0


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a method, from 0 to 1.

    Attributes:
        mean: mean over seeds, of the macro-average over tasks.
        sd: sample standard deviation of the macro-average over seeds; 0 for one seed.
        low: lower bound of the 95 % interval over seeds and queries.
        high: upper bound of that interval.
        seeds: number of seeds.
        queries: number of queries of all tasks.
    """

    mean: float
    sd: float
    low: float
    high: float
    seeds: int
    queries: int


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method minus that of another, with two-sided p-values.

    Attributes:
        mean: mean difference, see `Accuracy`.
        low: lower bound of its 95 % interval.
        high: upper bound of that interval.
        p_queries: p-value of the test over queries, for fixed seeds.
        p_seeds: p-value of the test over seeds, for fixed queries; 1 for one seed, 0 if not ``drawn``.
        seeds: number of seeds.
        drawn: whether the seed changes the result of either method.
    """

    mean: float
    low: float
    high: float
    p_queries: float
    p_seeds: float
    seeds: int
    drawn: bool = True

    def reversed(self) -> "Difference":
        """Return the difference with the two methods swapped."""
        return replace(self, mean=0.0 - self.mean, low=0.0 - self.high, high=0.0 - self.low)

    @property
    def p(self) -> float:
        """The larger p-value: a significant difference must hold for other queries and for other seeds."""
        return max(self.p_queries, self.p_seeds)

    @property
    def decidable(self) -> bool:
        """Whether there are enough seeds for a verdict."""
        return not self.drawn or self.seeds >= MIN_SEEDS

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """A method minus the reference; ``q`` is p with Holm's correction, or 1 without enough seeds."""

    difference: Difference
    q: float

    @property
    def significant(self) -> bool:
        """Whether both the tests and the interval show a difference, with enough seeds."""
        return self.q < ALPHA and self.difference.excludes_zero and self.difference.decidable


def accuracy(tasks: Result, *, resamples: int = 2000, seed: int = 0) -> Accuracy:
    """Estimate the mean accuracy, its standard deviation over seeds, and its interval.

    The standard deviation, which papers print, shows the influence of the demonstrations on these queries.
    The interval also includes the uncertainty due to the choice of queries.

    Args:
        tasks: one array per task.
        resamples: bootstrap samples.
        seed: seed of the bootstrap.

    Raises:
        I2CLError: if there are no results, or tasks differ in their number of seeds.
    """
    cells = _to_cells(tasks)
    per_seed = np.mean([task.mean(1) for task in cells], axis=0)
    sd = round(float(per_seed.std(ddof=1)), DECIMALS) if len(per_seed) > 1 else 0.0
    queries = sum(task.shape[1] for task in cells)
    return Accuracy(_macro(cells), sd, *_interval(cells, resamples, seed), len(per_seed), queries)


def difference(
    ours: Result,
    theirs: Result,
    *,
    drawn: bool = True,
    resamples: int = 2000,
    permutations: int = 9999,
    seed: int = 0,
) -> Difference:
    """Estimate the paired difference of two methods, its interval, and its significance.

    The interval resamples seeds and queries. The two p-values each hold one of them fixed:

    - ``p_queries`` is a sign-flip test: if the methods were equal, the difference on each query, averaged
      over seeds, would have either sign with equal probability. With one seed on one task, this is McNemar's
      exact test.
    - ``p_seeds`` is a paired t-test on the macro-averages of the seeds, which are nearly normal because they
      are means over many queries.

    Each test ignores the other source of variance, so a claim needs both of them and the interval
    (`Comparison.significant`).

    Args:
        ours: one array per task. A deterministic method may have a single seed, which is paired with every
            seed of the other method.
        theirs: results of the other method on the same queries.
        drawn: whether the seed changes the result of either method.
        resamples: bootstrap samples of the interval.
        permutations: maximum number of sign flips. If there are no more, all of them are enumerated;
            otherwise they are sampled, and the p-value is at least 2 / (permutations + 1).
        seed: seed of the resampling.

    Raises:
        I2CLError: if there are no results, or they cannot be paired.
    """
    cells = _paired_differences(ours, theirs)
    low, high = _interval(cells, resamples, seed)
    p_queries, p_seeds = _p_queries(cells, permutations, seed), _p_seeds(cells) if drawn else 0.0
    return Difference(_macro(cells), low, high, p_queries, p_seeds, len(cells[0]), drawn)


def _to_cells(tasks: Result) -> Cells:
    if len(tasks) == 0:
        raise I2CLError("no results: give one boolean array [seeds, queries] per task")
    for task in tasks:
        if task.ndim != 2 or task.dtype != bool or not task.size:
            raise I2CLError(
                f"a task has an array of {task.dtype} {list(task.shape)}: give a non-empty boolean array "
                "[seeds, queries]"
            )
    if len({len(task) for task in tasks}) > 1:
        raise I2CLError(f"tasks have {[len(task) for task in tasks]} seeds: give every task the same seeds")
    return [task.astype(float) for task in tasks]


def _paired_differences(ours: Result, theirs: Result) -> Cells:
    pair = _to_cells(ours), _to_cells(theirs)
    our_queries, their_queries = ([task.shape[1] for task in cells] for cells in pair)
    if our_queries != their_queries:
        raise I2CLError(
            f"tasks have {our_queries} and {their_queries} queries: run both methods on the same ones"
        )
    seeds = {len(cells[0]) for cells in pair}
    if len(seeds - {1}) > 1:
        raise I2CLError(f"methods have {sorted(seeds)} seeds: run both with the same seeds, or one with one")
    return [a - b for a, b in zip(*pair, strict=True)]


def _macro(cells: Cells) -> float:
    return round(float(np.mean([task.mean() for task in cells])), DECIMALS)


def _interval(cells: Cells, resamples: int, seed: int) -> tuple[float, float]:
    """Return the bootstrap interval: seeds are resampled once for all tasks, queries within each task."""
    seed_counts, query_counts = _resample(
        resamples, len(cells[0]), tuple(task.shape[1] for task in cells), seed
    )
    total = np.zeros(resamples)
    for task, counts in zip(cells, query_counts, strict=True):
        # the weight of a cell is the product of its counts; these are integers, exact in float32
        by_seed = counts @ task.T.astype(np.float32)
        total += np.einsum("rs,rs->r", by_seed, seed_counts).astype(float) / task.size
    low, high = np.quantile((total / len(cells)).round(DECIMALS), (ALPHA / 2, 1 - ALPHA / 2))
    return round(float(low), DECIMALS), round(float(high), DECIMALS)


@lru_cache(maxsize=4)  # the results of a report have few shapes, and drawing dominates the time
def _resample(
    resamples: int, seeds: int, queries: tuple[int, ...], seed: int
) -> tuple[Float[np.ndarray, "resamples seeds"], list[Float[np.ndarray, "resamples _queries"]]]:
    """Return how often each resample contains each seed, and each query of each task."""
    rng = np.random.default_rng(seed)
    seed_counts = _counts(rng, resamples, seeds).astype(np.float32)
    return seed_counts, [_counts(rng, resamples, n).astype(np.float32) for n in queries]


def _counts(rng: np.random.Generator, resamples: int, n: int) -> Int[np.ndarray, "resamples n"]:
    """Return how often each of n items is drawn in n draws with replacement."""
    draws = rng.integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    return np.bincount(draws.ravel(), minlength=resamples * n).reshape(resamples, n)


def _p_seeds(cells: Cells) -> float:
    """Return the p-value of the paired t-test over seeds; 0 if all seeds have the same nonzero difference."""
    by_seed = np.mean([task.mean(1) for task in cells], axis=0).round(DECIMALS)
    if len(by_seed) < 2 or not by_seed.any():
        return 1.0
    return float(ttest_1samp(by_seed, 0).pvalue) if np.ptp(by_seed) else 0.0


def _p_queries(cells: Cells, permutations: int, seed: int) -> float:
    """Return the p-value of the sign-flip test over queries, weighted so that tasks count equally.

    Gives the same digits as ``scipy.stats.permutation_test`` with one sample, and is many times faster,
    because that function loops over the queries in Python.
    """
    weighted = np.concatenate([task.mean(0) / task.shape[1] for task in cells]) / len(cells)
    nonzero = weighted[weighted != 0]  # zeros have no sign; without them more tests can be enumerated
    if len(nonzero) < 2:
        return 1.0  # a single query is no evidence
    exact = 2 ** len(nonzero) <= permutations
    flips = _sign_flips(len(nonzero), None if exact else permutations, seed)
    sums = np.concatenate([2 * (part @ nonzero) - nonzero.sum() for part in flips]).round(DECIMALS)
    observed = nonzero.sum().round(DECIMALS)
    extreme = min(np.count_nonzero(sums <= observed), np.count_nonzero(sums >= observed))
    extra = 0 if exact else 1  # a sampled test counts the observation as one of its samples
    return min(1.0, 2 * (extreme + extra) / (len(sums) + extra))


def _sign_flips(n: int, count: int | None, seed: int) -> Iterator[Float[np.ndarray, "_choices n"]]:
    """Yield blocks of ways to keep (1) or flip (0) n signs: all, or ``count``, sampled like scipy does."""
    if count is None:
        yield (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(float)
        return
    rng = np.random.default_rng(seed)
    block = max(1, 2**17 // n)
    for start in range(0, count, block):
        bits = rng.integers(2**32, size=(min(block, count - start), n), dtype=np.uint32)
        yield (bits & 1).astype(float)
