"""Every mistake that the published code or its readers made, planted: the gates must see each one.

A mutant changes one thing in the right implementation; its logits beyond the window must then be far off, and the
gate that compares forms (test_recursion.py) fails at 1e-6.
"""

import math

import pytest
import torch

from fathom.kvcache import compress_in_training
from fathom.kvcache.attention import Compression
from fathom.kvcache.average import Average
from fathom.kvcache.freqkv import FreqKV
from fathom.kvcache.memory import Memory
from fathom.kvcache.method import Method
from fathom.models.axes.numerics import widen

from .cases import LENGTH, SCHEDULE, F, L, N, S, cache_of, cached, model_of, tokens

FAR = 0.1  # in logits whose standard deviation is about 0.5; right forms agree to 1e-11


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3", torch.float64)


@pytest.fixture(scope="module")
def ids():
    return tokens(1, LENGTH)


@pytest.fixture(scope="module")
def truth(model, ids):
    return cached(model, ids, cache_of(model))


def build_as(change):
    return lambda patch: patch.setattr(FreqKV, "build", staticmethod(change(FreqKV.build)))


def scaled(power):
    return build_as(lambda build: lambda kept, m, *dtype: build(kept, m, *dtype) * math.sqrt(kept / m) ** power)


def with_sinks_transformed(patch):
    def compress(self, held, first, compressions):
        c = FreqKV.build(S + L, N).to(held.keys)
        bare = held.rotation.turn(widen(held.keys), 0, -1)
        return held.rotation.turn(c @ bare, F), c @ held.values

    patch.setattr(Method, "compress", compress)


def after_rope(patch):
    def condense(self, held):
        return self.reduce(held.keys[:, :, S:]), self.reduce(held.values[:, :, S:])

    patch.setattr(FreqKV, "condense", condense)


def survivors_moved_by(places):
    def plant(patch):
        right = Method.compress

        def compress(self, held, first, compressions):
            keys, values = right(self, held, first, compressions)
            return held.rotation.turn(keys, places - F, 0), values

        patch.setattr(Method, "compress", compress)

    return plant


def keys_at_entries_and_queries_at_tokens(patch):
    """The sink cache's mistake: all keys are stored at local indices, and queries come at true positions."""
    right = Memory.update

    def update(self, keys, values, *args, **kwargs):
        keys, values = right(self, keys, values)
        return self.rotation.turn(keys, -(self.seen - keys.shape[2]), 0), values

    patch.setattr(Memory, "update", update)


def average_instead(patch):
    patch.setattr(FreqKV, "build", staticmethod(Average.build))


CACHE_MUTANTS = {
    "factor missing": scaled(-1),
    "factor twice": scaled(1),
    "sinks transformed": with_sinks_transformed,
    "compressed after RoPE": after_rope,
    "survivors not moved": survivors_moved_by(0),
    "survivors moved by F - 1": survivors_moved_by(F - 1),
    "queries absolute, keys local": keys_at_entries_and_queries_at_tokens,
    "average instead of the DCT": average_instead,
}


@pytest.mark.parametrize("name", CACHE_MUTANTS)
def test_mutants_of_the_cache(name, model, ids, truth, monkeypatch):
    CACHE_MUTANTS[name](monkeypatch)
    wrong = cached(model, ids, cache_of(model))
    assert torch.equal(wrong[:, :N], truth[:, :N])
    assert (wrong - truth)[:, N:].abs().max() > FAR


def top_left(self, queries, keys, like):
    return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril()


def ones_over_memory(self, queries, keys, like):
    lowest = torch.finfo(like.dtype).min
    mask = torch.full((1, 1, queries, keys), lowest, dtype=like.dtype).triu(keys - queries + 1)
    mask[..., : keys - queries] = 1.0
    return mask


def whole_sequence_at_once(self, module, query, key, value, scaling, **kwargs):
    """Replaces everything beyond the sinks by a low-passed copy of itself, the future included."""
    m = key.shape[2] - S
    c = FreqKV.build(m // 2, m).to(key)
    keys = torch.cat([key[:, :, :S], (c.T @ c * 2) @ key[:, :, S:]], 2)
    values = torch.cat([value[:, :, :S], (c.T @ c * 2) @ value[:, :, S:]], 2)
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=True).transpose(1, 2)


TRAINING_MUTANTS = {
    "top-left mask": ("_mask", top_left),
    "ones over the memory": ("_mask", ones_over_memory),
    "whole sequence at once": ("attend", whole_sequence_at_once),
}


@pytest.mark.parametrize("name", TRAINING_MUTANTS)
@torch.no_grad()
def test_mutants_of_training(name, model, ids, truth, monkeypatch):
    monkeypatch.setattr(Compression, *TRAINING_MUTANTS[name])
    changed = ids.clone()
    changed[:, 100] = 3 + (ids[:, 100] + 1) % 50
    with compress_in_training(model, **SCHEDULE):
        wrong, after = model(ids).logits, model(changed).logits
    assert (wrong - truth)[:, N:].abs().max() > FAR
    if name == "whole sequence at once":  # it fails the gates of causality and of the first window too
        assert (wrong - truth)[:, :N].abs().max() > FAR
        assert (wrong - after)[:, :100].abs().max() > 1e-3


def test_right_forms_pass(model, ids, truth):
    """The control of the controls."""
    assert torch.equal(cached(model, ids, cache_of(model)), truth)
    with compress_in_training(model, **SCHEDULE), torch.no_grad():
        assert (model(ids).logits - truth).abs().max() < 1e-11
