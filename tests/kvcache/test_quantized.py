"""Memories stored by transformers' quantised layers; the backends that are installed."""

import pytest
import torch
import transformers.cache_utils as backends

from .cases import LENGTH, N, cache_of, cached, model_of, tokens


def available(backend):
    if backend == "fp8":
        return hasattr(backends, "Fp8QuantizedLayer")
    return backends.is_hqq_available() if backend == "hqq" else backends.is_optimum_quanto_available()


# Heads of 32: the group-wise backends quantise 64 numbers at once.
BACKENDS = [
    pytest.param(name, marks=pytest.mark.skipif(not available(name), reason=f"{name} is not here"))
    for name in ("fp8", "quanto", "hqq")
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", ["freqkv", "drop", "snapkv"])
def test_close_to_exact_and_smaller(backend, method):
    model, ids = model_of("qwen3", head_dim=32), tokens(2, LENGTH)
    exact, small = cache_of(model, method), cache_of(model, method, quantized=backend)
    a, b = cached(model, ids, exact), cached(model, ids, small)
    full = model(ids).logits
    quantizing, compressing = (b - a)[:, N:].std(), (full - a)[:, N:].std()
    assert 0 < quantizing < 0.5 * compressing
    assert small.memory_bytes() < 0.6 * exact.memory_bytes()
    assert (small.compressions, small.entries) == (exact.compressions, exact.entries) == (3, 39)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_reset(backend):
    model, ids = model_of("qwen3", head_dim=32), tokens(2, 100)
    cache, fresh = cache_of(model, quantized=backend), cache_of(model, quantized=backend)
    cached(model, ids, cache)
    cache.reset()
    assert cache.seen == 0
    a, b = cached(model, ids, cache), cached(model, ids, fresh)
    assert torch.equal(a, b)
    done = model.generate(
        ids[:, :60], past_key_values=cache_of(model, quantized=backend), num_beams=2, max_new_tokens=9
    )
    assert done.shape == (2, 69)
