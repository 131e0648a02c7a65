"""Prompts compressed while a model is used as always, and caches that branch."""

import copy
import gc
import threading
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, StaticCache

from fathom.kvcache import METHODS, MemoryCache, Once, UntunedWarning, build_cache, cache_bytes, compressed
from fathom.kvcache.compressed import NothingCompressedWarning
from fathom.models.axes.cache_name import cache_among

from .cases import cache_of, cached, model_of, tokens
from .test_whole import needs_fp8

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


@pytest.mark.quick("0.29-*", "0.5-12")
@pytest.mark.parametrize("length", [5, 11, 12, 13, 20])
@pytest.mark.parametrize("ratio", [0.4, 0.5, 0.29])
def test_short_prompts(model, length, ratio):
    """The share is rounded down; a prompt of which no more than the sinks would be left stays whole."""
    prompt = tokens(1, length)
    plain = model.generate(prompt, **GREEDY)
    with compressed(model, "tova", ratio=ratio):
        found = model.generate(prompt, return_dict_in_generate=True, **GREEDY)
    left = int(ratio * length)
    assert found.past_key_values.entries == (left if left > 4 else length) + 11
    if left <= 4:
        assert torch.equal(found.sequences, plain)


@torch.no_grad()
@pytest.mark.parametrize("given", [dict(ratio=0.02, sinks=0), dict(sinks=100)])
def test_a_prompt_that_stays_whole_says_so_once(model, given):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with compressed(model, "tova", **given):
            found = [model(tokens(1, length)).past_key_values.entries for length in (40, 45, 300)]
    assert found == [40, 45, 6 if "ratio" in given else 150]
    (one,) = (str(w.message) for w in told if w.category is NothingCompressedWarning)
    assert "a prompt of 40 tokens stays whole" in one


@torch.no_grad()
def test_a_prompt_that_is_compressed_says_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compressed(model, "tova"):
            model(tokens(1, 40))


def test_a_compressed_cache_is_left_alone(model):
    ids, own = tokens(1, 80), cache_of(model, "drop")
    with compressed(model, "tova"), torch.no_grad():
        assert model(ids, past_key_values=own).past_key_values is own
    assert own.method.name == "drop" and own.entries == 48


@torch.no_grad()
def test_a_caller_fills_a_cache(model):
    """kvpress's idiom: a context is read within the block into the caller's cache, and questions are asked outside."""
    context, question = tokens(1, 90), tokens(1, 7, seed=5)
    own, plain = DynamicCache(), DynamicCache(config=model.config)
    with compressed(model, "snapkv"):
        assert model(context, past_key_values=own).past_key_values is own
        returned = model(context).past_key_values
        generated = DynamicCache()
        model.generate(context, past_key_values=generated, **GREEDY)
    model(context, past_key_values=plain)
    assert type(plain) is DynamicCache  # the control: nothing is compressed outside
    assert own.entries == returned.entries == 45 and own.seen == own.get_seq_length() == 90
    assert generated.entries == 45 + 11
    asked = torch.cat([context, question], 1)
    texts = [model.generate(asked, past_key_values=cache, **GREEDY) for cache in (own.branch(), returned, plain)]
    assert torch.equal(texts[0], texts[1]) and own.seen == 90
    assert (model(question, past_key_values=own).logits - model(question, past_key_values=plain).logits).abs().max() > 0


@pytest.mark.slow
def test_a_cache_that_is_not_filled_is_seen(model, monkeypatch):
    """The control of the test above."""
    monkeypatch.setattr(MemoryCache, "take_over", lambda self, own: None)
    with pytest.raises(ValueError, match="were read without compression"):
        test_a_caller_fills_a_cache(model)


