"""Bytes, counted and foretold."""

import pytest
import torch

from fathom.kvcache import METHODS, cache_bytes

from .cases import LENGTH, N, S, cache_of, cached, model_of, tokens

LAYERS, HEADS, WIDTH = 3, 2, 16


@pytest.mark.quick("freqkv-*", "sinks-*", "snapkv-*", "expected_attention-*")
@pytest.mark.parametrize(
    "method,dtype",
    [*((name, torch.float32) for name in METHODS), ("freqkv", torch.bfloat16), ("snapkv", torch.bfloat16)],
)
def test_the_formula(method, dtype):
    """Keys and values of p entries, once a compression was made the sinks' keys as they came, and noted queries."""
    model = model_of("qwen3", dtype)
    cache = cache_of(model, method)
    for t in (1, 1, N - 6, *[1] * 8, 24, *[1] * 8):  # across two compressions
        cached(model, tokens(2, t), cache)
        # in half precision keys are stored unrotated, so the sinks need no second copy
        rows = 2 * cache.entries + (S if cache.compressions and dtype == torch.float32 else 0)
        noted = [layer.queries for layer in cache.layers if layer.queries is not None]
        assert bool(noted) == bool(cache.method.observed)
        queries = sum(x.numel() * x.element_size() for x in noted)
        assert cache_bytes(cache) == 2 * LAYERS * HEADS * WIDTH * rows * dtype.itemsize + queries
        assert cache.memory_bytes() == cache_bytes(cache)
        assert cache.entries <= N


def test_queries_count():
    model = model_of("qwen3")
    cache = cache_of(model, "snapkv")
    cached(model, tokens(1, LENGTH), cache)
    entries = LAYERS * HEADS * WIDTH * (2 * cache.entries + S) * 4
    since = 1 + (LENGTH - N - 1) % cache.schedule.freed  # none is held of those before the last compression
    assert cache.memory_bytes() == entries + LAYERS * 4 * WIDTH * min(cache.method.observed, since) * 4
