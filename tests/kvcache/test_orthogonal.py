"""A random basis of FreqKV's rank: what they share, and what they do not."""

import numpy as np
import pytest
import torch
from scipy.fft import dct, idct

from fathom.kvcache.freqkv import FreqKV
from fathom.kvcache.orthogonal import Orthogonal, drawn
from fathom.kvcache.schedule import Schedule


def rule(x, kept):
    """By SciPy; only the random numbers are shared."""
    order, signs = (part.numpy() for part in drawn(x.shape[1] - 1, 0))
    spectrum = dct(x, norm="ortho", axis=1)
    others = dct(spectrum[:, 1:][:, order] * signs[:, None], norm="ortho", axis=1)[:, : kept - 1]
    spectrum = np.concatenate([spectrum[:, :1], others], 1)
    return idct(spectrum, norm="ortho", axis=1) * np.sqrt(kept / x.shape[1])


def matrix(m, kept, **options):
    return Orthogonal(Schedule(m + 4, 4, kept), None, **options).reduce(torch.eye(m, dtype=torch.float64)[None, None])[
        0, 0
    ]


@pytest.mark.parametrize("m,kept", [(60, 28), (8, 4), (508, 252), (7, 1)])
def test_it_has_freqkvs_invariants(m, kept):
    c = matrix(m, kept)
    assert (c @ c.T - torch.eye(kept, dtype=c.dtype) * kept / m).abs().max() < 1e-12
    assert (c.sum(1) - 1).abs().max() < 1e-12  # constants are fixed points
    assert (c.sum(0) - kept / m).abs().max() < 1e-12


def test_it_is_no_low_pass():
    """Of slow signals FreqKV keeps all, and this about the share of its rank."""
    m, kept = 508, 252
    slow = torch.cos(torch.arange(1, 21).double()[:, None] * torch.pi * (torch.arange(m) + 0.5) / m)[None, None].mT
    energy = slow.square().sum()
    for c, least, most in ((FreqKV.build(kept, m), 0.999, 1.001), (matrix(m, kept), 0.4, 0.6)):
        assert least < ((c @ slow).square().sum() * m / kept / energy).item() < most


def test_seeds_draw_other_bases():
    assert (matrix(60, 28) - matrix(60, 28, seed=1)).abs().max() > 0.1
