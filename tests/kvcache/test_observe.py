"""The backend that shows queries: it shows the right ones and changes nothing."""

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.inference.by_rows import attend_by_rows
from fathom.kvcache import compress_in_training
from fathom.kvcache.observe import observed_backend
from tests.models.hosts.cases import ours_of, theirs_of

from .cases import SCHEDULE, cache_of, cached, model_of, tokens


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("case", ["qwen3", "fathom"])
@torch.no_grad()
def test_the_model_stays_as_it_was(case, backend):
    """Before, between, and after forward passes, and after one that fails."""
    model, ids = model_of(case, attn_implementation=backend), tokens(2, 150)
    before = model(ids).logits
    cache = cache_of(model, "snapkv")
    assert model.config._attn_implementation == backend
    first = model(ids[:, :50], past_key_values=cache).logits
    assert torch.equal(first, cached(model, ids[:, :50], cache_of(model, "drop")))
    model(ids[:, 50:], past_key_values=cache)
    assert model.config._attn_implementation == backend
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((2, 90), 10**6), past_key_values=cache)
    assert model.config._attn_implementation == backend
    assert torch.equal(model(ids).logits, before)


def test_the_last_queries_are_kept():
    """As attention sees them: turned, and scaled."""
    model, ids = model_of("qwen3"), tokens(2, 50)
    cache = cache_of(model, "snapkv", observed=5)
    seen = []
    layer = model.model.layers[0].self_attn
    layer.q_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    cached(model, ids, cache, 16)
    queries = torch.cat(seen, 1).transpose(1, 2)  # [B, H, T, D], not turned
    truth = cache.method.rope.plan[0].turn(queries, 0)[:, :, -5:] * layer.scaling
    assert (cache.layers[0].queries - truth).abs().max() < 1e-6


def wrapped(function):
    """As kvpress wraps every attention function when it is imported: dropout goes by its place."""

    def wrapper(module, query, key, value, attention_mask, dropout, **kwargs):
        return function(module, query, key, value, attention_mask, dropout, **kwargs)

    return wrapper


def all_attentions() -> list[torch.Tensor]:
    """Logits through every attention function that Fathom registers."""
    ids = tokens(2, 90)
    model = model_of("llama", attn_implementation="eager")
    found = [cached(model, ids, cache_of(model, "snapkv"))]
    model = model_of("loop")
    found += [cached(model, ids, cache_of(model, "snapkv"))]
    with compress_in_training(model, "drop", **SCHEDULE):
        found += [model(ids).logits]
    attend_by_rows(model)
    return [*found, model(ids).logits, ours_of(theirs_of("olmo"), depth_mixer="depth_attention")(ids).logits]


@torch.no_grad()
def test_wrapped_attention_functions(monkeypatch):
    """A wrapper that gives dropout by its place changes nothing, whatever attends."""
    before = all_attentions()
    for name, function in list(ALL_ATTENTION_FUNCTIONS.items()):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, wrapped(function))
    assert all(torch.equal(a, b) for a, b in zip(before, all_attentions(), strict=True))


def test_other_backends_are_refused():
    model = model_of("qwen3")
    model.config._attn_implementation_internal = "paged|sdpa"
    with pytest.raises(ValueError, match=r"under attention 'paged\|sdpa': use sdpa or eager"):
        observed_backend(model)
