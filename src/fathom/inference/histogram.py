"""Histograms of durations, and counters, in the text format of Prometheus with HELP and TYPE lines."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0)
"""Upper bounds of a histogram's buckets, in seconds."""


class Histogram:
    """A histogram of durations: how often they fell between fixed bounds. One thread observes; others may read."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """By bucket; the last is for durations beyond all bounds."""
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, about: str) -> Iterable[str]:
        """The lines of the histogram in Prometheus' text format."""
        yield from head(name, "histogram", about)
        below = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), list(self.counts), strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self.sum:.6f}"
        yield f"{name}_count {below}"


def head(name: str, kind: str, about: str) -> list[str]:
    """The HELP and TYPE lines before a metric's values."""
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]


def value(name: str, kind: str, about: str, number: float) -> list[str]:
    """The lines of a counter or a gauge in Prometheus' text format."""
    return [*head(name, kind, about), f"{name} {number}"]
