"""The pooling of attention_residuals in Triton, held to its reference."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fathom.kernels import depth_pool as ours
from fathom.models.residuals import attention_residuals

from .held import DEVICE, hold, hold_no_zeros
from .test_depth_mix import DTYPES, planted_in

EPS = 1e-6


def drawn(count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Query, bias and sources."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width, wide = choose.choice((8, 40, 130)), torch.promote_types(dtype, torch.float32)
    shape = (choose.choice((1, 2)), choose.choice((1, 5)), width)
    query = torch.randn(width, generator=generator).to(wide)
    bias = torch.randn(1, generator=generator).to(wide)
    sources = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
    return [x.requires_grad_() for x in (query, bias, *sources)]


def reference(query: Tensor, bias: Tensor, *sources: Tensor) -> Tensor:
    return attention_residuals.pool(sources, query, EPS, bias)


def pooled_by(module):
    return lambda query, bias, *sources: module.depth_pool(sources, query, EPS, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_reference(dtype):
    for seed, count in enumerate((1, 2, 9, 25)):
        hold(pooled_by(ours), reference, drawn(count, dtype, seed), dtype)


def test_more_tiles_than_programs(monkeypatch):
    monkeypatch.setattr(ours, "PROGRAMS", 2)
    monkeypatch.setattr(ours, "TILE", 64)
    hold(pooled_by(ours), reference, drawn(3, torch.float32, 5), torch.float32)


def test_without_a_bias():
    query, _, *sources = (x.to(DEVICE) for x in drawn(3, torch.float32, 5))
    mixed, weights = ours.pool(sources, query, None, EPS)
    torch.testing.assert_close(mixed, attention_residuals.pool(sources, query, EPS))
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))


@pytest.mark.parametrize("biased", [True, False])
def test_is_an_operator_of_torch(biased):
    query, bias, *sources = (x.to(DEVICE).detach().requires_grad_() for x in drawn(3, torch.float32, 6))
    torch.library.opcheck(ours.pool, (sources, query, bias if biased else None, EPS))


def test_the_weights_get_no_gradient_of_zeros():
    query, bias, *sources = (x.to(DEVICE).detach().requires_grad_() for x in drawn(3, torch.float32, 6))
    hold_no_zeros(ours.pool(sources, query, bias, EPS)[0], (query, bias, *sources))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(gain - mean)", "(gain + mean)"),
        ("along[:, None] * q - (along", "along[:, None] * q + (along"),
        ("of_bias += back", "of_bias -= back"),
    ],
)
def test_a_planted_fault_is_seen(right, wrong, tmp_path):
    with pytest.raises(AssertionError, match="is off by"):
        hold(pooled_by(planted_in(ours, right, wrong, tmp_path)), reference, drawn(3, torch.float32, 2), torch.float32)
