"""A planted optimum is found, bracketed by further points, or doubted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fathom.experiments.tuning import (
    EDGE,
    EXTENSIONS,
    FLAT,
    LEARNED,
    UNKNOWN,
    Bowl,
    bowl,
    first_places,
    next_place,
    pooled_sigma,
)


def planted(optimum: float, curvature: float = 0.015, noise: float = 0.0, seed: int = 0, steeper: float = 2.0):
    """Two losses for every place: a parabola in doublings, steeper on the right."""
    chance = np.random.default_rng(seed)

    def losses(place: int) -> list[float]:
        away = place - optimum
        return (3 + curvature * away**2 * (steeper if away > 0 else 1) + noise * chance.normal(size=2)).tolist()

    return losses


def search(losses, first: int = 4) -> dict[int, list[float]]:
    points = {place: losses(place) for place in first_places(first)}
    while (place := next_place(points, first)) is not None:
        points[place] = losses(place)
    return points


def test_first_places() -> None:
    assert first_places(3) == [-1, 0, 1] and first_places(4) == [-1, 0, 1, 2]


@pytest.mark.parametrize("optimum", [-2.3, -0.6, 0.4, 1.2, 3.4])
def test_an_optimum_is_bracketed_and_found(optimum: float) -> None:
    found = bowl(search(planted(optimum)), 4)
    assert found.place == pytest.approx(optimum, abs=0.35) and not found.flags
    assert found.curvature is not None and 0.01 < found.curvature < 0.04


def test_beyond_the_extensions_it_is_an_edge() -> None:
    points = search(planted(9.0))
    assert len(points) == 4 + EXTENSIONS
    assert EDGE in bowl(points, 4).flags and bowl(points, 4).place == max(points)
    assert bowl(points, 4).extended == EXTENSIONS


def test_divergence_brackets() -> None:
    """An infinite loss is worse than any, and bends no parabola."""
    points = {-1: [3.2], 0: [3.05], 1: [3.0], 2: [math.inf]}
    assert next_place(points, 4) is None
    found = bowl(points, 4)
    assert found.flags == () and 0.5 < found.place <= 1 and found.curvature == pytest.approx(0.05)
    lost = {place: [math.inf] for place in first_places(4)}
    assert next_place(lost, 4) == -2
    assert bowl(lost, 4).flags == (UNKNOWN,)


def test_a_bowl_ends_where_a_rate_diverged() -> None:
    """The best is above the hole, and so is the optimum."""
    points = {-1: [3.1], 0: [math.inf], 1: [3.0], 2: [3.1], 3: [3.3]}
    assert 1 <= bowl(points, 4).place < 1.2 and bowl(points, 4).known
    assert FLAT in bowl({-1: [3.1], 0: [math.inf], 1: [3.0], 2: [3.1]}, 4).flags, "two points are no bowl"


def test_a_flat_bowl_is_doubted() -> None:
    """No curvature, or noise that hides it: the arm has no rate of its own."""
    assert FLAT in bowl({-1: [3.0], 0: [3.001], 1: [2.999], 2: [2.99], 3: [3.0]}, 4, sigma=0.02).flags
    assert FLAT in bowl(search(planted(0.3, curvature=0.005)), 4, sigma=0.05).flags
    assert FLAT in bowl({0: [3.0], 1: [3.1]}, 3).flags
    clear = bowl(search(planted(0.3, noise=0.003)), 4)
    assert clear.known and clear.low < clear.place < clear.high


def test_losses_that_are_equal_are_flat() -> None:
    """Of several seeds too, whose noise is none: what is left of a parabola is rounding."""
    for places in (range(-1, 2), range(-1, 3), range(-2, 3)):
        for loss in (0.01, 3.0):
            found = bowl({place: [loss, loss] for place in places}, 3)
            assert FLAT in found.flags and found.place == 0
    assert not bowl({-1: [3.0, 3.0], 0: [2.9, 2.9], 1: [3.0, 3.0]}, 3).flags


def test_of_rates_that_learn_a_puzzle_it_is_the_middle_one() -> None:
    """Where all do, none is known; a parabola goes below any loss, or sees no bowl in a single one."""
    one = {-3: [1.2], -2: [LEARNED], -1: [1.1], 0: [1.2]}
    two = {-2: [0.5], -1: [LEARNED], 0: [LEARNED], 1: [0.5]}
    assert bowl(two, 3) == Bowl(-0.5, -1.0, 0.0, None, LEARNED, (), 1)
    assert bowl(one, 3) == Bowl(-2.0, -2.0, -2.0, None, LEARNED, (), 1)
    for count, seeds in ((3, 2), (4, 2), (3, 18)):
        found = bowl(dict.fromkeys(first_places(count), [LEARNED] * seeds), count)
        assert found.place == 0 and found.flags == (FLAT,)
    assert np.mean([LEARNED] * 18) > LEARNED, "by rounding"


def test_rates_that_learn_a_puzzle_are_bracketed() -> None:
    """By one that does not, on both sides, or it is an edge."""
    points = {-1: [LEARNED], 0: [LEARNED], 1: [0.5]}
    assert next_place(points, 3) == -2
    assert bowl(points, 3).flags == (EDGE,) and bowl(points, 3).place == -0.5
    assert next_place({**points, -2: [0.3]}, 3) is None and next_place({**points, -2: [LEARNED]}, 3) == -3
    lower = {-4: [LEARNED], -3: [LEARNED], -2: [LEARNED], **points}
    assert next_place(lower, 3) is None and bowl(lower, 3).flags == (EDGE,)
    assert next_place({-1: [0.5], 0: [LEARNED], 1: [LEARNED]}, 3) == 2
    assert next_place({place: [LEARNED] for place in first_places(3)}, 3) is None, "the rate does not matter"


def test_the_interval_holds_the_optimum() -> None:
    """68 % of them, where the bowl is a parabola; half of the noise said, and fewer do."""
    hits = [0, 0]
    for seed in range(200):
        losses = planted(0.2, 0.05, 0.01, seed, steeper=1.0)
        points = {place: losses(place) for place in first_places(4)}
        for i, sigma in enumerate((0.01, 0.005)):
            found = bowl(points, 4, sigma)
            hits[i] += found.low <= 0.2 <= found.high
    assert 122 <= hits[0] <= 150 and hits[1] < 100


def test_pooled_sigma() -> None:
    assert pooled_sigma([{0: [1.0, 1.2]}, {0: [2.0, 2.0], 1: [5.0], 2: [math.inf, 1.0]}]) == pytest.approx(0.1)
    assert pooled_sigma([{0: [1.0]}]) is None
