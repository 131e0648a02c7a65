"""What queries to come are expected to attend to stays, and statistics stand for the queries."""

import pytest
import torch

from fathom.kvcache import cache_bytes
from fathom.kvcache.method import Held
from fathom.kvcache.rope import Still

from .cases import cache_of, cached, model_of, tokens


@pytest.fixture(scope="module")
def method():
    return cache_of(model_of("qwen3"), "expected_attention").method


def test_the_statistics_are_mean_and_covariance(method):
    queries = torch.randn(1, 4, 64, 16, dtype=torch.float64)
    sums = None
    for start in range(0, 64, 16):  # the sinks' queries do not count
        sums = method.note(sums, queries[:, :, start : start + 16], start, Still())
    count, mean = sums[0, :, -1, -1], sums[0, :, -1, :-1] / sums[0, :, -1, -1:]
    assert count.tolist() == [60] * 4
    assert torch.allclose(mean, queries[0, :, 4:].mean(1))
    spread = sums[0, 2, :-1, :-1] / 60 - mean[2].outer(mean[2])
    assert torch.allclose(spread, torch.cov(queries[0, 2, 4:].T, correction=0))


def test_a_key_that_the_mean_query_looks_at_stays():
    """Without rotation: the mean query's direction; and large values count more than small ones."""
    model = model_of("qwen3")
    method = cache_of(model, "expected_attention", kept=3).method
    queries = 2 + 0.1 * torch.randn(1, 4, 60, 16)
    keys, values = 0.1 * torch.randn(1, 2, 64, 16), torch.ones(1, 2, 64, 16)
    keys[:, :, 20] = 1
    values[:, :, 40], values[:, :, 50] = 1e4, 2e4
    held = Held(keys, values, method.note(None, queries, 4, Still()), Still())
    chosen = method.choose(method.scores(held)[..., 4:])
    assert chosen[0].tolist() == [[16, 36, 46]] * 2


def test_what_it_keeps_of_the_queries_does_not_grow(method):
    model = model_of("qwen3")
    cache = cache_of(model, "expected_attention")
    sizes = []
    for ids in tokens(1, 40).split(10, 1):
        cached(model, ids, cache)
        sizes.append(cache.layers[0].queries.shape)
    assert set(sizes) == {(1, 4, 17, 17)}
    assert cache_bytes(cache) == 3 * 4 * (2 * 2 * 40 * 16 + 4 * 17 * 17)


def test_impossible_options():
    with pytest.raises(ValueError, match="future must be at least 1, got 0"):
        cache_of(model_of("qwen3"), "expected_attention", future=0)
