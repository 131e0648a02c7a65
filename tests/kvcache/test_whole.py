"""Caches that forget nothing: the model's own logits, whatever they are stored in."""

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, StaticCache

from fathom.kvcache import build_cache, cache_bytes
from fathom.kvcache.whole import WHOLE
from fathom.models import FathomConfig

from .cases import cached, model_of, tokens

FP8 = hasattr(cache_utils, "Fp8QuantizedLayer")
needs_fp8 = pytest.mark.skipif(not FP8, reason="the installed transformers has no fp8 cache layer")


def room_for(method, length):
    return {"window": length} if method == "full_static" else {}


@pytest.mark.parametrize("case", ["qwen3", "fathom"])
@pytest.mark.parametrize(
    "method,limit", [("full", 1e-5), ("full_static", 1e-5), pytest.param("full_fp8", 0.3, marks=needs_fp8)]
)
def test_they_read_as_the_model_does(case, method, limit):
    model, ids = model_of(case), tokens(2, 150)
    with torch.no_grad():
        truth = model(ids, use_cache=False).logits
    cache = build_cache(model, method, **room_for(method, 150))
    found = torch.cat([cached(model, piece, cache) for piece in ids.split([60, 80, 10], dim=1)], dim=1)
    assert (found - truth).square().mean().sqrt() < limit * truth.std()
    assert method != "full_fp8" or not torch.equal(found[:, 60:], truth[:, 60:])  # stored in eight bits, and read back


def test_what_they_hold():
    model, ids = model_of("qwen3"), tokens(1, 100)
    held = {}
    for method in WHOLE if FP8 else set(WHOLE) - {"full_fp8"}:
        cache = build_cache(model, method, **room_for(method, 400))
        cached(model, ids, cache)
        held[method] = cache_bytes(cache)
    exact = 3 * 2 * 2 * 16 * 100 * 4  # layers, keys and values, heads, channels, tokens, bytes
    assert held["full"] == exact
    assert abs(held["full_static"] - 4 * exact) < 100  # room for 400 tokens, and a counter in each layer
    assert not FP8 or exact / 4 <= held["full_fp8"] < exact / 4 + 100  # scales


@pytest.mark.parametrize(
    "method,given,message",
    [
        ("full", dict(transform="fft"), "transform: method 'full' is transformers' plain cache"),
        ("full_static", {}, "full_static needs window, the number of tokens to allocate"),
        (
            "full_static",
            dict(window=8, quantized="fp8"),
            "quantized=fp8: method 'full_static' cannot quantize its entries",
        ),
        ("full_fp8", dict(quantized="fp8"), "quantized=fp8: method 'full_fp8' names a quantization already"),
        ("full", dict(quantized="int3"), "quantized must be one of int8, int4, quanto, hqq, fp8, got 'int3'"),
    ],
)
def test_impossible_options(method, given, message):
    with pytest.raises(ValueError, match=message):
        build_cache(model_of("qwen3"), method, **given)


@pytest.mark.parametrize("method", ["full_int8", "full_int4", "full_fp8"])
@pytest.mark.parametrize("options", [{"recurrence": "ponder2"}, {"recurrence": "adaponder"}])
def test_slots_are_not_quantised(method, options):
    """They are refused at once, where a cache of their own would hold them in full precision."""
    with pytest.raises(ValueError, match=f"recurrence '{options['recurrence']}' .* cannot quantize"):
        build_cache(FathomConfig(**options), method)


def test_by_configuration():
    config = model_of("qwen3").config
    assert type(build_cache(config, "full")) is DynamicCache
    assert type(build_cache(config, "full_static", window=8)) is StaticCache
