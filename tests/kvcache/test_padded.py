"""Rows of different lengths in one batch: each must be what it is alone."""

import copy

import pytest
import torch

from fathom.kvcache import METHODS, build_cache, prefill
from fathom.kvcache.padded import Padded

from .cases import N, S, cache_of, cached, model_of, tokens

LENGTHS = (110, 70, 5)  # compressed twice, once, and not yet; the last two are compressed again at other tokens
GREEDY = dict(do_sample=False, max_new_tokens=30)


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


def batch(lengths=LENGTHS, more=0):
    """Rows padded on the left and their mask, `[B, T + more]`; the last `more` tokens are common columns."""
    width = max(lengths) + more
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, width - length - more :] = tokens(length + more, seed=10 + i)
        mask[i, width - length - more :] = 1
    return ids, mask


@torch.no_grad()
def stepped(model, ids, mask, cache, steps):
    """Logits of all columns: the last `steps` token by token, the others at once."""
    first = ids.shape[1] - steps
    logits = [model(ids[:, :first], attention_mask=mask[:, :first], past_key_values=cache).logits]
    for at in range(first, ids.shape[1]):
        seen = mask[:, : at + 1]
        logits.append(model(ids[:, at : at + 1], attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(logits, 1)


def distance(model, method, padded, ids, mask):
    """How far each row's logits are from those of the row alone."""
    found = []
    for got, row, real in zip(padded, ids, mask.bool(), strict=True):
        alone = cached(model, row[None, real], cache_of(model, method))[0]
        found.append((got[real] - alone).abs().max())
    return found


@pytest.mark.quick("freqkv", "learned", "sinks", "snapkv")
@pytest.mark.parametrize("method", METHODS)
def test_each_row_is_what_it_is_alone(model, method):
    ids, mask = batch((76, 70, 5) if method == "sinks" else LENGTHS, more=0 if method == "sinks" else 33)
    cache = cache_of(model, method)
    padded = stepped(model, ids, mask, cache, 4 if method == "sinks" else 33)
    assert max(distance(model, method, padded, ids, mask)) < 1e-5
    assert isinstance(cache.memory, Padded) and cache.entries <= N


@pytest.mark.parametrize("case", ["depth_attention", "loop", "llama", "gpt_neox", "gemma3-window"])
def test_models(case):
    model, (ids, mask) = model_of(case), batch(more=2)
    assert max(distance(model, "freqkv", stepped(model, ids, mask, cache_of(model), 2), ids, mask)) < 1e-5


@pytest.mark.parametrize("case", ["qwen3", "llama"])
@pytest.mark.parametrize("lengths", [(20,), (20, 20), (20, 7)])
def test_padding_that_all_rows_have(case, lengths):
    """`padding="max_length"`: the rectangle of entries is then narrower than the query."""
    model, (ids, mask) = model_of(case), batch(lengths)
    ids, mask = (torch.cat((torch.zeros(len(lengths), 10, dtype=torch.long), x), 1) for x in (ids, mask))
    assert max(distance(model, "freqkv", stepped(model, ids, mask, cache_of(model), 2), ids, mask)) < 1e-5


@pytest.mark.parametrize(
    ("columns", "says"), [(15, "expected \\[2, 20\\]"), (25, "expected \\[2, 20\\]"), (0, "all padding")]
)
def test_a_mask_that_says_nothing_of_some_tokens(model, columns, says):
    mask = torch.ones(2, columns or 20, dtype=torch.long)
    mask[0, : 3 if columns else 20] = 0
    with pytest.raises(ValueError, match=says):
        model(tokens(2, 20), attention_mask=mask, past_key_values=cache_of(model))


def test_a_pass_that_was_refused_leaves_no_padding_behind(model):
    (ids, mask), cache = batch((20, 7)), cache_of(model)
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, attention_mask=mask, position_ids=torch.zeros_like(ids), past_key_values=cache)
    assert (
        max(distance(model, "freqkv", stepped(model, ids.flip(0), mask.flip(0), cache, 2), ids.flip(0), mask.flip(0)))
        < 1e-5
    )


def test_padding_that_is_taken_for_text_differs(model):
    """The control: without the mask, padding is compressed with the rows."""
    ids, mask = batch()
    ignored = cached(model, ids, cache_of(model))
    longest, *shorter = distance(model, "freqkv", ignored, ids, mask)
    assert longest < 1e-5 and min(shorter) > 0.1


@pytest.mark.quick("freqkv")
@pytest.mark.parametrize("method", ["freqkv", "tova"])
def test_generate(model, method):
    ids, mask = batch()
    cache = cache_of(model, method)
    made = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY)[:, ids.shape[1] :]
    ahead = cache_of(model, method)
    prefill(model, ids[:, :-1], ahead, attention_mask=mask[:, :-1])
    assert torch.equal(
        model.generate(ids, attention_mask=mask, past_key_values=ahead, **GREEDY)[:, ids.shape[1] :], made
    )
    for row, length, text in zip(ids, LENGTHS, made, strict=True):
        alone = model.generate(row[None, -length:], past_key_values=cache_of(model, method), **GREEDY)
        assert torch.equal(alone[0, length:], text)


