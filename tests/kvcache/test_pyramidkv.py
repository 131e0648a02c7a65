"""PyramidKV: the budgets of the paper, what each layer keeps, and layers of different lengths under one mask."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from fathom.kvcache import PyramidKV, build_cache, cache_bytes, compressed, observe
from fathom.kvcache.observe import fitted
from fathom.kvcache.rope import Rope
from fathom.kvcache.schedule import Once

from .cases import S, cached, model_of, tokens

T, W = 60, 4
GIVEN = dict(ratio=0.4, sinks=S, observed=W)


def test_budgets():
    model = model_of("llama")
    rope = Rope(model.config)
    method = PyramidKV(Once(1000, 4, 196), rope, observed=32)
    budgets = method.budgets(8)
    assert sum(budgets) == 8 * 196 and budgets == sorted(budgets, reverse=True)
    mean = 196 - 32
    assert abs(budgets[0] - 32 - (2 * mean - mean / 20)) <= 1 and abs(budgets[-1] - 32 - mean / 20) <= 1
    steps = {a - b for a, b in pairwise(budgets)}
    assert max(steps) - min(steps) <= 2
    large = PyramidKV(Once(1000, 4, 796), rope, observed=32).budgets(8)  # the first layer cannot keep twice the mean
    assert sum(large) == 8 * 796 and large[0] <= 995
    assert PyramidKV(Once(1000, 4, 196), rope, observed=32, beta=1.0).budgets(3) == [196] * 3
    assert method.budgets(1) == [196]


@torch.no_grad()
def test_each_layer_keeps_the_entries_of_its_budget():
    model, ids = model_of("llama", attn_implementation="eager"), tokens(2, T)
    with compressed(model, PyramidKV, **GIVEN):
        cache = model(ids).past_key_values
    read = model(ids, output_attentions=True)
    assert len({layer.entries for layer in cache.layers}) == len(cache.layers)
    assert sum(layer.entries for layer in cache.layers) == 24 * len(cache.layers)
    for layer, whole, weights in zip(cache.layers, read.past_key_values.layers, read.attentions, strict=True):
        votes = weights[:, :, -W:].unflatten(1, (2, -1)).mean((2, 3))[..., :-W]
        votes = F.pad(F.avg_pool1d(votes, 5, stride=1, padding=2), (0, W), value=torch.inf)
        votes[..., :S] = torch.inf
        best = votes.topk(layer.entries, dim=-1).indices.sort(-1).values
        values = whole.values.gather(2, best.unsqueeze(-1).expand(*best.shape, whole.values.shape[-1]))
        assert torch.allclose(layer.values, values, atol=1e-5)


@torch.no_grad()
def differences(model, question):
    """Several tokens at once beside those one by one, and a padded row beside itself alone, by tokens a pass."""
    ids, mask = tokens(2, T), torch.ones(2, T, dtype=torch.long)
    mask[0, :13] = 0
    with compressed(model, PyramidKV, **GIVEN):
        cache = model(ids).past_key_values
        padded = model(ids, attention_mask=mask).past_key_values
        alone = model(ids[:1, 13:]).past_key_values
    together = model(question, past_key_values=cache.branch()).logits
    yield together - cached(model, question, cache.branch(), 1)
    for size in (9, 1):
        together = cached(model, question, padded.branch(), size)[:1]
        yield together - cached(model, question[:1], alone.branch(), size)


@torch.no_grad()
@pytest.mark.quick("llama")
@pytest.mark.parametrize("case", ["llama", "gpt_oss", "loop"])
def test_layers_of_different_lengths_under_one_mask(case):
    model, question = model_of(case), tokens(2, 9, seed=4)
    assert max(apart.abs().max() for apart in differences(model, question)) < 1e-4
    with compressed(model, PyramidKV, **GIVEN):
        cache = model(tokens(2, T)).past_key_values
    with compressed(model, "snapkv", **GIVEN):
        even = model(tokens(2, T)).past_key_values
    assert cache_bytes(even) == cache_bytes(cache)
    assert (
        model(question, past_key_values=even).logits - model(question, past_key_values=cache).logits
    ).abs().max() > 1e-2


def from_the_left(mask, key):
    return mask[..., : key.shape[2]]


def without_padding(mask, key):
    return mask[..., mask.shape[-1] - key.shape[2] :]


def padding_on_the_right(mask, key):
    right = fitted(mask, key)
    lengths = vars(key).get("lengths")
    return right if lengths is None else right.flip(-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seen"), [(from_the_left, (0, 1, 2)), (without_padding, (1, 2)), (padding_on_the_right, (1, 2))]
)
def test_faulty_masks_are_seen(fault, seen, monkeypatch):
    """Each of them in the comparisons that it concerns."""
    monkeypatch.setattr(observe, "fitted", fault)
    found = [float(apart.abs().max()) for apart in differences(model_of("llama"), tokens(2, 9, seed=4))]
    assert all((found[place] > 1e-2) == (place in seen) for place in range(3)), found


def test_what_is_refused():
    model = model_of("llama")
    with pytest.raises(ValueError, match="pyramidkv compresses a prompt once"):
        build_cache(model, PyramidKV, window=64)
    with pytest.raises(ValueError, match="beta must be at least 1"):
        PyramidKV(Once(100, 4, 40), Rope(model.config), beta=0.5)