@torch.no_grad()
def test_a_cache_that_was_reset_takes_another_prompt(model):
    own = DynamicCache()
    with compressed(model, "tova"):
        for length in (90, 40, 120):
            model(tokens(1, length), past_key_values=own)
            assert (own.entries, own.seen) == (length // 2, length)
            own.reset()


def test_what_would_stay_uncompressed_is_refused(model):
    ids, filled = tokens(1, 80), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=filled)

    class Mine(DynamicCache):
        pass

    wrong = {
        "a StaticCache cannot": dict(past_key_values=StaticCache(config=model.config, max_cache_len=200)),
        "a Mine cannot": dict(past_key_values=Mine()),
        "an offloaded cache cannot": dict(past_key_values=offloaded()),
        "holds 80 tokens": dict(past_key_values=filled),
        "use_cache=False keeps nothing": dict(use_cache=False),
    }
    with compressed(model, "tova"), torch.no_grad():
        for words, given in wrong.items():
            with pytest.raises(ValueError, match=words):
                model(ids, **given)
        for given in (dict(cache_implementation="static"), dict(use_cache=False)):
            with pytest.raises(ValueError, match="compressed: "):
                model.generate(ids, **given, **GREEDY)
        model.train()
        with pytest.raises(ValueError, match="training mode"):
            model(ids)
        model.eval()
    assert model(ids, use_cache=False).past_key_values is None  # the control: outside all of it is allowed
    model.generate(ids, cache_implementation="static", **GREEDY)


def offloaded():
    cache = DynamicCache()
    cache.offloading = True
    return cache


@pytest.mark.parametrize("sinks", [0, 1, 2, 4])
@pytest.mark.parametrize("while_decoding", [False, True])
def test_a_model_that_was_just_opened(sinks, while_decoding):
    """The question which layers rotate is asked before anything is compressed."""
    for ratio in (0.25, 0.5, 0.8, 0.9):
        model = model_of("llama", num_hidden_layers=1)
        with compressed(model, "tova", ratio=ratio, sinks=sinks, while_decoding=while_decoding), torch.no_grad():
            assert model(tokens(1, 40)).past_key_values.entries == int(40 * ratio)


@torch.no_grad()
@pytest.mark.quick("snapkv", "expected_attention", "freqkv")
@pytest.mark.parametrize("method", ["snapkv", "tova", "expected_attention", "key_norm", "freqkv", "drop"])
def test_a_context_is_compressed_while_it_is_read(model, monkeypatch, method):
    """Layer by layer, once: then it is small, and questions are answered from it as from a rolling cache."""
    context, question, held, made = tokens(1, 100), tokens(1, 9, seed=3), [], []
    with compressed(model, method, ratio=0.25):
        model(context)  # a method is tried on a few tokens once in a process
    compress = METHODS[method].compress
    monkeypatch.setattr(METHODS[method], "compress", lambda *given: made.append(1) or compress(*given))

    def look(module, args, kwargs, output):
        cache = cache_among(kwargs)
        held.append([layer.keys.shape[2] if layer.is_initialized else 0 for layer in cache.layers])

    hooks = [layer.self_attn.register_forward_hook(look, with_kwargs=True) for layer in model.model.layers]
    with compressed(model, method, ratio=0.25):
        read = model(context).past_key_values
    for hook in hooks:
        hook.remove()
    assert held == [[25, 0, 0], [25, 25, 0], [25, 25, 25]] and len(made) == 3
    entry = 2 * 2 * 16 * 4  # keys and values, two heads, float32
    assert cache_bytes(read) == 3 * 25 * entry
    rolling = build_cache(model, method, window=100, ratio=0.25)
    model(context, past_key_values=rolling)
    assert cache_bytes(rolling) >= 3 * 100 * entry  # the control: it waits for the next token
    for _ in range(3):
        answer = model(question, past_key_values=read.branch()).logits
        assert (answer - model(question, past_key_values=copy.deepcopy(rolling)).logits).abs().max() < 1e-5
    assert len(made) == 3 + 3 * 3  # of the rolling copies


