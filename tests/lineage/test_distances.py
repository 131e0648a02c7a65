"""Distances and angles of models in the space of their weights."""

from __future__ import annotations

import numpy as np
import pytest

from fathom.lineage import distances, shares
from fathom.lineage.distances import Space

ROOT, LEFT, RIGHT, BELOW = range(4)


def space(together, models=(0, 1, 2, 3)):
    """A base, two children that share a part of their steps, and a child of the first, in three layers."""
    draw = np.random.default_rng(0)
    base, common, *steps = draw.normal(size=(5, 3, 4000))
    points = [base, base + 0.1 * (together * common + steps[0]), base + 0.1 * (together * common + steps[1])]
    rows = np.stack([*points, points[LEFT] + 0.1 * steps[2]], 1)  # [layers, models, numbers]
    return Space(tuple(models), rows @ rows.swapaxes(1, 2))


def test_squared_distances_add_up_along_a_path():
    found = space(0.0)
    apart = {pair: float(found.apart(*pair).sum()) for pair in ((ROOT, LEFT), (LEFT, BELOW), (ROOT, BELOW))}
    assert apart[ROOT, BELOW] == pytest.approx(apart[ROOT, LEFT] + apart[LEFT, BELOW], rel=0.05)
    assert found.apart(ROOT, LEFT) == pytest.approx(0.01, rel=0.1)  # a step of a tenth, in every layer
    assert found.apart(ROOT, ROOT) == pytest.approx(0, abs=1e-9)


def test_a_fork_is_known_by_steps_that_go_alike():
    found = space(0.7)
    assert distances.fork(found, ROOT, [LEFT, RIGHT])
    assert not distances.fork(space(0.0), ROOT, [LEFT, RIGHT])  # nothing tells
    assert not distances.fork(found, LEFT, [ROOT, BELOW])  # it lies between the two
    assert not distances.fork(found, LEFT, [RIGHT, BELOW])  # as far from each other as from it: the fork is missing
    assert not distances.fork(found, ROOT, [LEFT])


def test_models_in_another_order_are_not_together():
    rows = np.random.default_rng(1).normal(size=(2, 2, 4000))
    found = Space((5, 7), rows @ rows.swapaxes(1, 2))
    assert not found.together(5, 7) and found.together(5, 5) and not found.together(5, 6)
    assert space(0.0, (5, 7, 8, 9)).together(5, 9)


def test_every_model_counts_in_whatever_order(opened):
    """Models are multiplied a block at a time, and none is left out."""
    models = [opened(seed=70 + n % 2) for n in range(2 * shares.TOGETHER + 2)]
    (found,) = distances.spaces(models, shares.shape_of, lambda _: None)
    assert found.models == (*range(len(models)),)
    first = shares.products(models[:2], lambda _: None)
    assert found.gram == pytest.approx(np.tile(first, (1, len(models) // 2, len(models) // 2)), rel=1e-9)
