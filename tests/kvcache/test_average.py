"""Area-weighted means."""

import pytest
import torch

from fathom.kvcache.average import Average
from fathom.kvcache.schedule import Schedule


def test_pairs_when_half_is_kept():
    c = Average.build(4, 8)
    assert torch.equal(c, torch.eye(4, dtype=c.dtype).repeat_interleave(2, 1) / 2)


def test_fractions_at_the_ends():
    c = Average.build(2, 3)
    assert torch.allclose(c, torch.tensor([[2, 1, 0], [0, 1, 2]], dtype=c.dtype) / 3)


@pytest.mark.parametrize("m,kept", [(60, 28), (4092, 2044), (7, 1)])
def test_every_old_entry_counts_alike(m, kept):
    c = Average.build(kept, m)
    assert (c.sum(1) - 1).abs().max() < 1e-10
    assert (c.sum(0) - kept / m).abs().max() < 1e-10
    assert c.min() >= 0


@pytest.mark.parametrize("m,kept", [(60, 28), (508, 252), (7, 1), (9, 8), (1000, 3)])
def test_the_few_entries_of_each_row_are_the_matrix(m, kept):
    x = torch.randn(2, 3, m, 5, dtype=torch.float64)
    method = Average(Schedule(m + 4, 4, kept), None)
    assert (method.reduce(x) - Average.build(kept, m) @ x).abs().max() < 1e-12
