"""transformers 5.24 calls the cache `cache`, earlier releases `past_key_values`: every part gets it by its own name."""

import inspect

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3Model

from fathom.kvcache import compressed, prefill
from fathom.models.axes.cache_name import CACHE, by_any_name, passed, returned, with_cache

from .cases import SHAPE, build, config_of, tokens


class Renamed(Qwen3Model):
    """A family that takes `cache`, whatever the installed transformers calls it."""

    def forward(self, input_ids=None, cache=None, attention_mask=None, use_cache=None, **kwargs):
        kwargs.pop("logits_to_keep", None)
        given = {CACHE: cache, "attention_mask": attention_mask, "use_cache": use_cache}
        return super().forward(input_ids, **given, **kwargs)


class Older(Qwen3Model):
    """A family that takes `past_key_values`."""

    def forward(self, input_ids=None, past_key_values=None, attention_mask=None, use_cache=None, **kwargs):
        kwargs.pop("logits_to_keep", None)
        given = {CACHE: past_key_values, "attention_mask": attention_mask, "use_cache": use_cache}
        return super().forward(input_ids, **given, **kwargs)


def family(kind):
    torch.manual_seed(0)
    return kind(Qwen3Config(**SHAPE)).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("mechanism", ["vanilla", "loop", "depth_attention"])
def test_a_model_takes_its_cache_by_either_name(name, mechanism):
    model, ids, cache = build(config_of(mechanism)).eval(), tokens(1, 9), DynamicCache()
    whole = model(ids).logits[:, -1]
    out = [model(part, **{name: cache}, use_cache=True) for part in ids.split([5, 3, 1], 1)][-1]
    torch.testing.assert_close(out.logits[:, -1], whole)
    assert returned(out) is out.past_key_values is cache
    alone = model(ids[:, -1:], use_cache=True).logits[:, -1]
    assert not torch.allclose(alone, whole)  # what an unread cache would give


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ["vanilla", "loop"])
def test_the_backbone_takes_no_cache_by_either_name(mechanism):
    """Guidance of 5.24 passes `cache=None`, which is no engine's."""
    model, ids = build(config_of(mechanism)).model.eval(), tokens(1, 4)
    assert torch.equal(model(ids, cache=None).last_hidden_state, model(ids).last_hidden_state)


def test_two_caches_are_refused():
    with pytest.raises(ValueError, match="cache and past_key_values are one argument"):
        build(config_of("vanilla"))(tokens(1, 4), cache=DynamicCache(), past_key_values=DynamicCache())


def test_a_cache_of_an_engine_stays():
    own = object()
    assert by_any_name(lambda past_key_values=None, **given: (past_key_values, given))(cache=own) == (
        None,
        {"cache": own},
    )


def test_transformers_finds_the_installed_name():
    """`generate` refuses arguments that no signature names."""
    model = build(config_of("vanilla"))
    for method in (model.forward, model.model.forward, model.prepare_inputs_for_generation):
        assert CACHE in inspect.signature(method).parameters
    cache = DynamicCache()
    found = model.eval().generate(tokens(1, 4), max_new_tokens=3, do_sample=False, **{CACHE: cache})
    assert found.shape[1] - 1 == cache.get_seq_length() == 6


def test_a_part_gets_its_cache_by_its_own_name():
    cache = DynamicCache()
    assert passed(family(Renamed), cache) == {"cache": cache}
    assert passed(family(Older), cache) == {"past_key_values": cache}
    assert passed(nn.Sequential(), cache) == {CACHE: cache}  # a wrapper names none
    given = {"input_ids": 1, "cache": None, "past_key_values": None}
    assert with_cache(given, family(Older), cache) == {"input_ids": 1, "past_key_values": cache}


@torch.no_grad()
@pytest.mark.parametrize("kind", [Renamed, Older])
def test_a_prompt_is_compressed_whatever_the_cache_is_called(kind):
    model, ids = family(kind), tokens(1, 40)
    with compressed(model, "snapkv", ratio=0.5):
        read, given = returned(model(ids)), DynamicCache()
        out = prefill(model, ids, given)
        assert returned(out).entries == read.entries == 20
    assert returned(model(ids, use_cache=True)).get_seq_length() == 40  # the control
