"""How sure an accuracy is, and whether two methods differ.

Intervals come from the bootstrap over both axes: seeds and queries are drawn with replacement, each on its
own (the pigeonhole bootstrap: Owen, Annals of Applied Statistics 1(2), 2007). No bootstrap is exact for such
data (McCullagh, Bernoulli 6(2), 2000): this one is too wide where most variation belongs to neither a seed
nor a query alone, and too narrow where few seeds differ much (a variance from 5 comes out a fifth too small).
A result that is the same in every cell gets an interval of width 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import ttest_1samp

from i2cl.errors import I2CLError

# Whether a method answered rightly: one array per task, all with the same seeds.
Result = Sequence[Bool[np.ndarray, "_seeds _queries"]]
Cells = list[Float[np.ndarray, "_seeds _queries"]]  # per task: right or not, or two methods' difference in it

ALPHA = 0.05  # level of every test, and what an interval leaves out
# With fewer, nothing is said of other demonstrations: a spread over two or three seeds is hardly known.
FEWEST_SEEDS = 4
DECIMALS = 12  # what is equal on paper must be equal here: ties count in a test, and so does 0 in an interval


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a method, a share between 0 and 1."""

    mean: float  # over seeds; over tasks, the macro-average
    sd: float  # standard deviation over seeds (n - 1) of the same; 0 for one seed
    # low, high: the 95 % interval over seeds and queries
    low: float
    high: float
    # seeds, queries: how many; queries of all tasks together
    seeds: int
    queries: int


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method minus that of another, as in `Accuracy`, with two-sided p-values."""

    mean: float
    low: float
    high: float
    p_queries: float  # of chance in the queries, for these seeds
    # of chance in the seeds, for these queries; 1 where there is one seed, 0 where none is drawn
    p_seeds: float
    seeds: int
    drawn: bool = True  # whether a seed changes anything in either method

    def reversed(self) -> "Difference":
        """That of the other method minus the one."""
        return replace(self, mean=0.0 - self.mean, low=0.0 - self.high, high=0.0 - self.low)

    @property
    def p(self) -> float:
        """The larger p-value: a method is better only if neither other queries nor seeds could undo it."""
        return max(self.p_queries, self.p_seeds)

    @property
    def decidable(self) -> bool:
        """Whether there are seeds enough for a verdict."""
        return not self.drawn or self.seeds >= FEWEST_SEEDS

    @property
    def beyond(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Comparison:
    """A method minus the reference; ``q``: p after Holm's correction over all tests, 1 where none can be."""

    difference: Difference
    q: float

    @property
    def distinguishable(self) -> bool:
        """Whether tests and interval agree that the two differ, on seeds enough to say so."""
        return self.q < ALPHA and self.difference.beyond and self.difference.decidable


def accuracy(tasks: Result, *, resamples: int = 2000, seed: int = 0) -> Accuracy:
    """Mean accuracy with its spread over seeds and its interval over seeds and queries.
    ``sd`` is what papers print: how much the demonstrations matter on these queries. The interval also counts
    that other queries could have been asked. Raises I2CLError if there are no results, or the seeds differ in
    number.
    """
    cells = _checked(tasks)
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
    """Paired difference of two methods: how large it is, and whether it could be chance.
    The interval is for the size of the difference had other demonstrations *and* other queries been drawn: it
    resamples seeds and queries. There are two p-values. ``p_queries`` holds the seeds fixed: were the methods
    equal, each query's difference, averaged over seeds, would as likely have the other sign; with one seed on
    one task this is McNemar's exact test, up to sampling: a sampled p-value is at least 2 / (``permutations``
    + 1). ``p_seeds`` holds the queries fixed: a paired t-test over the seeds' macro-averages, which are means
    of many queries and so near to normal. Either alone errs where the other's source of chance is the larger
    one; a claim needs both and the interval (`Comparison.distinguishable`). A method that draws nothing may
    have one seed, on either side; it is paired with every seed of the other. If neither is ``drawn``, chance
    in the seeds means nothing. All sign flips are enumerated where there are no more than ``permutations``.
    Raises I2CLError if there are no results, or they cannot be paired.
    """
    cells = _paired(ours, theirs)
    low, high = _interval(cells, resamples, seed)
    p_queries, p_seeds = _p_queries(cells, permutations, seed), _p_seeds(cells) if drawn else 0.0
    return Difference(_macro(cells), low, high, p_queries, p_seeds, len(cells[0]), drawn)


