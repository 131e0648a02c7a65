"""Unbiased CKA and alignment: golden value, laws, and the failures that repairs remove."""

from __future__ import annotations

import numpy as np
import pytest

from fathom.lineage import awm

X = np.array([[1, 2, 3, 4], [5, 6, 0, 1], [2, 3, 4, 5], [6, 0, 1, 2], [3, 4, 5, 6], [0, 1, 2, 3]], float)
Y = np.array([[1, 4, 9], [5, 3, 3], [5, 9, 4], [1, 0, 1], [4, 9, 5], [3, 3, 5]], float)
GOLDEN = 0.818019177179


def trace_form(x, y):
    """HSIC_u ratio written out from its definition."""

    def hsic(k, n):
        one = np.ones(n)
        (a, b) = k
        total = (one @ a @ one) * (one @ b @ one) / ((n - 1) * (n - 2))
        return (np.trace(a @ b) + total - 2 / (n - 2) * (one @ a @ b @ one)) / (n * (n - 3))

    k, m = (v @ v.T - np.diag(np.square(v).sum(1)) for v in (x, y))
    return hsic((k, m), len(x)) / np.sqrt(hsic((k, k), len(x)) * hsic((m, m), len(x)))


def test_golden_value_in_every_form():
    for form in (awm.cka, trace_form):
        assert form(X, Y) == pytest.approx(GOLDEN, abs=1e-12)


@pytest.mark.parametrize(("n", "p", "q"), [(12, 5, 30), (40, 64, 16), (7, 3, 3)])
def test_forms_agree_on_random_shapes(n, p, q):
    draw = np.random.default_rng(n)
    x = draw.normal(size=(n, p))
    y = draw.normal(size=(n, q)) + (x[:, :1] if q else 0)
    assert awm.cka(x, y) == pytest.approx(trace_form(x, y), abs=1e-10)


def test_scale_does_not_matter_and_the_guard_does():
    draw = np.random.default_rng(1)
    x = draw.normal(size=(64, 64)) * 0.02
    y = x + 0.01 * draw.normal(size=(64, 64))
    plain = awm.cka(x, y)
    for scale in (1e-6, 1e6):
        assert awm.cka(x * scale, y) == pytest.approx(plain, abs=1e-9)
        assert awm.cka((x * scale).astype(np.float32), y.astype(np.float32)) == pytest.approx(plain, abs=1e-5)
    assert awm.cka(x * 1e-3, y, guard=1e-8) == 0.0


@pytest.mark.quick("128")
@pytest.mark.parametrize("n", [128, 512])
def test_null_spread_is_root_two_over_n(n):
    draw = np.random.default_rng(n)
    scores = [awm.cka(*draw.normal(size=(2, n, n)).astype(np.float32)) for _ in range(60)]
    assert np.std(scores) == pytest.approx(np.sqrt(2) / n, rel=0.25)
    assert abs(np.mean(scores)) < np.sqrt(2) / n


def test_drift_law_and_why_it_must_be_unbiased():
    draw = np.random.default_rng(3)
    a, noise = draw.normal(size=(2, 512, 512)).astype(np.float32)
    for epsilon, want in ((0.3, 0.917), (1, 0.5), (2, 0.2)):
        assert awm.cka(a, a + epsilon * noise) == pytest.approx(want, abs=0.01)
    centre = np.eye(512) - 1 / 512
    biased = [centre @ (x @ x.T) @ centre for x in (a, noise)]
    assert awm.inner(*biased) / np.sqrt(awm.inner(biased[0], biased[0]) * awm.inner(biased[1], biased[1])) > 0.45


def test_rectangular_matching_and_signs():
    draw = np.random.default_rng(4)
    a = draw.normal(size=(200, 12))
    order, sign = draw.permutation(12)[:7], draw.choice([-1.0, 1.0], 7)
    b = a[:, order] * sign + 0.1 * draw.normal(size=(200, 7))
    cosines = (a / np.linalg.norm(a, axis=0)).T @ (b / np.linalg.norm(b, axis=0))
    found, matching = awm.lap(cosines)
    assert matching.counted.all()
    assert np.array_equal(found.columns, order) and np.array_equal(found.signs, sign)


def test_monotone_map_leaves_gaps_and_keeps_order():
    truth = [0, 2, 3, 6]
    table = np.full((7, 4), 0.05)
    for j, i in enumerate(truth):
        table[i, j] = 0.9
    assert awm.monotone(table) == [(i, j) for j, i in enumerate(truth)]
    crossed = np.zeros((2, 2))
    crossed[0, 1] = crossed[1, 0] = 0.9
    assert len(awm.monotone(crossed)) == 1  # order forbids the second
    assert awm.monotone(table - 0.95) == []
    assert sorted(awm.free(crossed)) == [(0, 1), (1, 0)]


def test_equal_depth_stays_straight_unless_a_shift_is_clear():
    noise = np.random.default_rng(0).normal(0, 0.02, (6, 6))
    assert awm.matched(noise, False) == [(i, i) for i in range(6)]
    shifted = noise + np.eye(6, k=1)
    assert (0, 1) in awm.matched(shifted, False) and (0, 0) not in awm.matched(shifted, False)


def test_channel_sample_is_seeded_and_close_to_the_whole():
    assert np.array_equal(awm.draw_channels(4096, 1024, 5), awm.draw_channels(4096, 1024, 5))
    assert not np.array_equal(awm.draw_channels(4096, 1024, 5), awm.draw_channels(4096, 1024, 6))
    draw = np.random.default_rng(0)
    a = draw.normal(size=(1024, 512)).astype(np.float32)
    b = a + draw.normal(size=a.shape).astype(np.float32)
    some = awm.draw_channels(1024, 512, 0)
    assert awm.cka(a[some], b[some]) == pytest.approx(awm.cka(a, b), abs=0.01)


def test_a_single_lucky_layer_pair_is_no_score():
    """Of unequal stacks only the layers that gain are matched; the others count, or the best of twelve would stand."""
    table = np.full((3, 4), -0.01)
    table[0, 0] = 0.42
    found = awm.Scores(table, awm.monotone(table), [0.43], [0.41])
    assert found.pairs == [(0, 0)] and found.score == pytest.approx(0.14)
    pruned = awm.Scores(np.ones((4, 2)), [(0, 0), (2, 1)], [1.0, 1.0], [1.0, 1.0])
    assert pruned.score == 1.0  # depth pruning leaves no layer of the shallower model unmatched
