"""One compression: what stays, what moves, and what a constant signal becomes."""

import pytest
import torch

from fathom.kvcache import METHODS, compress_in_training
from fathom.kvcache.matrix import _MATRICES
from fathom.kvcache.method import Held

from .cases import SCHEDULE, L, N, S, cache_of, model_of, tokens


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


def compressions(method, keys, values, count):
    """So many compressions on a memory that constant tokens fill up again."""
    first, key, value = keys[:, :, :S], keys[:, :, :1], values[:, :, :1]
    rotation = method.rope.plan[0]
    for i in range(count):
        queries = torch.randn(1, 4, method.observed, 16, dtype=keys.dtype) if method.observed else None
        if queries is not None:
            queries = method.note(None, queries, N - method.observed, rotation)
        keys, values = method.compress(Held(keys, values, queries), first, i)
        new = rotation.turn(key.expand(-1, -1, method.schedule.freed, -1), N + i * method.schedule.freed)
        keys = torch.cat([keys, new], 2)
        values = torch.cat([values, value.expand(-1, -1, method.schedule.freed, -1)], 2)
    return keys, values


ARMS = ("freqkv_high", "freqkv_unscaled", "freqkv_after_rope")
"""By which FreqKV argues: a constant has no high frequency, grows, or is rotated away."""


@pytest.mark.quick("average", "freqkv", "sinks", "snapkv")
@pytest.mark.parametrize("name", METHODS)
def test_one_word_said_forever_stays_that_word(model, name):
    """Constant content is a fixed point of 100 compressions, wherever its entries are moved to."""
    method = cache_of(model, name).method
    key, value = torch.randn(2, 1, 2, 1, 16, dtype=torch.float64).expand(-1, -1, -1, N, -1)
    keys, values = compressions(method, method.rope.plan[0].turn(key, 0), value.contiguous(), 100)
    assert keys.shape[2] == N
    moved = method.schedule.freed * 100
    off = (method.rope.plan[0].turn(keys, -moved, -1) - key).abs().max()
    if name in ARMS:
        assert off > 0.1
        return
    assert off < 1e-3  # float32 angles of thousands
    assert (values - value).abs().max() < 1e-5


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_shapes_types_and_sinks(model, name, dtype):
    method = cache_of(model, name).method
    keys, values = torch.randn(2, 3, 2, N, 16, dtype=dtype)
    queries = torch.randn(3, 4, method.observed, 16, dtype=dtype) if method.observed else None
    if queries is not None:
        queries = method.note(None, queries, N - method.observed, method.rope.plan[0])
    new_keys, new_values = method.compress(Held(keys, values, queries), keys[:, :, :S], 0)
    assert new_keys.shape == new_values.shape == (3, 2, method.schedule.survivors, 16)
    assert new_keys.dtype == new_values.dtype == dtype
    assert torch.equal(new_values[:, :, :S], values[:, :, :S])
    back = method.rope.plan[0].turn(new_keys[:, :, :S].double(), -method.schedule.freed, 0)
    assert (back - keys[:, :, :S]).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-5)


def test_a_matrix_is_made_once_for_all_caches(model, monkeypatch):
    made, freqkv = [], METHODS["freqkv"]
    build = freqkv.build
    monkeypatch.setattr(freqkv, "build", staticmethod(lambda *given: made.append(given[:2]) or build(*given)))
    for options in ({}, {}, dict(kept=20)):
        like = torch.zeros(())
        c = cache_of(model, **options).method.matrix(like)
        assert c is cache_of(model, **options).method.matrix(like)
        assert not torch.equal(c[0], c[1])
    assert made == [(L, N - S), (20, N - S)]
    assert cache_of(model).method.matrix(like.double()).dtype == torch.float64


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_what_inference_made_can_be_trained_with(backend):
    model, ids = model_of("qwen3", attn_implementation=backend), tokens(1, 150)
    _MATRICES.clear()
    with compress_in_training(model, **SCHEDULE):
        with torch.inference_mode():
            model(ids, use_cache=False)
        model(ids, use_cache=False).logits.sum().backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().sum() > 0


def test_protected_entries_stay(model):
    """A score of inf protects, and the latest stay if there are too many; −inf sends away; of equal ones the earlier
    stay."""
    choose, m, inf = cache_of(model, "tova", kept=4).method.choose, N - S, torch.inf
    scores = torch.rand(2, 3, m).mul(-1)
    for protected in range(m + 1):
        marked = scores.clone()
        marked[..., m - protected :] = inf
        chosen = choose(marked)
        assert chosen.shape == (2, 3, 4) and (chosen.diff() > 0).all()
        last = list(range(m - min(protected, 4), m))
        assert all(row[len(row) - len(last) :] == last for row in chosen.flatten(0, 1).tolist())
    scattered = torch.zeros(1, 1, m)
    scattered[..., [3, 8, 20, 21, 40]] = inf
    assert choose(scattered).tolist() == [[[8, 20, 21, 40]]]
    assert choose(torch.full((1, 1, m), 0.5)).tolist() == [[[0, 1, 2, 3]]]  # equal, and not protected
    few = torch.full((1, 1, m), -inf)
    few[..., [30, 50]] = 1.0
    assert choose(few).tolist() == [[[0, 1, 30, 50]]]


@pytest.mark.parametrize("name,options", [("tova", dict(kept=1)), ("snapkv", dict(kept=6, observed=6))])
def test_all_that_stays_may_be_protected(model, name, options):
    """What is left are the sinks and the newest entries, as from `drop`."""
    method, drop = cache_of(model, name, **options).method, cache_of(model, "drop", kept=options["kept"]).method
    keys, queries = torch.randn(1, 2, N, 16), torch.randn(1, 4, method.observed, 16)
    expected = drop.compress(Held(keys, keys), keys[:, :, :S], 0)
    for a, b in zip(method.compress(Held(keys, keys, queries), keys[:, :, :S], 0), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
