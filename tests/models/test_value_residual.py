"""Value residual: half of the first layer's value, half of the own."""

import pytest
import torch
from transformers import DynamicCache

from fathom.models.value_residual import ValueResidual

from .cases import build, config_of, tokens
from .oracle import Oracle, agree, unrolled
from .test_slots import order_of


def halves(query, key, value, sources):
    ((_, first),) = sources
    return 0.5 * first + 0.5 * value


def only_first(layer):
    return {0} if layer else set()


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_equations(kv_heads):
    model = build(config_of("value_residual", num_key_value_heads=kv_heads), dtype=torch.float64)
    oracle, ids = Oracle(model), tokens(2, 6)
    agree(model, ids, unrolled(oracle, ids, range(4), only_first, halves), oracle)
    for wrong in (lambda q, k, v, s: 0.4 * s[0][1] + 0.6 * v, lambda q, k, v, s: s[0][1] + v):
        other = unrolled(oracle, ids, range(4), only_first, wrong)
        assert (other - model(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("prelude", [0, 1])
def test_each_trip_of_a_loop_has_its_own_first_value(prelude):
    config = config_of("loop", mixer="value_residual", recurrence_options={"trips": 2, "prelude": prelude})
    model, ids = build(config, dtype=torch.float64), tokens(1, 6)
    order = [layer for layer, _ in order_of(4, 2, prelude, 0)]

    def sources(position):
        if order[position] == 0:
            return set()
        return {max(p for p in range(position) if order[p] == 0)}

    oracle = Oracle(model)
    agree(model, ids, unrolled(oracle, ids, order, sources, halves), oracle)


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
