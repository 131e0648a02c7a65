"""Names, options, and the caches made of them."""

import pytest

from fathom.kvcache import METHODS, MemoryCache, Schedule, build_cache, compress_in_training
from fathom.kvcache.build import make_method

from .cases import LINEAR, model_of


@pytest.mark.parametrize("name", METHODS)
def test_every_method_by_name(name):
    model = model_of("qwen3")
    given = {"ratio": 0.25} if METHODS[name].has_ratio else {}
    cache = build_cache(model, name, window=32, sinks=2, **given)
    assert isinstance(cache, MemoryCache) and len(cache.layers) == 3
    assert cache.schedule == (Schedule(32, 2, 29) if name == "sinks" else Schedule(32, 2, 6))
    assert (cache.seen, cache.entries, cache.compressions, cache.memory_bytes()) == (0, 0, 0, 0)


def test_options_reach_the_method():
    for given, chosen in ((dict(transform="fft"), "fft"), ({}, "matrix")):
        assert build_cache(model_of("qwen3"), "freqkv", window=32, **given).method.transform == chosen
    assert build_cache(model_of("qwen3"), "freqkv", window=32, kept=20).schedule.kept == 20


@pytest.mark.parametrize(
    "arguments,error,message",
    [
        (dict(method="dct", window=32), ValueError, "method must be one of full, .*, freqkv, .*, got 'dct'"),
        (dict(), ValueError, "window must be given"),
        (dict(window=32, sinks=20), ValueError, "choose another ratio or number kept, or fewer sinks"),
        (
            dict(method="sinks", window=32, ratio=0.25),
            ValueError,
            "ratio=0.25: method sinks removes one entry at a time",
        ),
        (dict(method="sinks", window="32"), ValueError, "window must be a whole number, got '32'"),
        (dict(window=32, transfrom="fft"), TypeError, "transfrom"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        build_cache(model_of("qwen3"), **arguments)


@pytest.mark.parametrize(
    "given", [dict(window=64), dict(kept=10), dict(sinks=2), dict(ratio=0.25), dict(transform="fft")]
)
def test_a_method_of_ones_own_brings_everything(given):
    model = model_of("qwen3")
    method = make_method(model.config, "freqkv", window=32)
    with pytest.raises(ValueError, match="this freqkv has its own schedule and options"):
        build_cache(model, method, **given)


@pytest.mark.parametrize(
    "other",
    [dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)), dict(rope_parameters=LINEAR), dict(head_dim=8)],
)
def test_a_method_for_another_model(other):
    method = make_method(model_of("qwen3").config, "freqkv", window=32)
    assert build_cache(model_of("qwen3", seed=1), method).method is method
    for use in (build_cache, compress_in_training):
        with pytest.raises(ValueError, match="made for a model with other RoPE angles"):
            use(model_of("qwen3", **other), method)
