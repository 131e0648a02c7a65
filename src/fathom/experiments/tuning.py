"""Chooses a learning rate for each arm: tries learning rates a factor 2 apart, and fits a parabola in log2 of the
learning rate, with its uncertainty.

A learning rate is given by its place: its doublings above the centre. A diverged run has an infinite loss, which
brackets an optimum like any other; the parabola uses only the places on the best one's side.

`rungs.py` scales the learning rate with tokens, width and batch (`Ladder.rule`), and refuses arms with a learning rate
of their own. `stages.py` decides which runs the search needs, and each arm's ratio to the control.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EXTENSIONS = 3
"""Most points that may be added to the first ones."""
WIDEST = 5
"""Most points in the fit of the parabola, around the best."""
UNCERTAIN = 1.0
"""An optimum whose 68 % interval is wider than this many doublings counts as unknown."""
LEARNED = 0.01
"""Losses below this many nats count as equal: if several learning rates solve a puzzle, differences are noise."""
LEVEL = 1e-9
"""Losses with a smaller relative difference are equal up to rounding."""
EDGE, FLAT, UNKNOWN = "edge", "flat", "diverged everywhere"

Points = Mapping[int, Sequence[float]]
"""Losses at each place, one for each seed."""


@dataclass(frozen=True)
class Bowl:
    """The parabola through the losses at several learning rates, and its optimum."""

    place: float
    """The optimum in doublings above the centre, clipped to what was tried; without a parabola, the best run's."""
    low: float
    high: float
    """Ends of its 68 % interval; on a puzzle, the lowest and the highest learning rate that solve it."""
    curvature: float | None
    """Nats per doubling squared; a step of d doublings from the optimum costs curvature · d²."""
    least: float | None
    """The parabola's loss at the optimum."""
    flags: tuple[str, ...]
    extended: int
    """Number of points added to the first ones."""

    @property
    def known(self) -> bool:
        """Whether the optimum is certain enough to be used."""
        return FLAT not in self.flags and UNKNOWN not in self.flags


