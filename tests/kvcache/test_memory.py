"""The cache layer: sizes, rows, resets, copies, and what it refuses."""

import copy
import gc
import weakref

import pytest
import torch

from fathom.kvcache import METHODS

from .cases import LENGTH, N, cache_of, cached, model_of, tokens


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


@pytest.fixture(scope="module")
def ids():
    return tokens(3, LENGTH)


@pytest.mark.quick("freqkv", "sinks", "snapkv")
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_masks_are_told_the_truth(model, method):
    """`get_mask_sizes` is asked before `update` and must foresee it, at every step and for no tokens."""
    cache = cache_of(model, method)
    layer = cache.layers[0]
    cached(model, tokens(1, N - 4), cache)
    for t in range(N - 4, 100):
        for q in (0, 1):
            length, offset = layer.get_mask_sizes(q)
            assert length + offset == t + q
        model(tokens(1, 1, seed=t), past_key_values=cache)
        assert layer.keys.shape[2] == layer.values.shape[2] == length == cache.entries <= N
        assert cache.get_seq_length() == cache.seen == t + 1
    assert cache.get_max_length() == -1 and not cache.is_compileable


def test_longer_chunks_are_foreseen_too(model):
    layer = cache_of(model).layers[0]
    for q in (64, 32, 10, 22):
        length, offset = layer.get_mask_sizes(q)
        keys, _ = layer.update(*torch.randn(2, 1, 2, q, 16))
        assert (keys.shape[2], offset) == (length, layer.seen - length)


@pytest.mark.quick("freqkv", "snapkv")
@pytest.mark.parametrize("method", METHODS)
def test_rows(model, ids, method):
    """Repeated, selected and reordered rows go on as those rows would have."""
    after, rows = tokens(3, 80, seed=9), torch.tensor([0, 2, 1])
    cache, fresh = cache_of(model, method), cache_of(model, method)
    cached(model, ids[:, :100], cache)
    cache.batch_repeat_interleave(2)  # 0 0 1 1 2 2
    cache.batch_select_indices(torch.tensor([2, 1, 5]))
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    cached(model, ids[rows, :100], fresh)
    a, b = cached(model, after[rows], cache), cached(model, after[rows], fresh)
    assert (a - b).abs().max() < 1e-5


@pytest.mark.quick("freqkv", "snapkv")
@pytest.mark.parametrize("method", METHODS)
def test_reset_and_offload(model, ids, method):
    """A cache that was used and reset is a fresh one; one that was offloaded between steps is one that was not."""
    fresh, used, ids = cache_of(model, method), cache_of(model, method), ids[:, :140]
    cached(model, ids[:2], used)
    used.reset()
    assert (used.seen, used.compressions, used.memory_bytes()) == (0, 0, 0)
    used.reset()
    truth = cached(model, ids, fresh)
    assert torch.equal(cached(model, ids, used), truth)

    halves, pieces = cache_of(model, method), []
    for half in (ids[:, :N], ids[:, N:]):
        pieces.append(cached(model, half, halves))
        for layer in halves.layers:
            layer.offload()
            layer.prefetch()
    assert torch.equal(torch.cat(pieces, 1), truth)


def test_copies_go_their_own_ways(model, ids):
    """One prompt, two continuations."""
    cache = cache_of(model)
    cached(model, ids[:, :100], cache)
    branch = copy.deepcopy(cache)
    a = cached(model, ids[:, 100:], branch)
    assert cache.seen == 100
    assert torch.equal(cached(model, ids[:, 100:], cache), a)
    assert branch.method is cache.method  # tables and matrices are not copied


def test_the_whole_window_is_not_kept_alive(model, ids):
    """Sinks are copied, not viewed: a view would hold all N entries of the first window."""
    cache = cache_of(model)
    cached(model, ids[:, : N + 1], cache)
    first = cache.layers[0].first
    assert first.untyped_storage().nbytes() == first.numel() * first.element_size()


@torch.no_grad()
def test_crossing_chunks(model, ids):
    """One forward pass attends to one state: a layer refuses them, and the hook on the model cuts them before that."""
    keys = torch.zeros(1, 2, N + 1, 16)
    layer = cache_of(model).layers[0]
    with pytest.raises(ValueError, match="crosses"):
        layer.update(keys, keys)
    with pytest.raises(ValueError, match="crosses"):
        layer.get_mask_sizes(N + 1)
    assert layer.seen == 0
    cache, other = cache_of(model), cache_of(model)
    for each in (cache, other):
        cached(model, ids[:, :50], each)
    assert torch.equal(model(ids[:, 50:], past_key_values=cache).logits, cached(model, ids[:, 50:], other))


def test_crop(model, ids):
    cache = cache_of(model)
    cached(model, ids[:, :70], cache)
    with pytest.raises(NotImplementedError, match=r"cannot remove tokens: reset\(\) it"):
        cache.crop(-1)
    assert not getattr(cache, "is_croppable", False)


@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_assisted_decoding(model, ids, how):
    options = (
        dict(assistant_model=model_of("qwen3", seed=1)) if how == "assistant" else dict(prompt_lookup_num_tokens=2)
    )
    with pytest.raises(NotImplementedError, match="without assistant_model and prompt_lookup_num_tokens"):
        model.generate(ids[:1, :20], past_key_values=cache_of(model), max_new_tokens=3, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_dropped_cache_is_freed_at_once(model, method):
    """Without the cyclic collector, which does not know how much device memory waits for it."""
    cache = cache_of(model, method)
    cached(model, tokens(1, 70), cache)
    layer = weakref.ref(cache.layers[0])
    gc.disable()
    try:
        del cache
        assert layer() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its layers"])
def test_a_compiled_model_is_refused(whole):
    """It would compile eight times and then run eagerly for good, in silence."""
    model, ids = model_of("fathom"), tokens(1, 20)
    cache = cache_of(model)
    if whole:
        model = torch.compile(model, backend="eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    try:
        with torch.no_grad(), pytest.raises(RuntimeError, match="a compressed cache that grows cannot run under"):
            model(ids, past_key_values=cache, use_cache=True)
    finally:
        torch.compiler.reset()
