"""Value residual: half of the first layer's value, half of the own."""

import pytest
import torch
from transformers import DynamicCache

from fathom.models.value_residual import ValueResidual

from .cases import build, config_of, tokens


def test_first_layer_keeps_its_value_and_the_cache_holds_the_mixed_one():
    model, ids = build(config_of("value_residual"), dtype=torch.float64), tokens(1, 6)
    value = torch.randn(1, 2, 3, 8)
    assert ValueResidual(model.config, 0)(None, None, value, ()) is value
    raw, cache = [], DynamicCache(config=model.config)
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(
            lambda m, a, out: raw.append(out.unflatten(-1, (2, 8)).transpose(1, 2))
        )
    with torch.no_grad():
        model(ids, past_key_values=cache)
    assert torch.equal(cache.layers[0].values, raw[0])
    for layer in (1, 2, 3):
        assert torch.allclose(cache.layers[layer].values, (raw[0] + raw[layer]) / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    torch.manual_seed(0)
    first, own = torch.randn(2, 1, 2, 50, 8).to(dtype)
    mixed = ValueResidual(config_of("value_residual"), 1)(None, None, own, (own, first))
    assert mixed.dtype == dtype
    assert torch.equal(mixed, ((first.double() + own.double()) / 2).to(dtype))
