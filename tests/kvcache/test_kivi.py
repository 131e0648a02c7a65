"""Entries in whole numbers: within half a step, in the bytes that the bits say, alone and under every method."""

import pytest
import torch
from transformers import DynamicCache

from fathom.kvcache import build_cache, cache_bytes
from fathom.kvcache.kivi import CHANNELS, ENTRIES, GROUP, Int4, Int8, pack, unpack

from .cases import LENGTH, N, cache_of, cached, model_of, tokens
from .test_half import Oldest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [ENTRIES, CHANNELS])
@pytest.mark.parametrize("bits", [8, 4])
def test_within_half_a_step(bits, dim, dtype):
    x = torch.randn(2, 3, 64, 48) * torch.logspace(-3, 3, 48)  # channels of very different size, as keys have
    x[:, :, 5, 16:32] = 0.25  # a group of equal numbers
    codes, least, step = packed = pack(x.to(dtype), bits, dim)
    back = unpack(packed, bits, dim, torch.float32)
    groups = x.to(dtype).float().unflatten(dim, (-1, 32 if dim == ENTRIES else 16))  # 32 does not divide 48
    wide = (groups.amax(dim + 1, keepdim=True) - groups.amin(dim + 1, keepdim=True)) / (2**bits - 1)
    rounding = groups.abs().amax(dim + 1, keepdim=True) * 2**-10  # of bounds in 16 bits
    assert ((back.unflatten(dim, groups.shape[dim : dim + 2]) - groups).abs() <= 0.51 * wide + rounding).all()
    assert codes.numel() == x.numel() * bits // 8 and codes.dtype == torch.uint8
    assert least.shape == step.shape and step.dtype == torch.float16


@torch.no_grad()
@pytest.mark.parametrize("kind", [Int8, Int4])
def test_an_entry_is_rounded_once(kind):
    """In whatever pieces a text comes, what is stored is the same, and the last entries are exact."""
    keys, values = torch.randn(2, 1, 2, 200, 32)
    one, many = kind(), kind()
    read = one.update(keys, values)
    assert torch.equal(read[0], keys)  # attention reads a prompt as it is
    for part in torch.stack([keys, values]).split([70, 1, 1, 90, 38], dim=3):
        read = many.update(*part)
    a, b = one.update(keys[:, :, :0], values[:, :, :0]), many.update(keys[:, :, :0], values[:, :, :0])
    for x, y, exact in zip(a, b, (keys, values), strict=True):
        assert torch.equal(x, y) and torch.equal(x[:, :, -GROUP:], exact[:, :, -GROUP:])
        assert not torch.equal(x[:, :, :GROUP], exact[:, :, :GROUP])
    assert many.get_seq_length() == 200


@torch.no_grad()
@pytest.mark.parametrize("kind", [Int8, Int4])
def test_keys_may_be_wider_than_values(kind):
    """As those of latents (DeepSeek)."""
    keys, values, layer = torch.randn(1, 2, 70, 24), torch.randn(1, 2, 70, 16), kind()
    for part in (slice(60), slice(60, 69), slice(69, 70)):
        read = layer.update(keys[:, :, part], values[:, :, part])
    for x, exact in zip(read, (keys, values), strict=True):
        assert x.shape == exact.shape and torch.equal(x[:, :, -GROUP:], exact[:, :, -GROUP:])
        assert (x - exact).abs().max() < (0.3 if kind is Int4 else 0.02)


@torch.no_grad()
@pytest.mark.quick("full_int8*qwen3", "full_int4*gemma3-window")
@pytest.mark.parametrize("case", ["qwen3", "gemma3-window", "lfm2", "loop"])
@pytest.mark.parametrize(("method", "limit"), [("full_int8", 0.02), ("full_int4", 0.4)])
def test_a_whole_cache(method, limit, case):
    model, ids = model_of(case), tokens(2, 150)
    truth = model(ids, use_cache=False).logits
    cache = build_cache(model, method)
    found = torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split([80, 60, 10], dim=1)], dim=1)
    assert 0 < (found - truth)[:, 80:].std() < limit * truth.std()
    if case == "qwen3":
        full = DynamicCache()
        model(ids, past_key_values=full)
        share = {"full_int8": 0.25, "full_int4": 0.125}[method]
        exact = cache.layers[0].keys.shape[2]
        assert GROUP <= exact < 2 * GROUP
        assert cache_bytes(cache) < cache_bytes(full) * (1.5 * share * (150 - exact) + exact) / 150
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(ids[:, :5].flip(0), past_key_values=cache).logits.flip(0)
        assert torch.isfinite(swapped).all()


