"""Prompts of any length, in the pieces that the method needs."""

import pytest
import torch

from fathom.kvcache import build_cache, chunks, prefill

from .cases import cache_of, cached, model_of, tokens


@pytest.fixture(scope="module")
def model():
    return model_of("qwen3")


def test_the_longest_pieces(model):
    cache = cache_of(model)
    assert [piece.shape[1] for piece in chunks(tokens(1, 150), cache)] == [64, 32, 32, 22]
    cached(model, tokens(1, 70), cache)
    assert [piece.shape[1] for piece in chunks(tokens(1, 80), cache)] == [26, 32, 22]
    assert [piece.shape[1] for piece in chunks(tokens(1, 150), build_cache(model, "full"))] == [150]


@torch.no_grad()
def test_a_full_cache_reads_as_the_model(model):
    ids = tokens(2, 150)
    full = prefill(model, ids, build_cache(model, "full"))
    assert full.logits.shape[:2] == (2, 1)
    assert torch.equal(full.logits, model(ids, logits_to_keep=1).logits)


@pytest.mark.quick("freqkv-gemma3-window", "snapkv-qwen3")
@pytest.mark.parametrize("case", ["qwen3", "loop", "gemma3-window"])
@pytest.mark.parametrize("method", ["freqkv", "snapkv"])
def test_plain_generate_reads_a_prompt_of_any_length(case, method):
    """And a second turn: the cache cuts what it is given."""
    model, prompt = model_of(case), tokens(2, 150)
    cache = cache_of(model, method)
    first = model.generate(prompt, past_key_values=cache, max_new_tokens=10, do_sample=False)
    again = torch.cat([first, tokens(2, 77, seed=9)], 1)
    second = model.generate(again, past_key_values=cache, max_new_tokens=10, do_sample=False)
    alone = cache_of(model, method)
    prefill(model, again[:, :-1], alone)
    assert torch.equal(second, model.generate(again, past_key_values=alone, max_new_tokens=10, do_sample=False))
    assert cache.seen == second.shape[1] - 1


def test_every_hidden_state_of_an_input_that_is_cut(model):
    ids = tokens(2, 150)
    with torch.no_grad():
        whole = model(ids, past_key_values=cache_of(model), output_hidden_states=True)
        embedded = model(inputs_embeds=model.model.embed_tokens(ids), past_key_values=cache_of(model)).logits
        placed = model(ids, position_ids=torch.arange(150)[None] + 7, past_key_values=cache_of(model)).logits
        loss = model(ids, labels=ids, past_key_values=cache_of(model)).loss
    truth = cached(model, ids, cache_of(model))
    assert torch.equal(whole.logits, truth) and torch.equal(embedded, truth)
    assert (placed - truth).abs().max() < 1e-4
    assert {states.shape[1] for states in whole.hidden_states} == {150}
    nats = torch.nn.functional.cross_entropy(truth[:, :-1].mT, ids[:, 1:])
    assert (loss - nats).abs() < 1e-5


def test_nothing_to_read(model):
    with pytest.raises(ValueError, match="at least one token"):
        prefill(model, tokens(1, 0), cache_of(model))


def test_left_padding_is_fine_for_a_full_cache(model):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    prefill(model, tokens(2, 20), build_cache(model, "full"), attention_mask=mask)


def test_it_keeps_no_graph(model):
    assert torch.is_grad_enabled()
    cache = cache_of(model)
    assert not prefill(model, tokens(1, 150), cache).logits.requires_grad
    assert not cache.layers[0].keys.requires_grad


def test_beams_after_it(model):
    """Rows must be multiplied in between, as `Policy.read` does (test_policy.py)."""
    prompt, cache = tokens(1, 70), cache_of(model)
    prefill(model, prompt[:, :-1], cache)
    with pytest.raises(ValueError, match=r"holds 1 sequences, the input has 3: .*batch_repeat_interleave\(num_beams\)"):
        model.generate(prompt, past_key_values=cache, max_new_tokens=2, num_beams=3)


def test_the_whole_prompt_leaves_generate_nothing(model):
    prompt, cache = tokens(1, 100), cache_of(model)
    prefill(model, prompt, cache)
    with pytest.raises(ValueError, match="prefill the prompt without its last token"):
        model.generate(prompt, past_key_values=cache, max_new_tokens=2)
