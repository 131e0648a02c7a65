"""A context that was read is written, loaded and asked as if it had stayed in memory."""

import io

import pytest
import torch
from safetensors.torch import save_file

from fathom.kvcache import (
    METHODS,
    PyramidKV,
    build_cache,
    cache_bytes,
    compressed,
    load_cache,
    press,
    reconstruct,
    save_cache,
)
from fathom.kvcache.method import Selection
from fathom.kvcache.press import Press

from .cases import cache_of, cached, model_of, tokens
from .test_whole import FP8

QUESTION = tokens(3, 40, seed=9)


class Newest:
    """A scorer as kvpress has them."""

    def __init__(self, compression_ratio):
        self.compression_ratio = compression_ratio

    def score(self, module, hidden, keys, values, attentions, kwargs):
        return torch.arange(keys.shape[2], dtype=keys.dtype).expand(keys.shape[:3])


def reads(model, method, how):
    """A cache with a context of three rows."""
    ids, mask = tokens(3, 90), torch.ones(3, 90, dtype=torch.long)
    if how == "padded":
        mask[1, :40], mask[2, :80] = 0, 0
    if how == "rolling":
        return model(ids, past_key_values=cache_of(model, method)).past_key_values
    share = {} if isinstance(method, type) and issubclass(method, Press) else dict(ratio=0.25)
    with compressed(model, method, while_decoding=how == "while decoding", **share):
        return model(ids, attention_mask=mask).past_key_values


@torch.no_grad()
@pytest.mark.quick("llama-snapkv-once", "llama-snapkv-padded", "gemma3-window-tova-padded", "loop-freqkv-rolling")
@pytest.mark.parametrize("how", ["once", "while decoding", "padded", "rolling"])
@pytest.mark.parametrize(
    ("case", "method"),
    [("llama", "snapkv"), ("llama", "expected_attention"), ("gemma3-window", "tova"), ("loop", "freqkv")],
)
def test_the_same_before_and_after(case, method, how, tmp_path):
    model = model_of(case)
    cache = reads(model, method, how)
    save_cache(cache, tmp_path / "context.safetensors")
    loaded = load_cache(model, tmp_path / "context.safetensors")
    assert cache_bytes(loaded) == cache_bytes(cache) <= (tmp_path / "context.safetensors").stat().st_size
    assert (loaded.seen, loaded.entries, loaded.pads, loaded.schedule) == (
        cache.seen,
        cache.entries,
        cache.pads,
        cache.schedule,
    )
    pickled = io.BytesIO()
    torch.save(cache, pickled)
    pickled.seek(0)
    again = torch.load(pickled, weights_only=False)
    expected = model(QUESTION, past_key_values=cache.branch()).logits
    for one in (loaded, loaded, again):  # many questions, each from a branch
        assert torch.equal(model(QUESTION, past_key_values=one.branch()).logits, expected)
    assert not torch.equal(model(QUESTION, past_key_values=build_cache(model, "full")).logits, expected)


@torch.no_grad()
def test_a_method_of_ones_own(monkeypatch, tmp_path):
    class Newest(Selection):
        name = "newest"

        def __init__(self, schedule, rope, power=1.0):
            super().__init__(schedule, rope)
            self.power = power

        def scores(self, held):
            return torch.arange(held.keys.shape[2]).expand(held.keys.shape[:3]) ** self.power

    model, path = model_of("llama"), tmp_path / "mine"
    monkeypatch.setitem(METHODS, "newest", Newest)
    cache = cache_of(model, "newest", power=2.0)
    cached(model, tokens(1, 90), cache)
    save_cache(cache, path)
    assert load_cache(model, path).method.power == 2.0
    monkeypatch.delitem(METHODS, "newest")
    with pytest.raises(ValueError, match="'newest' is not in METHODS"):
        load_cache(model, path)
    with pytest.raises(ValueError, match="a cache of newest, which may compress again"):
        save_cache(cache, path)


@torch.no_grad()
@pytest.mark.quick("press-padded", "pyramidkv-once")
@pytest.mark.parametrize("how", ["once", "padded"])
@pytest.mark.parametrize("method", ["press", "pyramidkv"])
def test_what_a_method_without_a_name_has_left(method, how, tmp_path):
    """No compression follows, so the file is read without the method; its own positions and lengths stay."""
    model, newest = model_of("llama"), press(Newest(0.5))
    cache = reads(model, newest if method == "press" else PyramidKV, how)
    save_cache(cache, tmp_path / "context")
    loaded = load_cache(model, tmp_path / "context")
    expected = model(QUESTION, past_key_values=cache.branch()).logits
    assert torch.equal(model(QUESTION, past_key_values=loaded.branch()).logits, expected)
    loaded.reset()
    with pytest.raises(ValueError, match="holds one compressed prompt"):
        model(tokens(3, 90), past_key_values=loaded)
    again = build_cache(model, newest, window=16)
    model(tokens(3, 20), past_key_values=again)
    with pytest.raises(ValueError, match="which may compress again"):
        save_cache(again, tmp_path / "context")


@torch.no_grad()
def test_a_reconstructed_context_is_stored(tmp_path):
    model = model_of("llama")
    cache = reconstruct(model, tokens(1, 60), torch.tensor([[5, 6]]))
    save_cache(cache, tmp_path / "context")
    loaded = load_cache(model, tmp_path / "context")
    assert torch.equal(*(model(QUESTION[:1], past_key_values=each).logits for each in (cache, loaded)))


@torch.no_grad()
def test_what_cannot_be_stored_or_loaded(tmp_path):
    model, path = model_of("llama"), tmp_path / "cache"
    for options in (dict(static=True), *([dict(quantized="fp8")] if FP8 else [])):
        cache = cache_of(model, "drop", **options)
        model(tokens(1, 20), past_key_values=cache)
        with pytest.raises(ValueError, match="cannot be stored: build it without static, quantized"):
            save_cache(cache, path)
    cache = cache_of(model, "drop")
    with pytest.raises(ValueError, match="is empty"):
        save_cache(cache, path)
    cached(model, tokens(1, 90), cache)
    save_cache(cache, path)
    other = model_of("llama", rope_parameters=dict(rope_type="default", rope_theta=77.0))
    with pytest.raises(ValueError, match="other RoPE angles"):
        load_cache(other, path)
    save_file({"x": torch.zeros(1)}, str(path))
    with pytest.raises(ValueError, match="not a cache that save_cache wrote"):
        load_cache(model, path)