@torch.no_grad()
@pytest.mark.quick("snapkv-int8", "freqkv-int4")
@pytest.mark.parametrize("quantized", ["int8", "int4"])
@pytest.mark.parametrize("method", ["freqkv", "drop", "snapkv", "key_norm"])
def test_under_a_method(method, quantized):
    model, ids = model_of("llama", head_dim=32), tokens(2, LENGTH)  # Qwen3's keys have nearly equal norms
    given = dict(window=256, kept=150, sinks=4)
    long = tokens(2, 400)
    exact, small = (build_cache(model, name, **given) for name in (method, f"{method}+{quantized}"))
    a, b = cached(model, long, exact), cached(model, long, small)
    assert torch.equal(a[:, :256], b[:, :256])
    assert 0 < (a - b)[:, 256:].std() < {"int8": 0.1, "int4": 0.7}[quantized] * a.std()
    assert small.memory_bytes() < {"int8": 0.6, "int4": 0.5}[quantized] * exact.memory_bytes()
    assert small.entries == exact.entries and small.compressions == exact.compressions == 2
    again = small.branch()
    after = tokens(2, 9, seed=4)
    assert torch.equal(model(after, past_key_values=small).logits, model(after, past_key_values=again).logits)
    short = cache_of(model, method, quantized=quantized)
    cached(model, ids[:, : N + 10], short)


def test_what_is_refused():
    model = model_of("qwen3")
    for method, given, words in (
        ("drop+int3", {}, "quantized must be one of int8, int4, quanto, hqq, fp8, got 'int3'"),
        ("drop+int8", dict(quantized="int4"), "method 'drop\\+int8' names a quantization already"),
        ("full_int8", dict(quantized="int8"), "method 'full_int8' names a quantization already"),
    ):
        with pytest.raises(ValueError, match=words):
            build_cache(model, method, window=64, **given)
    cache = build_cache(model, "full_int8")
    model(tokens(1, 20), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot be removed"):
        cache.crop(10)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantized", "most"), [("int8", 0.005), ("int4", 0.04)])
def test_what_stays_is_not_rounded_again(quantized, most, dtype):
    """Keys are stored without their rotation, so entries that stay together get the same codes at each compression."""
    model, draw = model_of("qwen3", dtype, head_dim=64), torch.Generator().manual_seed(0)
    given = dict(window=256, sinks=4, ratio=0.75)
    small, exact = build_cache(model, Oldest, quantized=quantized, **given), build_cache(model, Oldest, **given)
    small.watched = exact.watched = True
    turn, found = exact.method.rope.plan[0], {}
    while exact.compressions < 50:
        keys, values = torch.randn(2, 1, 2, 64 if exact.seen else 256, 64, generator=draw)
        keys = turn.turn(keys + 2, exact.seen)
        a, b = small.update(keys.to(dtype), values.to(dtype), 0)[0], exact.update(keys, values, 0)[0]
        found[exact.compressions] = float((a[:, :, 4:100] - b[:, :, 4:100]).norm() / b[:, :, 4:100].norm())
    assert 0 < found[50] < 1.02 * found[1] < most


def test_packed_numbers_get_the_same_codes():
    """Whatever is packed again, the steps are the same to the bit."""
    x = torch.randn(1, 2, 64, 64) * 3 + 2
    for bits, dim in ((8, ENTRIES), (4, ENTRIES), (8, CHANNELS), (4, CHANNELS)):
        once = pack(x, bits, dim)
        again = pack(unpack(once, bits, dim, torch.float32), bits, dim)
        assert all(map(torch.equal, once, again))
        assert not torch.equal(once[0], pack(x + 0.1 * x.roll(1, 2), bits, dim)[0])
