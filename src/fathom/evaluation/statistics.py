"""Paired differences: how large, how sure, and whether any is left once all of them have been looked at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its Student t interval; with one pair there is no interval."""

    mean: float
    pairs: int
    half_width: float | None
    """Half of the 95 % interval."""
    p: float | None
    """Two-sided, of the hypothesis that the true mean is zero."""

    @property
    def low(self) -> float | None:
        """Lower end of the interval."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end of the interval."""
        return None if self.half_width is None else self.mean + self.half_width

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def paired_difference(values: Sequence[float], control: Sequence[float]) -> Difference:
    """Each value minus its partner, summed up."""
    gaps = [value - partner for value, partner in zip(values, control, strict=True)]
    mean = statistics.fmean(gaps)
    if len(gaps) < 2:
        return Difference(mean, len(gaps), None, None)
    from scipy import stats

    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    freedom = len(gaps) - 1
    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    if error == 0:
        return Difference(mean, len(gaps), 0.0, 1.0 if mean == 0 else 0.0)
    return Difference(mean, len(gaps), half_width, float(2 * stats.t.sf(abs(mean) / error, freedom)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment: below 0.05 means significant with a 5 % chance of any false alarm in the whole family."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
