"""Prompts compressed while a model is used as always, and caches that branch."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

from fathom.kvcache import METHODS, MemoryCache, Once, UntunedWarning, build_cache, cache_bytes, compressed

from .cases import cache_of, cached, model_of, tokens

GREEDY = dict(do_sample=False, max_new_tokens=12)


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


def by_hand(model, prompt, method, **options):
    """The same from a cache whose window is the prompt."""
    n = prompt.shape[1]
    cache = build_cache(model, method, window=n, sinks=4, kept=n // 2 - 4, **options)
    return model.generate(prompt, past_key_values=cache, **GREEDY)


@pytest.mark.quick("average", "freqkv", "snapkv")
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("sinks", "learned")])
def test_the_ratio_is_a_share_of_the_prompt(model, method):
    prompt = tokens(2, 90)
    plain = model.generate(prompt, **GREEDY)
    with compressed(model, method, ratio=0.5):
        found = model.generate(prompt, return_dict_in_generate=True, **GREEDY)
    assert isinstance(found.past_key_values, MemoryCache)
    assert found.past_key_values.entries == 45 + 11
    assert torch.equal(found.sequences, by_hand(model, prompt, method))
    assert torch.equal(model.generate(prompt, **GREEDY), plain)  # nothing stays


@pytest.mark.parametrize("while_decoding", [False, True])
def test_rows_of_different_lengths(model, while_decoding):
    """Each keeps a share of its own prompt, and what is too short stays whole."""
    ids, mask = tokens(3, 90), torch.ones(3, 90, dtype=torch.long)
    mask[1, :40], mask[2, :85] = 0, 0
    with compressed(model, "tova", ratio=0.5, while_decoding=while_decoding):
        together = model.generate(ids, attention_mask=mask, **GREEDY)[:, 90:]
        for row, length, text in zip(ids, (90, 50, 5), together, strict=True):
            assert torch.equal(model.generate(row[None, -length:], **GREEDY)[0, length:], text)


def test_once_and_again(model):
    prompt, options = tokens(1, 20), dict(do_sample=False, max_new_tokens=40, return_dict_in_generate=True)
    with compressed(model, "tova", ratio=0.5):
        once = model.generate(prompt, **options).past_key_values
    with compressed(model, "tova", ratio=0.5, while_decoding=True):
        again = model.generate(prompt, **options).past_key_values
    assert (once.compressions, once.entries) == (1, 10 + 39)
    assert again.compressions == 4 and again.entries <= 20
    assert isinstance(once.schedule, Once)


def test_a_short_prompt_is_left_alone(model):
    with compressed(model, "tova"):
        found = model.generate(tokens(1, 5), return_dict_in_generate=True, **GREEDY)
    assert type(found.past_key_values) is DynamicCache


def test_what_has_no_cache_or_one_of_its_own_is_left_alone(model):
    ids, own = tokens(1, 80), cache_of(model, "drop")
    with compressed(model, "tova"), torch.no_grad():
        assert model(ids, use_cache=False).past_key_values is None
        assert model(ids, past_key_values=own).past_key_values is own
        filled = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=filled)
        with compressed(model, "tova"):
            assert model(ids[:, :3], past_key_values=filled).past_key_values is filled


def test_it_ends_with_the_block_whatever_happens(model):
    hooks = dict(model.model._forward_pre_hooks)
    with pytest.raises(KeyError), compressed(model, "tova"):
        raise KeyError
    assert dict(model.model._forward_pre_hooks) == hooks
    for wrong, words in ((dict(method="full"), "method must be one of"), (dict(ratio=1.5), "ratio must lie between")):
        with pytest.raises(ValueError, match=words), compressed(model, **wrong):
            pass


@torch.no_grad()
def test_one_context_and_many_questions(model):
    """Branches share what was read, do not disturb one another, and answer as if each had read the context itself."""
    context, questions = tokens(1, 100), [tokens(1, n, seed=n) for n in (9, 30, 70)]
    for method in ("tova", "freqkv"):
        read = cache_of(model, method)
        cached(model, context, read)
        held = [(layer.keys.data_ptr(), layer.keys.clone()) for layer in read.layers]
        for question in questions:
            branch = read.branch()
            assert all(a.keys.data_ptr() == b.keys.data_ptr() for a, b in zip(branch.layers, read.layers, strict=True))
            a = model(question, past_key_values=branch).logits
            alone = cache_of(model, method)
            cached(model, context, alone)
            assert torch.equal(a, model(question, past_key_values=alone).logits)
            asked = torch.cat([context, question], 1)
            model.generate(asked, past_key_values=read.branch(), **GREEDY)
        assert read.seen == 100
        for layer, (place, keys) in zip(read.layers, held, strict=True):
            assert layer.keys.data_ptr() == place and torch.equal(layer.keys, keys)


def test_a_context_read_within_the_block_answers_questions(model):
    context, question = tokens(1, 100), tokens(1, 7, seed=5)
    with compressed(model, "snapkv", ratio=0.25), torch.no_grad():
        read = model(context).past_key_values
        answers = [
            model.generate(torch.cat([context, question], 1), past_key_values=read.branch(), **GREEDY) for _ in range(2)
        ]
    assert torch.equal(*answers) and read.entries == 100


def test_branches_of_quantised_caches(model):
    read = cache_of(model, "drop", quantized="fp8")
    cached(model, tokens(1, 80), read)
    held = cache_bytes(read)
    cached(model, tokens(1, 5), read.branch())
    assert cache_bytes(read) == held and read.seen == 80


def test_caches_die_with_their_last_reference(model):
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        with compressed(model, "snapkv"):
            found = model.generate(tokens(1, 60), return_dict_in_generate=True, **GREEDY).past_key_values
        keys = [weakref.ref(layer.keys) for layer in found.layers]
        branch = found.branch()
        del found, branch
        assert not any(key() is not None for key in keys)
    finally:
        gc.enable()


MIXES = {
    **dict.fromkeys(("freqkv", "average", "learned", "orthogonal"), True),
    **dict.fromkeys(("drop", "expected_attention", "key_norm", "keydiff", "sinks", "snapkv", "tova"), False),
}
"""Whether a method mixes entries; one of a reader's own may do either."""


@pytest.mark.parametrize("method", METHODS)
def test_who_warns(model, method, recwarn):
    """Methods that mix entries need tuned weights, and say so; those that choose do not."""
    cache = build_cache(model, method, window=64)
    warned = [str(one.message) for one in recwarn if one.category is UntunedWarning]
    assert bool(warned) == cache.method.needs_tuning == MIXES.get(method, cache.method.needs_tuning)
    if warned:
        assert warned == [
            f"this checkpoint was not tuned under compression; past 64 tokens expect poor output from {method}"
        ]


def test_a_tuned_model_does_not_warn(model, recwarn):
    tuned = model_of("llama")
    tuned.config.kvcache = dict(method="freqkv", window=64, sinks=4, ratio=0.5, kept=None)
    build_cache(tuned, "freqkv", window=64)
    assert not recwarn
    build_cache(tuned, "freqkv", window=32)
    assert "was tuned for freqkv, window 64, sinks 4, ratio 0.5; past 32 tokens" in str(recwarn.pop().message)
