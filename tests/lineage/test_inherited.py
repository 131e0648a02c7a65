"""What training added tells a lineage from a shared initialisation; a permuted stranger is no copy."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fathom.lineage import aligning, attacks, awm, evidence, inherited, signs, verdict
from fathom.lineage.comparison import compare
from fathom.lineage.inherited import Inherited
from fathom.lineage.weights import open_weights
from tests.lineage.zoo import build, logits, save, tiny_config


class Layered:
    """Products of a model, by layer, in place of a checkpoint."""

    def __init__(self, products):
        self.products = products
        self.geometry = SimpleNamespace(width=64, heads=8, head_dim=8, group=1, ffn=128, latent=None)


@pytest.fixture
def from_products(monkeypatch):
    monkeypatch.setattr(inherited, "products", lambda w, index, how, channels: iter([("ffn", w.products[index])]))


def factors(draw, size=64, inner=128):
    return draw.normal(size=(size, inner)) / np.sqrt(inner), draw.normal(size=(inner, size)) / np.sqrt(inner)


def trained(draw, start, rank=10, strength=6.0):
    """A product of factors, one of which training moved along a few directions."""
    down, up = start
    learned = sum(np.outer(draw.normal(size=64), draw.normal(size=64)) / 64 for _ in range(rank))
    return down @ up + strength * learned, learned


def test_runs_from_one_seed_share_little_and_children_much(from_products):
    draw = np.random.default_rng(0)
    starts = [factors(draw) for _ in range(3)]
    one, two, child = [], [], []
    for start in starts:
        first = trained(draw, start)[0]
        one.append(first)
        two.append(trained(draw, start)[0])
        child.append(first + 0.03 * draw.normal(size=first.shape))
    pairs, how = [(i, i) for i in range(3)], awm.identity(64)
    seeds = inherited.measured(Layered(one), Layered(two), pairs, how)
    kept = inherited.measured(Layered(one), Layered(child), pairs, how)
    assert seeds.margin < 0 < kept.margin and seeds.share < 0.2 and kept.share > 0.8
    untrained = [down @ up for down, up in starts]
    assert inherited.measured(Layered(untrained), Layered(untrained), pairs, how) is None


def test_the_fewer_directions_the_higher_the_bar():
    assert Inherited(0.7, 0.05, 9).margin < 0 < Inherited(0.7, 0.11, 9).margin
    assert Inherited(1.0, 0.001, 9).margin < 0


def test_channels_ordered_by_energy_are_not_exchangeable():
    """As after a turn to principal axes: what fixes ten channels by chance alone decides nothing then."""
    assert evidence.is_ordered(np.linspace(5, 1, 64)) and evidence.is_ordered(np.linspace(1, 5, 64) ** 2)
    assert not evidence.is_ordered(np.random.default_rng(0).random(64)) and not evidence.is_ordered(np.ones(64))
    columns = np.random.default_rng(0).permutation(64)
    columns[:10] = np.arange(10)
    found = awm.Matching(columns, np.ones(64, bool), np.ones(64, bool))
    assert evidence.test_order(found, ordered=False).p < 1e-6 < evidence.test_order(found, ordered=True).p
    copy = awm.Matching(np.arange(64), np.ones(64, bool), np.ones(64, bool))
    assert evidence.test_order(copy, ordered=True).p < 1e-30


def test_a_stranger_that_was_permuted_into_place_fixes_nothing():
    """An assignment finds the best places for a stranger's channels; whoever puts them there has shown nothing."""
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=(400, 64)), draw.normal(size=(400, 64))
    found = awm.match(a.T @ b)
    framed = awm.match(a.T @ b[:, np.argsort(found.columns)])
    assert np.mean(framed.columns == np.arange(64)) == 1, "each channel stands where the assignment wants it"
    assert framed.fixed <= 1 and awm.match(a.T @ (a + 0.3 * b)).fixed == 64


def test_a_stranger_that_was_rotated_onto_a_model_is_still_a_stranger(tmp_path, monkeypatch):
    """Anybody can turn the residual stream of one model until its embedding lies closest to another's."""
    for seed, name in enumerate(("base", "stranger")):
        save(build(tiny_config(), 80 + seed), tmp_path / name, 512)
    base, stranger = (open_weights(tmp_path / name) for name in ("base", "stranger"))
    turn = aligning.align(base, stranger, True, lambda _: None).ways["procrustes"].rotation.T
    monkeypatch.setattr(attacks.Rotate, "__post_init__", lambda rotate: setattr(rotate, "rotation", turn))
    attacks.attack(stranger, ("rotate",), tmp_path / "framed", dtype="float64")
    assert (logits(tmp_path / "framed") - logits(tmp_path / "stranger")).abs().max() < 1e-5
    found = compare(base, open_weights(tmp_path / "framed"))
    assert found.pair.aligned.fixed.fixed > 32, "its channels do stand where the other's do"
    assert found.verdict.label == verdict.NONE


def test_signs_need_a_gap_that_no_unrelated_pair_shows():
    own = {"permuted": 0.45, "regauged": 0.05}
    assert signs.suspected(own, {}, 0.9, 0.3) == [signs.WORDS["permuted"], signs.WORDS["regauged"]]
    assert signs.suspected(own, {"permuted": [0.4], "regauged": [0.06]}, 0.9, 0.3) == []
    assert signs.suspected(own, {}, 0.15, None) == []
