"""What the last queries looked at stays."""

import sys

import pytest
import torch

from fathom.kvcache import build_cache
from fathom.kvcache.method import Held

from .cases import cache_of, cached, model_of, tokens


def kept(method, keys, queries):
    return (4 + method.choose(method.scores(Held(keys, keys, queries))[..., 4:]))[0].tolist()


def test_a_planted_key_stays():
    method = cache_of(model_of("qwen3"), "snapkv", kernel=1).method
    keys = 0.1 * torch.randn(1, 2, 64, 16)
    queries = torch.randn(1, 4, method.observed, 16)
    keys[0, 0, 20], keys[0, 1, 33] = 5 * queries[0, :2].mean((0, 1)), 5 * queries[0, 2:].mean((0, 1))
    chosen = kept(method, keys, queries)
    assert 20 in chosen[0] and 33 in chosen[1]
    for row in chosen:
        assert row[-method.observed :] == list(range(64 - method.observed, 64))  # the observers themselves
        assert row == sorted(row) and len(row) == 28


def test_neighbours_of_a_planted_key_stay():
    method = cache_of(model_of("qwen3"), "snapkv", kernel=5).method
    keys, queries = 0.01 * torch.randn(1, 2, 64, 16), torch.randn(1, 4, method.observed, 16)
    keys[0, :, 20] = 9 * queries[0].mean((0, 1))
    assert {18, 19, 20, 21, 22} <= set(kept(method, keys, queries)[0])


@pytest.mark.parametrize("options,message", [(dict(observed=29), "1 to 28"), (dict(kernel=4), "odd, got 4")])
def test_impossible_options(options, message):
    with pytest.raises(ValueError, match=message):
        cache_of(model_of("qwen3"), "snapkv", **options)


def test_it_needs_the_model():
    with pytest.raises(ValueError, match="give build_cache the model"):
        build_cache(model_of("qwen3").config, "snapkv", window=64)


def test_it_never_guesses_the_queries(monkeypatch):
    model = model_of("qwen3")
    cache = cache_of(model, "snapkv")
    monkeypatch.setattr(
        sys.modules["fathom.kvcache.watch"], "observed_backend", lambda decoder: "sdpa"
    )  # none is shown
    with pytest.raises(ValueError, match="queries, which were not seen"):
        cached(model, tokens(1, 100), cache)


def test_one_entry_is_enough():
    model = model_of("qwen3")
    cache = build_cache(model, "snapkv", window=8, sinks=2, kept=1)
    assert cache.method.observed == 1
    cached(model, tokens(1, 30), cache)
    assert cache.entries <= 8
