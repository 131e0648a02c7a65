"""Paired differences: means, intervals and p values, with Holm's adjustment.

Which tests form one family is decided by `experiments/differences.py` for a comparison, `experiments/multipliers.py`
for a ladder, and `evaluation/paired.py` for scores of documents. The first two also decide when a report is
exploratory.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np

from fathom.report.numbers import signed

CONFIDENCE = 0.95


@dataclass
class Difference:
    """The mean of paired differences with its Student t interval.

    One pair has no interval. Equal differences have none either, because values on a grid are too coarse to show their
    noise.
    """

    mean: float
    pairs: int
    half_width: float | None
    """Half of the 95 % interval."""
    p: float | None
    """Two-sided p-value of the hypothesis that the true mean is zero."""
    p_holm: float | None = None
    """p, adjusted for all the differences that were tested with it."""
    low: float | None = field(init=False)
    """Lower end of the interval."""
    high: float | None = field(init=False)
    """Upper end of the interval."""
    excludes_zero: bool = field(init=False)
    """Whether the whole interval lies on one side of zero."""

    def __post_init__(self) -> None:
        half = self.half_width
        self.low, self.high = (None, None) if half is None else (self.mean - half, self.mean + half)
        self.excludes_zero = half is not None and abs(self.mean) > half

    @property
    def significant(self) -> bool:
        """Whether the difference is significant after Holm's adjustment."""
        return self.excludes_zero and self.p_holm is not None and self.p_holm < 1 - CONFIDENCE

    def __str__(self) -> str:
        """The mean and its interval, if it has one."""
        return signed(self.mean, self.half_width)


def paired_difference(values: Sequence[float], control: Sequence[float]) -> Difference:
    """The mean of paired differences with its Student t interval; no interval if a value is not finite."""
    gaps = [value - partner for value, partner in zip(values, control, strict=True)]
    rounding = 4 * sys.float_info.epsilon * max(map(abs, [*values, *control]))
    return weighted_difference(gaps, [1.0] * len(gaps), rounding)


def weighted_difference(gaps: Sequence[float], weights: Sequence[float], rounding: float = 0.0) -> Difference:
    """The ratio Σd/Σw of differences d with weights w, and the Student t interval of the residuals d - w Σd/Σw; no
    interval if a difference is not finite. A standard error of no more than `rounding` counts as none."""
    d, w = np.asarray(gaps, float), np.asarray(weights, float)
    count, total = len(d), float(w.sum())
    mean = float(d.sum()) / total
    if count < 2 or not math.isfinite(mean):
        return Difference(mean, count, None, None)
    residuals = d - mean * w
    error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total
    return student(mean, error if error > rounding else 0.0, count - 1, count)


def combined_difference(found: Sequence[Difference], shares: Sequence[float]) -> Difference:
    """The weighted sum Σ share · mean of independent differences, with Satterthwaite's degrees of freedom for its
    interval."""
    mean = sum(share * d.mean for share, d in zip(shares, found, strict=True))
    count = sum(d.pairs for d in found)
    if any(d.half_width is None for d in found):
        return Difference(mean, count, None, None)
    errors = [(d.half_width or 0.0) / quantile(d.pairs - 1) for d in found]
    variances = [(share * error) ** 2 for share, error in zip(shares, errors, strict=True)]
    total = sum(variances)
    spread = sum(v**2 / (d.pairs - 1) for v, d in zip(variances, found, strict=True))
    return student(mean, math.sqrt(total), total**2 / spread if spread else 1, count)


def student(mean: float, error: float, freedom: float, pairs: int) -> Difference:
    """A mean with its Student t interval; no interval if the standard error is 0, unless the mean is 0 too.

    Args:
        mean: Of the differences.
        error: Its standard error.
        freedom: Degrees of freedom of the error.
        pairs: How many differences there are.
    """
    if error == 0:
        return Difference(mean, pairs, 0.0, 1.0) if mean == 0 else Difference(mean, pairs, None, None)
    from scipy.special import stdtr

    half_width = error * quantile(freedom)
    return Difference(mean, pairs, half_width, float(2 * stdtr(freedom, -abs(mean) / error)))


def student_below(statistic: np.ndarray, freedom: float) -> np.ndarray:
    """The probability that a Student t variable is at most `statistic`."""
    from scipy.special import stdtr

    return stdtr(freedom, statistic)


def quantile(freedom: float) -> float:
    """The 0.975 quantile of Student's t: half the width of a 95 % interval, in standard errors."""
    from scipy.special import stdtrit  # what scipy.stats.t calls, without its overhead

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Ratio:
    """A ratio of two means, and its interval."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Ratio | None:
    """The ratio of the mean of `values` to the mean of `others`, with Fieller's interval; None if the interval is
    unbounded.

    The interval holds every r for which the mean of value - r other is within Student's t of zero. It is bounded if the
    mean of `others` is significantly different from zero.
    """
    count = len(values)
    if count < 2:
        return None
    x, y = statistics.fmean(values), statistics.fmean(others)
    t2 = quantile(count - 1) ** 2 / count
    square = y * y - t2 * statistics.variance(others)
    if square <= 0:
        return None
    middle = x * y - t2 * statistics.covariance(values, others)
    root = math.sqrt(max(0.0, middle * middle - square * (x * x - t2 * statistics.variance(values))))
    return Ratio(x / y, (middle - root) / square, (middle + root) / square)


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, valid for few questions too.

    Args:
        right: Questions answered rightly.
        asked: All questions.
    """
    from scipy import stats

    low, high = stats.binomtest(right, asked).proportion_ci(CONFIDENCE, method="wilson")
    return float(low), float(high)


