"""C against SciPy's DCT, the published numbers, and its invariants."""

import numpy as np
import pytest
import torch
from scipy.fft import dct as scipy_dct
from scipy.fft import idct as scipy_idct

from fathom.kvcache.freqkv import FreqKV, dct, dct_matrix, inverse_dct
from fathom.kvcache.schedule import Schedule

SHAPES = [(8, 4), (60, 28), (508, 252), (4092, 2044), (4092, 2046)]
# M → L: spectral norm, mean row-L1, largest entry
PUBLISHED = {
    (8, 4): (0.707107, 1.3852, 0.594400),
    (60, 28): (0.683130, 2.0658, 0.564379),
    (508, 252): (0.704317, 2.9506, 0.596038),
}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"{s[0]}-{s[1]}")
def case(request):
    m, kept = request.param
    return m, kept, FreqKV.build(kept, m)


@pytest.mark.quick("8-4", "60-28", "508-252")
def test_scipy(case):
    m, kept, c = case
    x = torch.randn(m, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spectrum = scipy_dct(x.numpy(), norm="ortho", axis=0)[:kept]
    truth = torch.from_numpy(scipy_idct(spectrum, norm="ortho", axis=0) * np.sqrt(kept / m))
    assert (c @ x - truth).abs().max() < 1e-11
    assert (c.float() @ x.float() - truth).abs().max() < 2e-5


@pytest.mark.quick("8-4", "60-28", "508-252")
def test_invariants(case):
    m, kept, c = case
    assert (c.sum(1) - 1).abs().max() < 1e-11
    assert (c.sum(0) - kept / m).abs().max() < 1e-11
    assert (c @ c.T - kept / m * torch.eye(kept, dtype=c.dtype)).abs().max() < 1e-11
    assert (c - c.flip(0, 1)).abs().max() < 1e-11


@pytest.mark.parametrize("shape", PUBLISHED)
def test_published_numbers(shape):
    norm, row, largest = PUBLISHED[shape]
    c = FreqKV.build(shape[1], shape[0])
    assert torch.linalg.matrix_norm(c, 2).item() == pytest.approx(norm, abs=1e-6)
    assert c.abs().sum(1).mean().item() == pytest.approx(row, abs=1e-4)
    assert c.max().item() == pytest.approx(largest, abs=1e-6)


@pytest.mark.parametrize("n", [1, 2, 7, 60, 4092])
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_fft_is_the_matrix(n, dtype, limit):
    x = torch.randn(2, 3, n, 4, dtype=dtype)
    truth = torch.from_numpy(scipy_dct(x.double().numpy(), norm="ortho", axis=2))
    assert (dct(x) - truth).abs().max() < limit
    assert (inverse_dct(dct(x)) - x).abs().max() < limit


@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-11), (torch.float32, 1e-5)])
def test_both_transforms_and_their_gradients(dtype, limit):
    x = torch.randn(1, 2, 60, 3, dtype=dtype, requires_grad=True)
    weight = torch.randn(1, 2, 28, 3, dtype=dtype)
    results = []
    for transform in ("matrix", "fft"):
        reduced = FreqKV(Schedule(64, 4, 28), None, transform=transform).reduce(x)
        results.append((reduced, *torch.autograd.grad((reduced * weight).sum(), x)))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < limit


def test_unknown_transform():
    with pytest.raises(ValueError, match="transform must be one of auto, matrix, fft, got 'dwt'"):
        FreqKV(Schedule(64, 4, 28), None, transform="dwt")


@pytest.mark.quick("60-28", "63-21", "96-31")
@pytest.mark.parametrize("m,kept", [(60, 28), (96, 31), (63, 21), (2044, 1020)])
def test_closed_form_is_the_product_of_its_definition(m, kept):
    """Also where an old and a new entry lie at the same angle, as in (63, 21)."""
    product = np.sqrt(kept / m) * dct_matrix(kept).T @ dct_matrix(m, kept)
    c = FreqKV.build(kept, m)
    assert (c - product).abs().max() < 1e-13
    assert torch.equal(FreqKV.build(kept, m, torch.float32), c.float())


def test_closed_form_of_a_large_window():
    """Rows of a matrix that would take seconds and a gigabyte as a product."""
    m, kept = 8188, 4092
    i = torch.tensor([0, 1, 2045, 2046, 4090, 4091])
    spectrum = scipy_dct(np.eye(kept)[i].T, norm="ortho", axis=0)
    padded = np.concatenate([spectrum, np.zeros((m - kept, len(i)))])
    truth = torch.from_numpy(np.sqrt(kept / m) * scipy_idct(padded, norm="ortho", axis=0)).T
    assert (FreqKV.rows(i, kept, m) - truth).abs().max() < 1e-13
