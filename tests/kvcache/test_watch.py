"""What only the hook can see, each with its message; and that nothing else is stopped."""

import threading

import pytest
import torch
from transformers import DynamicCache

from fathom.kvcache import build_cache, compress_in_training, prefill, watch

from .cases import LINEAR, SCHEDULE, cache_of, cached, model_of, tokens

CASES = ["qwen3", "fathom"]


@pytest.fixture(scope="module", params=CASES)
def model(request):
    return model_of(request.param)


def padded():
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def test_padding(model):
    """On the left in a cache (test_padded.py), on the right in training."""
    ids, left, right = tokens(2, 20), padded(), padded().flip(1)
    with pytest.raises(ValueError, match="pad sequences on the left, in the first forward pass only"):
        prefill(model, ids, cache_of(model), attention_mask=right)
    with compress_in_training(model, **SCHEDULE):
        with pytest.raises(ValueError, match="in training, pad sequences on the right"):
            model(ids, attention_mask=left)
        model(ids, attention_mask=right)


def test_a_prompt_with_the_pad_token(model):
    """`generate` infers padding from it; that must not pass silently, and the advice must work."""
    prompt = tokens(1, 20)
    prompt[0, 5] = model.config.pad_token_id
    with pytest.raises(ValueError, match=r"attention_mask=torch.ones_like\(input_ids\)"):
        model.generate(prompt, past_key_values=cache_of(model), max_new_tokens=2)
    mask = torch.ones_like(prompt)
    done = model.generate(prompt, attention_mask=mask, past_key_values=cache_of(model), max_new_tokens=2)
    assert done.shape == (1, 22)


def test_a_mask_of_the_callers_own(model):
    with pytest.raises(ValueError, match="makes its own causal mask"):
        mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
        model(tokens(1, 20), attention_mask=mask, past_key_values=cache_of(model))


def test_packed_rows(model):
    positions = torch.tensor([[*range(12), *range(8)]])
    with pytest.raises(ValueError, match="do not pack documents"):
        model(tokens(1, 20), position_ids=positions, past_key_values=cache_of(model))
    with compress_in_training(model, **SCHEDULE), pytest.raises(ValueError, match="do not pack documents"):
        model(tokens(1, 20), position_ids=positions)


def test_positions_that_leave_a_gap(model):
    cache = cache_of(model)
    model(tokens(1, 20), past_key_values=cache)
    with pytest.raises(ValueError, match="do not continue the 20 tokens"):
        model(tokens(1, 1), position_ids=torch.tensor([[25]]), past_key_values=cache)
    model(tokens(1, 1), position_ids=torch.tensor([[20]]), past_key_values=cache)
    with pytest.raises(ValueError, match="do not continue the 0 tokens"):
        rows = torch.tensor([[0], [5]])
        model(tokens(2, 1), position_ids=rows, past_key_values=cache_of(model))


def test_rows_may_change_between_calls(model):
    """Positions given for two rows, then for one of them."""
    cache, ids = cache_of(model), tokens(2, 20)
    model(ids, position_ids=torch.arange(20).expand(2, -1), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1]))
    model(ids[1:, :1], position_ids=torch.tensor([[20]]), past_key_values=cache)


def test_a_mask_by_position():
    """Called with plain arguments, the decoder's mask is seen too."""
    decoder = model_of("qwen3").model
    with pytest.raises(ValueError, match="pad sequences on the left"):
        decoder(tokens(2, 20), padded().flip(1), past_key_values=build_cache(decoder, **SCHEDULE))


def test_a_cache_under_the_training_attention(model):
    cache = cache_of(model)
    with compress_in_training(model, **SCHEDULE):
        with pytest.raises(ValueError, match=r"stop\(\) of that compression before you use a cache"):
            model(tokens(1, 20), past_key_values=cache)
        plain = DynamicCache(config=model.config)
        model(tokens(1, 20), past_key_values=plain)
        with pytest.raises(ValueError, match="compression for training cannot be used with a cache"):
            model(tokens(1, 1), past_key_values=plain)


def test_a_cache_from_a_configuration():
    """Its model must be watched first: by `watch`, or by `prefill`."""
    model, ids = model_of("qwen3"), tokens(1, 100)
    cache = build_cache(model.config, **SCHEDULE)
    with pytest.raises(RuntimeError, match=r"call fathom.kvcache.watch\(model\) once"):
        model(ids[:, :20], past_key_values=cache)
    watch(model)
    again = build_cache(model.config, **SCHEDULE)
    assert torch.equal(cached(model, ids, again), cached(model, ids, cache_of(model)))
    other = model_of("qwen3")
    prefill(other, ids, build_cache(other.config, **SCHEDULE))


@torch.no_grad()
def test_passes_of_two_threads(model):
    """The first ends its last piece while the second is within its first one: each joins pieces of its own."""
    ids, began, ended = tokens(1, 70), threading.Event(), threading.Event()
    alone = cached(model, ids, cache_of(model, "snapkv"))
    found, passes = {}, []

    def wait(*_):
        if threading.current_thread() is other:
            began.set()
            assert ended.wait(20)
            return
        passes.append(None)
        if len(passes) == 2:
            other.start()
            assert began.wait(20)

    def read(name):
        with torch.no_grad():
            found[name] = model(ids, past_key_values=cache_of(model, "snapkv")).logits
        ended.set()

    other = threading.Thread(target=read, args=("other",))
    handle = model.model.layers[1].register_forward_pre_hook(wait)
    read("this")
    other.join()
    handle.remove()
    assert all(torch.equal(found[name], alone) for name in ("this", "other"))
    assert model.config._attn_implementation == "sdpa"


def test_one_hook_for_any_number_of_caches():
    model = model_of("qwen3")
    for _ in range(3):
        cache_of(model)
    assert len(model.model._forward_pre_hooks) == 1


def test_other_calls_pass(model):
    """Padding without a compressed cache is none of our business."""
    cache_of(model)
    model(tokens(2, 20), attention_mask=padded())
    model(tokens(2, 20), attention_mask=padded(), past_key_values=DynamicCache(config=model.config))


OTHERS = [dict(rope_parameters=LINEAR), dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))]


@pytest.mark.parametrize("other", OTHERS, ids=["scaled", "another base"])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "not watched"])
def test_a_cache_for_a_model_of_other_angles(other, watched):
    """Within the first window nothing would tell; beyond it every logit would be wrong."""
    mine, theirs = model_of("llama"), model_of("llama", **other)
    if watched:
        cached(theirs, tokens(1, 20), cache_of(theirs))
    words = "built for a model with other RoPE angles" if watched else "not the one that the cache was built from"
    with pytest.raises((ValueError, RuntimeError), match=words):
        cached(theirs, tokens(1, 20), cache_of(mine))
    with pytest.raises(ValueError, match="built for a model with other RoPE angles"):
        prefill(theirs, tokens(1, 20), cache_of(mine))


def test_a_cache_for_a_model_of_the_same_angles():
    """Other weights, same angles: the tuned model may read with the cache of its base."""
    mine, theirs = model_of("llama"), model_of("llama", seed=3)
    found = cached(theirs, tokens(1, 100), cache_of(theirs))
    assert torch.equal(cached(theirs, tokens(1, 100), cache_of(mine)), found)
