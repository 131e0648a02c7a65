"""HuRef's similarity from anchors that a model's width spans: the same number as from whole terms."""

from __future__ import annotations

import numpy as np
import pytest

from fathom.lineage import huref


def plain(a, b, rows, published):
    """The definition: the terms of all pairs of anchors, brought to mean 0 and one standard deviation."""
    sides = []
    for weights in (a, b):
        x = huref.anchor_embeddings(weights, rows, published)
        terms = [term for index in weights.keyed[-2:] for term in huref.terms(weights, x, index, published)]
        sides.append(np.stack([(term - term.mean()) / term.std() for term in terms]))
    return np.vdot(*sides) / np.sqrt(np.vdot(sides[0], sides[0]) * np.vdot(sides[1], sides[1]))


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("anchors", [40, 400])  # fewer and more than the 64 channels
def test_fewer_numbers_give_the_same_similarity(opened, anchors, published):
    a, b, rows = opened(seed=70), opened(seed=71), np.random.default_rng(0).permutation(512)[:anchors]
    wanted = plain(a, b, rows, published)
    assert huref.ics(a, b, rows, rows, published) == pytest.approx(wanted, abs=1e-9)
    assert huref.ics(a, b, rows, rows[::-1], published) != pytest.approx(wanted, abs=1e-6)
    assert huref.ics(a, a, rows, rows, published) == pytest.approx(1)
