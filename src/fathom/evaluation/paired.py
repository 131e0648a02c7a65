"""Differences between checkpoints, paired over documents or the items of a task.

A score is a ratio Σa/Σw over documents: of right answers to answers, of nats to tokens, of bits to bytes. The
difference of two such scores on the same documents is Σd/Σw with d = a - a'. Its interval is Student's t with n - 1
degrees of freedom for n documents; the standard error comes from the residuals d - w Σd/Σw. With equal
weights this is the ordinary paired t interval. Documents count as independent draws; tokens of one document do not,
and neither do items of one cluster, which are summed first. Below 20 documents or clusters there is no interval and no
p-value. If a few of them decide the difference, because they are long or differ much more than the rest, it is marked.

`rows` adjusts all differences as one family. `report/statistics.py` has the intervals and Holm's adjustment.
`results.py` formats a difference, with × for a ratio and an asterisk if it is significant, and `scores_page.py` warns
of few documents (`skewed`). `deepened.py` counts differences below 0.005 bits per byte as none. `fathom evaluate tuned`
judges by other tests (`tuned.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fathom.evaluation.results import ScoreGap, ScoreRow
from fathom.report.statistics import (
    CONFIDENCE,
    LEAST_DOCUMENTS,
    LEAST_EFFECTIVE,
    MOST_SKEW,
    Difference,
    adjust,
    combined_difference,
    effective_count,
    skewness,
    weighted_difference,
)


@dataclass(frozen=True)
class Items:
    """Each document's contribution to a score."""

    values: Sequence[float]
    weights: Sequence[float] | None = None
    """Weights; 1 each if not given."""
    clusters: Sequence[object] | None = None
    """The cluster of each item: those of one cluster are no independent draws. An item of None, or of the empty text
    that a table has for it, is one by itself."""
    log: bool = False
    """The score is exp(Σa/Σw), a perplexity: its differences are shown as ratios."""

    @property
    def score(self) -> float:
        """Σa/Σw, or exp of it."""
        mean = sum(self.values) / (len(self.values) if self.weights is None else sum(self.weights))
        return math.exp(min(mean, 700)) if self.log else mean

    def pairs_with(self, other: Items) -> bool:
        """Whether both scores have equally many documents with the same weights, so that they can be paired."""
        return len(self.values) == len(other.values) and _weights(self).tolist() == _weights(other).tolist()


AGGREGATIONS = ("mean", "perplexity", "weighted_perplexity", "bits_per_byte")
"""lm-eval's aggregations that are means over documents, or the exponential of one."""


def aggregated(values: Sequence[Any], aggregation: str) -> Items | None:
    """The per-document values of a metric as `Items`; None if lm-eval aggregates the metric by anything but a mean, a
    perplexity or bits per byte."""
    if aggregation == "mean":
        return Items([float(value) for value in values])
    if aggregation == "perplexity":
        return Items([-float(value) for value in values], log=True)
    if aggregation in ("weighted_perplexity", "bits_per_byte"):
        log = aggregation == "weighted_perplexity"
        scale = 1.0 if log else math.log(2)
        return Items([-a / scale for a, _ in values], [float(w) for _, w in values], log=log)
    return None


def same(a: float, b: float) -> bool:
    """Whether two numbers agree up to rounding."""
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


def difference(items: Items, control: Items) -> Difference:
    """The score minus the control's; for a perplexity, the difference of logarithms. Without an interval if there are
    too few documents or clusters."""
    found = paired(items, control)
    return found if found.pairs >= LEAST_DOCUMENTS else Difference(found.mean, found.pairs, None, None)


def paired(items: Items, control: Items) -> Difference:
    """The score minus the control's, however few documents or clusters there are."""
    gaps, weights = terms(items, control)
    largest = max(float(np.abs(side.values).max()) for side in (items, control))
    rounding = 4 * sys.float_info.epsilon * largest * len(items.values) / sum(weights)
    return weighted_difference(gaps, weights, rounding)


def terms(items: Items, control: Items) -> tuple[list[float], list[float]]:
    """The difference between two scores, and its weight, for every document or cluster."""
    gaps = np.asarray(items.values, float) - np.asarray(control.values, float)
    weights = _weights(items)
    if items.clusters is None:
        return gaps.tolist(), weights.tolist()
    numbers: dict[object, int] = {}
    names = (n if one is None or one == "" else str(one) for n, one in enumerate(items.clusters))
    own = [numbers.setdefault(name, len(numbers)) for name in names]
    return np.bincount(own, gaps).tolist(), np.bincount(own, weights).tolist()


Scored = Sequence[Items]
"""The items of a score; of several tasks if it is the mean of their scores."""


def group_difference(parts: Sequence[tuple[Items, Items]]) -> Difference:
    """The difference of means over several tasks, which all have the same weight; degrees of freedom by
    Satterthwaite."""
    found = [difference(items, control) for items, control in parts]
    return combined_difference(found, [1 / len(found)] * len(found))


def rows(scores: Mapping[str, Mapping[tuple[str, str], Scored]]) -> list[ScoreRow]:
    """One row per (task, metric) that some checkpoint has: its scores, and differences from the first checkpoint."""
    control, *others = scores
    made = []
    for key in dict.fromkeys(key for mine in scores.values() for key in mine):
        mine = {name: found[key] for name, found in scores.items() if key in found}
        row = ScoreRow(*key, {name: sum(part.score for part in parts) / len(parts) for name, parts in mine.items()}, {})
        for name in others:
            if name in mine and control in mine and (found := _compare(mine[name], mine[control])) is not None:
                row.differences[name] = found
        made.append(row)
    adjust([gap for row in made for gap in row.differences.values()])
    return made


def _compare(items: Scored, control: Scored) -> ScoreGap | None:
    pairs = list(zip(items, control, strict=False))
    if not all(mine.pairs_with(theirs) for mine, theirs in pairs):
        return None
    found, log = group_difference(pairs), items[0].log

    def shown(value: float) -> float:
        return math.exp(min(value, 700)) if log else value

    low, high = (None if end is None else shown(end) for end in (found.low, found.high))
    summed = [terms(*pair) for pair in pairs]
    skewed = found.low is not None and any(_is_skewed(*one) for one in summed)
    few = any(len(gaps) < LEAST_DOCUMENTS for gaps, _ in summed)
    kind = "ratio" if log else "difference"
    return ScoreGap(kind, shown(found.mean), low, high, CONFIDENCE, found.pairs, found.p, skewed=skewed, few=few)


def _is_skewed(gaps: Sequence[float], weights: Sequence[float]) -> bool:
    return skewness(gaps, weights) > MOST_SKEW or effective_count(weights) < LEAST_EFFECTIVE


def _weights(items: Items) -> np.ndarray:
    return np.ones(len(items.values)) if items.weights is None else np.asarray(items.weights, float)