def first_places(count: int) -> list[int]:
    """`count` learning rates around the centre, as numbers of doublings; if `count` is even, one more lies above the
    centre than below."""
    return list(range(-((count - 1) // 2), count // 2 + 1))


def next_place(points: Points, first: int) -> int | None:
    """The learning rate to try next (in doublings above the centre) if the best is at an edge; None if the optimum is
    bracketed.

    On a puzzle, another run is needed if an edge is among the solving places around the best, unless all places solve
    it.

    Args:
        points: All places tried so far.
        first: How many of them were planned.
    """
    if len(points) - first >= EXTENSIONS:
        return None
    means = _means(points)
    if not math.isfinite(min(means.values())):
        return min(means) - 1  # lower rates diverge less
    best = low = high = min(means, key=lambda place: (means[place], abs(place)))
    if _learns(means[best]):
        if all(map(_learns, means.values())):
            return None
        low, high = _learning(best, means)
    if low == min(means):
        return low - 1
    return high + 1 if high == max(means) else None


def bowl(points: Points, first: int, sigma: float | None = None) -> Bowl:
    """Fit the parabola of loss over log2 of the learning rate; returns the optimum with its interval and flags.

    If only some learning rates solve a puzzle, the optimum is the middle of the solving range, which no parabola fits.

    Args:
        points: Losses at each place.
        first: How many places were planned.
        sigma: Standard deviation of one run; by default estimated from these points.
    """
    means = _means(points)
    extended = max(0, len(means) - first)
    finite = sorted(place for place, loss in means.items() if math.isfinite(loss))
    if not finite:
        return Bowl(0.0, -math.inf, math.inf, None, None, (UNKNOWN,), extended)
    best = min(finite, key=lambda place: (means[place], abs(place)))
    if _learns(means[best]):
        return _floor(best, means, extended)
    flags = [EDGE] if best in (min(means), max(means)) else []
    beside = _beside(best, means)
    near = sorted(sorted(beside, key=lambda place: (abs(place - best), place))[:WIDEST])
    if len(near) < 3:
        return Bowl(float(best), -math.inf, math.inf, None, None, (*flags, FLAT), extended)
    x, y = np.array(near, float), np.array([means[place] for place in near])
    weight = np.sqrt([len(points[place]) for place in near])
    design = np.stack([np.ones_like(x), x - best, (x - best) ** 2], 1)
    a, b, c = np.linalg.lstsq(design * weight[:, None], y * weight, rcond=None)[0].tolist()
    if c <= 0 or np.ptp(y) <= LEVEL * np.abs(y).max():
        return Bowl(float(best), -math.inf, math.inf, c, None, (*flags, FLAT), extended)
    place = best - b / (2 * c)
    noise = _noise(points, near, design @ [a, b, c], weight) if sigma is None else sigma
    spread = np.linalg.inv((design * weight[:, None]).T @ (design * weight[:, None]))
    slope = np.array([0.0, -1 / (2 * c), b / (2 * c * c)])
    error = noise * math.sqrt(float(slope @ spread @ slope))
    if error > UNCERTAIN:
        flags.append(FLAT)
    clipped = min(max(place, min(beside)), max(beside))
    least = a + b * (clipped - best) + c * (clipped - best) ** 2
    return Bowl(clipped, place - error, place + error, c, least, tuple(flags), extended)


def _floor(best: int, means: Mapping[int, float], extended: int) -> Bowl:
    """The middle of the learning rates around the best that solve the puzzle; if all solve it, the best learning rate,
    flagged as unknown."""
    if all(map(_learns, means.values())):
        return Bowl(float(best), -math.inf, math.inf, None, LEARNED, (FLAT,), extended)
    low, high = _learning(best, means)
    flags = (EDGE,) if low == min(means) or high == max(means) else ()
    return Bowl((low + high) / 2, float(low), float(high), None, LEARNED, flags, extended)


def _learning(best: int, means: Mapping[int, float]) -> tuple[int, int]:
    """The lowest and the highest of the learning rates around the best that solve the puzzle."""
    low = high = best
    while _learns(means.get(low - 1, math.inf)):
        low -= 1
    while _learns(means.get(high + 1, math.inf)):
        high += 1
    return low, high


def _learns(loss: float) -> bool:
    """Whether a loss is low enough to count as a solved puzzle, robust to the rounding of mean losses."""
    return loss <= LEARNED * (1 + LEVEL)


def pooled_sigma(bowls: Sequence[Points]) -> float | None:
    """The standard deviation of a run's loss over seeds, pooled over all learning rates with several seeds; None if
    there are none."""
    squares, freedom = 0.0, 0
    for points in bowls:
        for losses in points.values():
            if len(losses) > 1 and all(map(math.isfinite, losses)):
                squares += float(np.var(losses)) * len(losses)
                freedom += len(losses) - 1
    return math.sqrt(squares / freedom) if freedom else None


def _noise(points: Points, near: Sequence[int], fitted: np.ndarray, weight: np.ndarray) -> float:
    """The standard deviation of a run's loss: from several seeds if there are any, else from the residuals of the
    parabola."""
    known = pooled_sigma([points])
    if known is not None:
        return known
    means = np.array([float(np.mean(points[place])) for place in near])
    freedom = len(near) - 3
    # Three points always fit a parabola, so the noise is unknown.
    return math.sqrt(float((((means - fitted) * weight) ** 2).sum()) / freedom) if freedom else math.nan


def _beside(best: int, means: Mapping[int, float]) -> list[int]:
    """The tried learning rates that no diverged learning rate separates from the best."""
    diverged = [place for place, loss in means.items() if not math.isfinite(loss)]
    low = max((place for place in diverged if place < best), default=-math.inf)
    high = min((place for place in diverged if place > best), default=math.inf)
    return sorted(place for place in means if low < place < high)


def _means(points: Points) -> dict[int, float]:
    return {place: float(np.mean(losses)) for place, losses in points.items()}
