"""Saved caches: what is opened goes on as what was saved, and what does not fit is refused."""

import copy

import pytest
import torch
from transformers import cache_utils

from fathom.kvcache import METHODS, build_cache, open_cache, save_cache

from .cases import SCHEDULE, cache_of, cached, model_of, tokens


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [40, 150])
@torch.no_grad()
def test_an_opened_cache_goes_on(model, method, length, tmp_path):
    """Before and after a compression, for every method: the same bits."""
    cache = cache_of(model, method)
    cached(model, tokens(2, length), cache)
    save_cache(cache, tmp_path / "prompt.safetensors")
    opened = open_cache(tmp_path / "prompt.safetensors", cache_of(model, method))
    assert (opened.seen, opened.entries, opened.memory_bytes()) == (cache.seen, cache.entries, cache.memory_bytes())
    after = tokens(2, 90, seed=5)
    assert torch.equal(cached(model, after, opened), cached(model, after, cache))
    assert [file.name for file in tmp_path.iterdir()] == ["prompt.safetensors"]


@torch.no_grad()
def test_the_banks_of_several_trips_are_opened(tmp_path):
    """A loop adds them to a cache at its first call, after it was built."""
    loop = model_of("loop")
    cache = cache_of(loop)
    cached(loop, tokens(1, 150), cache)
    save_cache(cache, tmp_path / "c")
    opened = open_cache(tmp_path / "c", cache_of(loop))
    assert len(opened.layers) == len(cache.layers) > len(cache_of(loop).layers)
    after = tokens(1, 90, seed=5)
    assert torch.equal(cached(loop, after, opened), cached(loop, after, cache))


@torch.no_grad()
def test_what_was_forgotten_would_be_seen(model, tmp_path):
    """The sinks' own keys are part of the state: without them, the next compressions differ."""
    cache = cache_of(model, "freqkv")
    cached(model, tokens(1, 150), cache)
    save_cache(cache, tmp_path / "c")
    opened = open_cache(tmp_path / "c", cache_of(model, "freqkv"))
    for layer in opened.layers:
        layer.first = layer.first + 1
    after = tokens(1, 90, seed=5)
    assert not torch.equal(cached(model, after, opened), cached(model, after, copy.deepcopy(cache)))


@torch.no_grad()
def test_an_empty_cache_is_one_too(model, tmp_path):
    save_cache(cache_of(model), tmp_path / "c")
    opened = open_cache(tmp_path / "c", cache_of(model))
    assert torch.equal(cached(model, tokens(1, 90), opened), cached(model, tokens(1, 90), cache_of(model)))


@torch.no_grad()
def test_what_does_not_fit_is_refused(model, tmp_path):
    cache = cache_of(model, "freqkv")
    cached(model, tokens(1, 150), cache)
    file = tmp_path / "c"
    save_cache(cache, file)
    for other, reason in [
        (cache_of(model, "drop"), "method is freqkv, and drop"),
        (build_cache(model, "freqkv", **{**SCHEDULE, "window": 128}), "window is 64, and 128"),
        (cache_of(model_of("qwen3-yarn"), "freqkv"), "angles"),
        (cache_of(model_of("qwen3", num_key_value_heads=4), "freqkv"), "kv_heads is 2, and 4"),
        (cache_of(model_of("qwen3", num_hidden_layers=5), "freqkv"), "layers is 3, and 5"),
        (cache_of(model_of("qwen3").bfloat16(), "freqkv"), "dtype is torch.float32, and torch.bfloat16"),
        (cache_of(model, "freqkv", transform="fft"), "transform is matrix, and fft"),
        (build_cache(model, "full"), "a DynamicCache is not compressed"),
    ]:
        with pytest.raises(ValueError, match=reason):
            open_cache(file, other)
    known_by_configuration = build_cache(model.config, "freqkv", **SCHEDULE)
    assert open_cache(file, known_by_configuration).entries == cache.entries
    save_cache(cache_of(model, "snapkv", kernel=3), tmp_path / "k")
    with pytest.raises(ValueError, match="kernel is 3, and 5"):
        open_cache(tmp_path / "k", cache_of(model, "snapkv"))
    with pytest.raises(ValueError, match="holds 150 tokens already"):
        open_cache(file, cache)
    if hasattr(cache_utils, "Fp8QuantizedLayer"):
        with pytest.raises(ValueError, match="stored quantised"):
            save_cache(build_cache(model, "freqkv", quantized="fp8", **SCHEDULE), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="is not a saved cache"):
        open_cache(file, cache_of(model, "freqkv"))
    torch.save({"keys": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="is not a saved cache"):
        open_cache(file, cache_of(model, "freqkv"))