def test_beams(model):
    ids, mask = batch((70, 40))
    options = GREEDY | dict(num_beams=3)
    made = model.generate(ids, attention_mask=mask, past_key_values=cache_of(model), **options)[:, 70:]
    for row, length, text in zip(ids, (70, 40), made, strict=True):
        alone = model.generate(row[None, -length:], past_key_values=cache_of(model), **options)
        assert torch.equal(alone[0, length:], text)


@pytest.mark.parametrize("method", ["drop", "drop+int8"])
def test_beams_of_a_row_without_a_token_yet(model, method):
    """`fathom generate` reads all columns but the last, in which a prompt of one token begins."""
    ids, mask = batch((20, 1))
    cache, beams = build_cache(model, method, window=16), dict(num_beams=2, do_sample=False, max_new_tokens=3)
    cache.admit(mask)
    prefill(model, ids[:, :-1], cache)
    cache.batch_repeat_interleave(2)
    made = model.generate(ids, attention_mask=mask, past_key_values=cache, **beams)[:, 20:]
    for row, length, text in zip(ids, (20, 1), made, strict=True):
        alone = model.generate(row[None, -length:], past_key_values=build_cache(model, method, window=16), **beams)
        assert torch.equal(alone[0, length:], text)


@torch.no_grad()
def test_rows_copies_and_resets(model):
    """Rows may be chosen, repeated and branched; an emptied cache takes rows without padding again."""
    ids, mask = batch(more=20)
    cache = cache_of(model)
    stepped(model, ids[:, :-20], mask[:, :-20], cache, 0)
    chosen = torch.tensor([2, 0, 2])
    truth = [cached(model, ids[i, None, mask[i].bool()], cache_of(model))[0, -20:] for i in chosen]
    for other in (cache.branch(), copy.deepcopy(cache)):
        other.batch_select_indices(chosen)
        found = model(ids[chosen, -20:], past_key_values=other).logits  # without a mask: the padding is known
        assert max((a - b).abs().max() for a, b in zip(found, truth, strict=True)) < 1e-5
    one, other = cache.branch(), cache.branch()
    one.reset()
    other.reset()
    for each in (one, other):  # no memory is shared by what two resets leave
        assert torch.equal(cached(model, ids[:1, 40:], each), cached(model, ids[:1, 40:], cache_of(model)))
    cache.batch_repeat_interleave(2)
    assert cache.pads == (0, 0, 40, 40, 105, 105) and cache.seen == 110
    held = sum(cache.schedule.entries(length) for length in (110, 110, 70, 70, 5, 5))
    per_entry = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, width, bytes
    assert cache.memory_bytes() == per_entry * held + per_entry // 2 * 4 * S  # and the sinks of four rows
    cache.reset()
    assert not cache.pads
    assert torch.equal(cached(model, ids[:1, 40:], cache), cached(model, ids[:1, 40:], cache_of(model)))


@pytest.mark.parametrize("where", ["behind a row", "within a row", "between two turns"])
def test_other_padding_is_refused(model, where):
    ids, cache = tokens(2, 20), cache_of(model)
    mask = torch.ones_like(ids)
    if where == "between two turns":
        model(ids[:, :10], past_key_values=cache)
    at = {"behind a row": 19, "within a row": 5, "between two turns": 10}
    mask[0, at[where]] = 0
    with pytest.raises(ValueError, match="pad sequences on the left, in the first forward pass only"):
        model(ids[:, cache.seen :], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("case", ["gemma3-window", "olmo3-window"])
def test_a_layer_that_sees_more_than_a_compression_leaves(case):
    """Layers with a window have a mask of their own: here they see 20 tokens, and a compression leaves 8 entries."""
    model, (ids, mask) = model_of(case), batch(more=2)
    cache = build_cache(model, "tova", window=32, ratio=0.25)
    padded = stepped(model, ids, mask, cache, 2)
    assert any(cache.is_sliding) and cache.schedule.survivors == 8
    for got, row, real in zip(padded, ids, mask.bool(), strict=True):
        alone = cached(model, row[None, real], build_cache(model, "tova", window=32, ratio=0.25))[0]
        assert (got[real] - alone).abs().max() < 1e-5
