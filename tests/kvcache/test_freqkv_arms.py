"""The matrices against their definition; `test_recursion.py` compares every method with the oracle."""

import numpy as np
import pytest
import torch
from scipy.fft import dct, idct

from fathom.kvcache.freqkv import FreqKV
from fathom.kvcache.freqkv_arms import AfterRope, HighBand, Unscaled
from fathom.kvcache.schedule import Schedule

from .cases import cache_of, cached, double_angles, model_of, tokens
from .oracle import Oracle

SHAPES = [(60, 28), (63, 21), (508, 252)]


def truth(method, x, kept):
    """By SciPy, `[M, C]` to `[L, C]`."""
    spectrum = dct(x, norm="ortho", axis=0)
    spectrum = spectrum[-kept:] if method is HighBand else spectrum[:kept]
    factor = 1 if method is Unscaled else np.sqrt(kept / len(x))
    return idct(spectrum, norm="ortho", axis=0) * factor


@pytest.mark.parametrize("m,kept", SHAPES)
@pytest.mark.parametrize("method", [HighBand, Unscaled])
def test_both_transforms_are_scipys(method, m, kept):
    x = torch.randn(m, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(truth(method, x.numpy(), kept))
    for transform in ("matrix", "fft"):
        made = method(Schedule(m + 4, 4, kept), None, transform=transform)
        assert (made.reduce(x[None, None])[0, 0] - expected).abs().max() < 1e-11
        other = FreqKV(Schedule(m + 4, 4, kept), None, transform=transform)
        assert (other.reduce(x[None, None])[0, 0] - expected).abs().max() > 0.1


@pytest.mark.slow
def test_random_signals():
    drawn = np.random.default_rng(7)
    for _ in range(500):
        m = int(drawn.integers(4, 80))
        kept, x = int(drawn.integers(1, m)), drawn.standard_normal((m, 2))
        for method in (HighBand, Unscaled):
            for transform in ("matrix", "fft"):
                made = method(Schedule(m + 2, 2, kept), None, transform=transform)
                found = made.reduce(torch.from_numpy(x)[None, None])[0, 0].numpy()
                assert np.abs(found - truth(method, x, kept)).max() < 1e-11, (method.name, m, kept, transform)


def test_a_constant_is_amplified_without_the_factor():
    ones = torch.ones(1, 1, 60, 2, dtype=torch.float64)
    schedule = Schedule(64, 4, 28)
    assert (FreqKV(schedule, None).reduce(ones) - 1).abs().max() < 1e-11
    assert (Unscaled(schedule, None).reduce(ones) - np.sqrt(60 / 28)).abs().max() < 1e-11
    assert HighBand(schedule, None).reduce(ones).abs().max() < 1e-11  # it keeps nothing that is constant


def test_the_order_of_compression_and_rotation_matters():
    model, ids = model_of("qwen3", torch.float64), tokens(1, 100)
    before, after = (cached(model, ids, cache_of(model, name)) for name in ("freqkv", AfterRope.name))
    assert torch.equal(before[:, :64], after[:, :64])
    assert (before - after)[:, 64:].abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("method,part", [(HighBand, "build"), (Unscaled, "build"), (AfterRope, "condense")])
def test_an_arm_that_does_as_the_method_is_seen(monkeypatch, method, part):
    double_angles(monkeypatch)
    model, ids = model_of("fathom", torch.float64), tokens(1, 100)
    expected = torch.from_numpy(Oracle(model, method.name)(ids[0].numpy()))

    def deviation():
        return (cached(model, ids, cache_of(model, method.name))[0] - expected).abs().max()

    assert deviation() < 1e-11
    monkeypatch.setattr(method, part, getattr(FreqKV, part))
    assert deviation() > 1e-3
