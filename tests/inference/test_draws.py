"""Draws have the distribution, repeat, and do not change with rounding."""

import numpy as np
import pytest
import scipy.stats
import torch

from fathom.inference.draws import BLOCK, Source
from fathom.inference.sampling import Choice


def misfit(tokens, expected):
    """The p-value of chi-square, over tokens that are expected at least five times."""
    counts = np.bincount(tokens, minlength=len(expected))
    wanted = expected.numpy() * len(tokens)
    large = wanted >= 5
    found, wanted = ([*both[large], *([both[~large].sum()] if (~large).any() else [])] for both in (counts, wanted))
    return scipy.stats.chisquare(found, wanted).pvalue


@pytest.mark.slow
@pytest.mark.parametrize("size", [6, pytest.param(BLOCK, marks=pytest.mark.slow), 3 * BLOCK + 7])
def test_draws_have_the_probabilities(size):
    """By position and by seed, within one block of tokens and over several, the last of them short."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(size, generator=generator)
    expected = (logits.double() / 0.8).softmax(0)
    by_position = [Choice(0.8, seed=11).token(logits, [1], range(i)) for i in range(6_000)]
    by_seed = [Choice(0.8, seed=i).token(logits, [1], [5]) for i in range(6_000)]
    assert misfit(by_position, expected) > 1e-3 and misfit(by_seed, expected) > 1e-3
    pairs = [2 * (one == by_position[0]) + (two == by_seed[0]) for one, two in zip(by_position, by_seed, strict=True)]
    first, second = expected[by_position[0]], expected[by_seed[0]]
    apart = torch.outer(torch.stack((1 - first, first)), torch.stack((1 - second, second))).flatten()
    assert misfit(pairs, apart) > 1e-3, "neighbours are independent"
    assert misfit(by_seed, (logits.double() / 0.9).softmax(0)) < 1e-6, "another temperature is seen"


def test_a_draw_is_a_function_of_seed_text_and_position():
    places = list(np.ndindex(3, 3, 3))
    one, again = ([float(Source(*at[:2]).uniforms(at[2], 1)[0]) for at in places] for _ in range(2))
    assert len(set(one)) == len(one) and one == again
    assert Source(-1).uniforms(0, 1) == Source((1 << 64) - 1).uniforms(0, 1)
    few, many = Source(7).uniforms(3, 4), Source(7).uniforms(3, 5_000)
    assert (many[:4] == few).all() and many.min() > 0 and many.max() < 1


def test_the_ends_of_the_noise_are_numbers(monkeypatch):
    """Of the largest and the smallest number that the generator makes."""
    for raw in (0, (1 << 64) - 1):
        monkeypatch.setattr("fathom.inference.draws.Philox", lambda raw=raw, **_: Constant(raw))
        assert np.isfinite(np.log(-np.log(Source(0).uniforms(0, 3)))).all()
        assert Source(0).draw(torch.tensor([0.0, 1e-300, 0.0], dtype=torch.float64), 0) == 1


class Constant:
    def __init__(self, raw):
        self.raw = raw

    def random_raw(self, count):
        return np.full(count, self.raw, np.uint64)


def test_rounding_changes_draws_of_near_ties_only():
    """On a flat distribution, where a lookup in the running sum moves the most."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(49_152, generator=generator) * 0.1
    other = logits + 1e-3 * torch.randn(49_152, generator=generator)
    draws = 400
    changed = sum(
        Choice(1.0, seed=i).token(logits, [], []) != Choice(1.0, seed=i).token(other, [], []) for i in range(draws)
    )
    lookups = [
        torch.searchsorted(weights.cumsum(0), torch.from_numpy(Source(9).uniforms(0, draws)))
        for weights in (logits.double().softmax(0), other.double().softmax(0))
    ]
    assert changed <= 3, "expected: 0.0015 of them"
    assert int((lookups[0] != lookups[1]).sum()) > 10 * max(changed, 1)
