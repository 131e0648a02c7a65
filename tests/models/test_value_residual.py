"""Value residual: half of the first layer's value, half of the own."""

import pytest
import torch

from fathom.models.mixers.value_residual import ValueResidual

from .cases import config_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    torch.manual_seed(0)
    first, own = torch.randn(2, 1, 2, 50, 8).to(dtype)
    mixed = ValueResidual(config_of("value_residual"), 1)(None, None, own, (own, first))
    assert mixed.dtype == dtype
    assert torch.equal(mixed, ((first.double() + own.double()) / 2).to(dtype))