@pytest.mark.quick("16", "89")
@pytest.mark.parametrize("size", [1, 7, 16, 89, 90, 200])
def test_a_prompt_in_chunks(model, size):
    ids, mask = tokens(2, 90), torch.ones(2, 90, dtype=torch.long)
    mask[1, : min(40, size - 1)] = 0
    for given in (mask, torch.ones_like(mask)):
        options = dict(attention_mask=given, return_dict_in_generate=True, **GREEDY)
        with compressed(model, "tova", ratio=0.5):
            whole = model.generate(ids, **options)
            parts = model.generate(ids, prefill_chunk_size=size, **options)
        assert torch.equal(whole.sequences, parts.sequences)
        assert parts.past_key_values.entries == whole.past_key_values.entries == 45 + 11
    assert "generate" not in vars(model)


@pytest.mark.quick("14-gemma3-window")
@pytest.mark.parametrize("case", ["gemma3-window", "gemma2-window", "olmo3-window", "cohere2-window"])
@pytest.mark.parametrize("length", [14, 30])
def test_layers_with_a_window_keep_their_own_cache(case, length):
    """Whatever the length of the prompt: they never hold more than without compression."""
    model, options = model_of(case), dict(do_sample=False, max_new_tokens=24, return_dict_in_generate=True)
    ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
    mask[1, :3] = 0
    plain = model.generate(ids, attention_mask=mask, **options).past_key_values
    with compressed(model, "tova"):
        found = model.generate(ids, attention_mask=mask, **options)
        alone = model.generate(ids[1:, 3:], **options).sequences
    assert torch.equal(found.sequences[1, length:], alone[0, length - 3 :])
    full = 0
    for kind, own, layer in zip(model.config.layer_types, plain.layers, found.past_key_values.layers, strict=True):
        if kind == "sliding_attention":
            assert layer.keys.shape[2] == own.keys.shape[2] <= 19
        else:
            full += layer.entries
    assert full == model.config.layer_types.count("full_attention") * (length // 2 + 23)


def test_a_model_of_which_all_layers_have_a_window():
    model = model_of("mistral-sliding")
    with (
        pytest.raises(ValueError, match="all layers of this model have a sliding window of 64 tokens"),
        compressed(model, "tova"),
    ):
        pass
    with compressed(model, "tova", while_decoding=True):
        found = model.generate(tokens(1, 40), return_dict_in_generate=True, do_sample=False, max_new_tokens=30)
    assert found.past_key_values.entries <= 40


def test_it_ends_with_the_block_whatever_happens(model):
    hooks = dict(model.model._forward_pre_hooks)
    with pytest.raises(KeyError), compressed(model, "tova"):
        raise KeyError
    assert dict(model.model._forward_pre_hooks) == hooks
    for wrong, words in ((dict(method="full"), "method must be one of"), (dict(ratio=1.5), "ratio must lie between")):
        with pytest.raises(ValueError, match=words), compressed(model, **wrong):
            pass


def test_prompts_of_two_threads(model):
    """While one is read in chunks, another thread generates from a shorter one."""
    prompt, other, made = tokens(1, 60), tokens(1, 30, seed=8), []

    def meanwhile(*_):
        if not made:
            made.append(None)
            thread = threading.Thread(target=lambda: made.append(model.generate(other, **GREEDY)))
            thread.start()
            thread.join()

    with compressed(model, "tova", ratio=0.5):
        alone = [model.generate(each, **GREEDY) for each in (prompt, other)]
        handle = model.register_forward_pre_hook(meanwhile)
        found = model.generate(prompt, prefill_chunk_size=16, **GREEDY)
        handle.remove()
    assert torch.equal(found, alone[0]) and torch.equal(made[1], alone[1])


def test_a_block_within_another_is_refused(model):
    """The outer one would win, which nobody asked for."""
    with compressed(model, "tova"):
        with pytest.raises(ValueError, match="block already; a second one"), compressed(model, "drop", ratio=0.25):
            pass
        with compressed(model_of("llama", seed=1), "drop"):  # the control: another model
            pass
    with compressed(model, "drop"):
        pass


def test_a_press_that_was_not_made_a_method_is_refused(model):
    given = SimpleNamespace(compression_ratio=0.5)
    with pytest.raises(ValueError, match=r"no method: .* or press\(…\) of a press"), compressed(model, given):
        pass
    with pytest.raises(ValueError, match="method must be one of"):
        build_cache(model, given, window=64)


@pytest.mark.slow
def test_a_compiled_model_is_refused_in_words(model):
    compiled = torch.compile(model_of("llama"), backend="eager")
    with compressed(compiled, "tova"), pytest.raises(Exception, match=r"cannot run under torch\.compile"):
        compiled(tokens(1, 40))


@pytest.mark.quick("llama-assistant")
@pytest.mark.parametrize("how", ["assistant", "lookup"])
@pytest.mark.parametrize("case", ["llama", "gemma3"])
def test_assisted_decoding_after_a_compressed_prompt(case, how):
    """Guesses stand behind the prompt in the first pass, and are no part of it."""
    model, prompt = model_of(case, torch.float64), tokens(1, 40)
    helper = copy.deepcopy(model)
    with torch.no_grad():
        helper.lm_head.weight.add_(0.01 * torch.randn_like(helper.lm_head.weight))
    given = dict(assistant_model=helper) if how == "assistant" else dict(prompt_lookup_num_tokens=3)
    cache, options = DynamicCache(config=model.config), GREEDY | dict(max_new_tokens=14)
    with compressed(model, "snapkv", ratio=0.4):
        plain = model.generate(prompt, **options)
        assert torch.equal(model.generate(prompt, past_key_values=cache, **given, **options), plain)
        settings = GenerationConfig(**options, **(given if how == "lookup" else {}))
        assert torch.equal(model.generate(prompt, settings, **(given if how == "assistant" else {})), plain)
        for own in (dict(assistant_model=model), dict(assistant_early_exit=1)):
            with pytest.raises(ValueError, match="a model that is its own draft model"):
                model.generate(prompt, **own, **options)
        assert torch.equal(model.generate(prompt, **options), plain)
    assert cache.schedule.window == 40 and cache.entries == cache.seen - 24
    for other in (dict(while_decoding=True), dict(quantized="int8"), dict(window=32)):
        with compressed(model, "snapkv", **other), pytest.raises(NotImplementedError, match="without assistant_model"):
            model.generate(prompt, **given, **options)


@torch.no_grad()
def test_an_answer_may_be_taken_back(model):
    """From a prompt that was compressed once; the prompt itself stays."""
    ids, mask, answer = tokens(3, 90), torch.ones(3, 90, dtype=torch.long), tokens(3, 7, seed=5)
    mask[1, :40], mask[2, :85] = 0, 0
    with compressed(model, "tova", ratio=0.5):
        cache = model(ids, attention_mask=mask).past_key_values
    fresh = cache.branch()
    model(answer, past_key_values=cache)
    cache.crop(-7)
    other = tokens(3, 9, seed=6)
    assert torch.equal(*(model(other, past_key_values=each).logits for each in (cache, fresh)))
    with pytest.raises(NotImplementedError, match="cannot remove tokens"):
        cache.crop(-10)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)
    assert cache.seen == 99


@torch.no_grad()
@pytest.mark.quick("snapkv")
@pytest.mark.parametrize("method", ["snapkv", "drop+int8", "sinks"])
def test_a_window_for_every_input(model, method):
    """Inputs that are scored, and prompts that are continued, are read as through a cache of that window."""
    ids = tokens(2, 90)
    given = {} if method == "sinks" else dict(ratio=0.5)
    cache = build_cache(model, method, window=64, **given)
    alone = model(ids, past_key_values=cache).logits
    with compressed(model, method, window=64, **given):
        assert torch.equal(model(ids).logits, alone) and torch.equal(model(ids).logits, alone)
        done = model.generate(ids, do_sample=False, max_new_tokens=9, return_dict_in_generate=True)
    assert done.past_key_values.compressions == build_cache(model, method, window=64, **given).schedule.compressions(98)
    assert (model(ids).logits - alone)[:, 64:].abs().max() > 1e-2  # the full cache


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
    assert torch.equal(*answers) and read.entries == 25


@needs_fp8
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