def _checked(tasks: Result) -> Cells:
    if len(tasks) == 0:
        raise I2CLError("no results: give one boolean array [seeds, queries] per task")
    for task in tasks:
        if task.ndim != 2 or task.dtype != bool or not task.size:
            what = f"an array of {task.dtype} {list(task.shape)}"
            raise I2CLError(f"found {what}: give a list of non-empty boolean arrays [seeds, queries]")
    if len({len(task) for task in tasks}) > 1:
        raise I2CLError(f"tasks have {[len(task) for task in tasks]} seeds: give every task the same seeds")
    return [task.astype(float) for task in tasks]


def _paired(ours: Result, theirs: Result) -> Cells:
    pair = _checked(ours), _checked(theirs)
    queries, others = ([task.shape[1] for task in cells] for cells in pair)
    if queries != others:
        raise I2CLError(f"tasks have {queries} and {others} queries: run both methods on the same ones")
    seeds = {len(cells[0]) for cells in pair}
    if len(seeds - {1}) > 1:
        raise I2CLError(f"methods have {sorted(seeds)} seeds: run both with the same, or one with one")
    return [a - b for a, b in zip(*pair, strict=True)]


def _macro(cells: Cells) -> float:
    return round(float(np.mean([task.mean() for task in cells])), DECIMALS)


def _interval(cells: Cells, resamples: int, seed: int) -> tuple[float, float]:
    """From macro-averages over seeds drawn once for all tasks and queries drawn in each task."""
    rows, columns = _draws(resamples, len(cells[0]), tuple(task.shape[1] for task in cells), seed)
    total = np.zeros(resamples)
    for task, drawn in zip(cells, columns, strict=True):
        # A cell is drawn as often as its row times its column. All are whole numbers, exact in float32.
        by_row = drawn @ task.T.astype(np.float32)
        total += np.einsum("rs,rs->r", by_row, rows).astype(float) / task.size
    low, high = np.quantile((total / len(cells)).round(DECIMALS), (ALPHA / 2, 1 - ALPHA / 2))
    return round(float(low), DECIMALS), round(float(high), DECIMALS)


@lru_cache(maxsize=4)  # results of one report have few shapes, and drawing takes longer than all the rest
def _draws(
    resamples: int, seeds: int, queries: tuple[int, ...], seed: int
) -> tuple[Float[np.ndarray, "resamples seeds"], list[Float[np.ndarray, "resamples _queries"]]]:
    """How often each seed is drawn, and each query of each task."""
    rng = np.random.default_rng(seed)
    rows = _counts(rng, resamples, seeds).astype(np.float32)
    return rows, [_counts(rng, resamples, n).astype(np.float32) for n in queries]


def _counts(rng: np.random.Generator, resamples: int, n: int) -> Int[np.ndarray, "resamples n"]:
    """How often each of n things is drawn in n draws with replacement."""
    drawn = rng.integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n)


def _p_seeds(cells: Cells) -> float:
    """Paired t-test over seeds; what is the same for every seed is told from 0, and from 0 alone."""
    each = np.mean([task.mean(1) for task in cells], axis=0).round(DECIMALS)
    if len(each) < 2 or not each.any():
        return 1.0
    return float(ttest_1samp(each, 0).pvalue) if np.ptp(each) else 0.0


def _p_queries(cells: Cells, permutations: int, seed: int) -> float:
    """Sign-flip test on the differences of queries, weighted so that tasks count equally.
    Equal to scipy's ``permutation_test`` of one sample to the last digit, and many times as fast: that one
    loops over the queries in Python.
    """
    weighted = np.concatenate([task.mean(0) / task.shape[1] for task in cells]) / len(cells)
    moved = weighted[weighted != 0]  # a zero has no sign to flip; without them more tests are exact
    if len(moved) < 2:
        return 1.0  # neither no difference nor a single one is evidence
    exact = 2 ** len(moved) <= permutations
    kept = _choices(len(moved), None if exact else permutations, seed)
    sums = np.concatenate([2 * (part @ moved) - moved.sum() for part in kept]).round(DECIMALS)
    observed = moved.sum().round(DECIMALS)
    fewest = min(np.count_nonzero(sums <= observed), np.count_nonzero(sums >= observed))
    itself = 0 if exact else 1  # a sampled test counts what was observed as one of its samples
    return min(1.0, 2 * (fewest + itself) / (len(sums) + itself))


def _choices(n: int, count: int | None, seed: int) -> Iterator[Float[np.ndarray, "_choices n"]]:
    """Ways to keep (1) or flip (0) the signs of n numbers: all, or so many, drawn as scipy draws them."""
    if count is None:
        yield (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(float)
        return
    rng = np.random.default_rng(seed)
    most = max(1, 2**17 // n)
    for start in range(0, count, most):
        bits = rng.integers(2**32, size=(min(most, count - start), n), dtype=np.uint32)
        yield (bits & 1).astype(float)