def mcnemar(lost: int, won: int) -> float:
    """Exact two-sided p value of McNemar's test.

    Args:
        lost: Questions that only the control answers correctly.
        won: Questions that only the other answers correctly.
    """
    from scipy import stats

    return float(stats.binomtest(min(lost, won), lost + won).pvalue) if lost + won else 1.0


LEAST_DOCUMENTS = 20
"""Fewest pairs for which an interval over documents is shown. In simulations with normal (exponential) differences,
95 % bootstrap intervals hold the mean in 93 % (90 %) of cases for 20 pairs, 91 % (86 %) for ten and 49 % (49 %) for
two; for one pair, never."""
LEAST_EFFECTIVE, MOST_SKEW = 15, 0.2
"""Fewest documents, as `effective_count` counts them, and largest `skewness` up to which Student's t errs in 3 to 7 %
of simulations without a difference. Beyond them it errs in up to 23 %. Normal differences of 20 documents of one
length are beyond them in 7 %."""


def effective_count(weights: Sequence[float]) -> float:
    """Kish's effective sample size (Σw)²/Σw²: how many equal weights would give a sum with the same relative
    variance."""
    w = np.asarray(weights, float)
    return float(w.sum() ** 2 / (w @ w)) if w.any() else 0.0


def skewness(gaps: Sequence[float], weights: Sequence[float]) -> float:
    """The skewness of the ratio Σd/Σw, computed from its terms' residuals r = d - w Σd/Σw: |Σr³| / (Σr²)^1.5."""
    d, w = np.asarray(gaps, float), np.asarray(weights, float)
    r = d - w * (d.sum() / w.sum())
    square = float(r @ r)
    return abs(float((r**3).sum())) / square**1.5 if square > 0 else 0.0


def bootstrap_ratio(gaps: Sequence[float], weights: Sequence[float], draws: int = 1000) -> Ratio:
    """The ratio Σd/Σw of paired differences d with weights w, and its bootstrap interval over pairs, drawn with a fixed
    seed.

    Args:
        gaps: One difference for each document.
        weights: What each document weighs.
        draws: Bootstrap samples.
    """
    d, w = np.asarray(gaps, float), np.asarray(weights, float)
    chance = np.random.default_rng(0)
    picks = (chance.integers(len(d), size=len(d)) for _ in range(draws))  # one at a time, for memory
    drawn = [float(d[picked].sum() / w[picked].sum()) for picked in picks]
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(d.sum() / w.sum()), float(low), float(high))


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation, with its bootstrap interval from resampling clusters."""

    value: float
    low: float
    high: float
    """Ends of the 95 % interval."""
    clusters: int


def rank_correlation(a: Sequence[np.ndarray], b: Sequence[np.ndarray], draws: int = 1000) -> Correlation | None:
    """Spearman's rank correlation of two quantities; None if one of them is constant.

    Values of one cluster (a row of text) depend on one another, so whole clusters are resampled. Ranks are those of
    the whole sample, in every draw.

    Args:
        a: One array for each cluster.
        b: The other quantity, in arrays of the same lengths.
        draws: Bootstrap samples.
    """
    sizes = [len(part) for part in a]
    if not sum(sizes):
        return None
    x, y = (_centred_ranks(np.concatenate(parts)) for parts in (a, b))
    if not x.any() or not y.any():
        return None
    products = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y])
    cluster = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.stack([np.bincount(cluster, row, len(sizes)) for row in products], 1)  # [clusters, 6]
    chance = np.random.default_rng(0)
    times = (np.bincount(chance.integers(len(sizes), size=len(sizes)), minlength=len(sizes)) for _ in range(draws))
    found = np.array([_pearson(weights @ sums) for weights in times])
    low, high = np.nanquantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Correlation(_pearson(sums.sum(0)), float(low), float(high), len(sizes))


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks minus the mean rank; equal values get the same rank."""
    from scipy import stats

    ranks: np.ndarray = stats.rankdata(values) - (len(values) + 1) / 2
    return ranks


def _pearson(sums: np.ndarray) -> float:
    n, x, y, xx, yy, xy = sums.tolist()
    spread = (xx - x * x / n) * (yy - y * y / n)
    return (xy - x * y / n) / math.sqrt(spread) if spread > 0 else math.nan


def holm(p_values: Sequence[float], means: int | None = None) -> list[float]:
    """Holm-adjusted p values: if those below 0.05 count as significant, any false alarm in the whole family has a
    probability of at most 5 %.

    Args:
        p_values: One for each test.
        means: The number of means, if the tests are of all differences between them. Then not every set of pairs can
            be equal (of three means, two pairs cannot be equal and the third not), and Shaffer's smaller counts of
            true hypotheses are used.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    possible = None if means is None else _equal_pairs(means)
    for rank, i in enumerate(order):
        left = len(p_values) - rank
        if possible is not None:
            left = min(left, max(count for count in possible if count <= max(possible) - rank))
        running = max(running, min(1.0, left * p_values[i]))
        adjusted[i] = running
    return adjusted


class Tested(Protocol):
    """A difference whose p value may be adjusted together with those of others."""

    p: float | None
    p_holm: float | None


def adjust(differences: Sequence[Tested], means: int | None = None) -> None:
    """Set `p_holm` of all differences that have a p value, treated as one family; `means` has the same meaning as in
    `holm`."""
    tested = [one for one in differences if one.p is not None]
    for one, p in zip(tested, holm([one.p or 0.0 for one in tested], means), strict=True):
        one.p_holm = p


@cache
def _equal_pairs(means: int) -> frozenset[int]:
    """The possible numbers of equal pairs among `means` means: each group of equal means contributes all of its
    pairs."""
    if means < 2:
        return frozenset({0})
    sizes = range(1, means + 1)
    return frozenset(size * (size - 1) // 2 + rest for size in sizes for rest in _equal_pairs(means - size))
