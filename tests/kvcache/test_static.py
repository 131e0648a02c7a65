"""Buffers that never grow: what decoding computes, in one graph."""

import copy

import pytest
import torch
from transformers import CompileConfig

from fathom.kvcache import METHODS, prefill
from fathom.kvcache.static import StaticCache, StaticMemory

from .cases import N, cache_of, cached, model_of, tokens

BLIND = [name for name in METHODS if name not in ("snapkv", "tova", "expected_attention")]
GREEDY = dict(do_sample=False, max_new_tokens=8)
ONCE = "default", "fail_on_recompile"


@pytest.fixture(scope="module")
def model():
    return model_of("fathom")


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


def distance(a, b):
    return (a - b).abs().max().item()


@pytest.mark.quick("average", "freqkv", "sinks")
@pytest.mark.parametrize("method", BLIND)
def test_it_reads_as_the_cache_that_grows(model, method):
    """Prompts of any length, two turns, and token by token across a compression."""
    ids = tokens(2, 70 if method == "sinks" else 170)
    static, growing = cache_of(model, method, static=True), cache_of(model, method)
    assert isinstance(static, StaticCache) and static.is_compileable
    for part in (ids[:, :-40], ids[:, -40:]):
        assert distance(cached(model, part, static), cached(model, part, growing)) < 1e-5
    after = tokens(2, 10, seed=5)
    assert distance(cached(model, after, static, 1), cached(model, after, growing, 1)) < 1e-5
    assert (static.seen, static.entries, static.compressions) == (growing.seen, growing.entries, growing.compressions)
    assert static.layers[0].keys.shape[2] == N


@torch.no_grad()
def decoded(model, step, ids, cache, start=50):
    """Logits of the tokens from `start` on, one by one; whatever compiles after the first of them fails."""
    prefill(model, ids[:, :start], cache)
    logits = []
    for at in range(start, ids.shape[1]):
        with torch.compiler.set_stance(ONCE[at > start]):
            logits.append(step(ids[:, at : at + 1], past_key_values=cache).logits)
    return torch.cat(logits, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"),
    [("fathom", "eager"), ("llama", "aot_eager"), ("loop+depth_attention", "aot_eager"), ("qwen3", "inductor")],
)
def test_one_graph_for_every_length(case, backend):
    """Over two compressions, and with a second cache, whose first token may not compile either."""
    model, ids = model_of(case), tokens(2, 110)
    truth = cached(model, ids, cache_of(model))[:, 50:]
    step = torch.compile(model, fullgraph=True, backend=backend)
    assert distance(decoded(model, step, ids, cache_of(model, static=True)), truth) < 1e-5
    with torch.compiler.set_stance("fail_on_recompile"), torch.no_grad():
        again = cache_of(model, static=True)
        prefill(model, ids[:, :60], again)
        found = step(ids[:, 60:61], past_key_values=again).logits
    assert distance(found, truth[:, 10:11]) < 1e-5


@pytest.mark.slow
def test_a_graph_that_depends_on_the_length_is_seen(model, monkeypatch):
    """The control: with a number of Python for the place, each token compiles again."""
    monkeypatch.setattr(StaticMemory, "held", lambda self: torch.tensor(self.seen % 7))
    step = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="recompile"):
        decoded(model, step, tokens(1, 54), cache_of(model, static=True))


def test_without_its_compressions_it_differs(model, monkeypatch):
    """A second control: places move back at a compression, over entries that were not compressed."""
    ids = tokens(1, 110)
    truth = cached(model, ids, cache_of(model))
    monkeypatch.setattr(StaticMemory, "_is_due", lambda self, length: False)
    wrong = cached(model, ids, cache_of(model, static=True))
    assert distance(wrong[:, :N], truth[:, :N]) < 1e-5 < 0.05 < distance(wrong[:, N:], truth[:, N:])


@pytest.mark.parametrize("case", ["qwen3", "loop"])
def test_generate(case):
    """`generate` makes the masks of a cache that compiles; with beams it reorders its rows."""
    model, prompt = model_of(case), tokens(2, 90)
    for options in ({}, {"num_beams": 2}):
        made = [
            model.generate(prompt, past_key_values=cache_of(model, static=static), **GREEDY, **options)
            for static in (True, False)
        ]
        assert torch.equal(*made)


@pytest.mark.slow
def test_generate_compiles(model):
    prompt = tokens(1, 60)
    how = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    how._compile_all_devices = True
    made = model.generate(prompt, past_key_values=cache_of(model, static=True), compile_config=how, **GREEDY)
    assert torch.equal(made, model.generate(prompt, past_key_values=cache_of(model), **GREEDY))


def test_copies_and_resets(model):
    ids = tokens(2, 100)
    cache = cache_of(model, static=True)
    truth = cached(model, ids, cache)
    after = tokens(2, 40, seed=5)
    others = cache.branch(), copy.deepcopy(cache)
    found = [cached(model, after, each) for each in (*others, cache)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    cache.reset()
    assert cache.seen == 0 and torch.equal(cached(model, ids, cache), truth)
    assert cache.memory_bytes() == others[0].memory_bytes()  # after 100 tokens and after 140


def test_rows_of_different_lengths_are_refused(model):
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0
    for read in (model, lambda ids, **given: model.generate(ids, max_new_tokens=2, **given)):
        with pytest.raises(ValueError, match="a static cache needs sequences of equal length"):
            read(ids, attention_mask=mask, past_key_values=cache_of(model, static=True))


@pytest.mark.parametrize(
    ("case", "method", "options", "reason"),
    [
        ("qwen3", "tova", {}, "tova looks at queries"),
        ("qwen3", "drop", {"quantized": "fp8"}, "quantized=fp8 stores entries in parts that grow"),
        ("gemma3-window", "drop", {}, "layers that see 20 tokens keep their own cache"),
        ("qwen3", "full", {}, "use 'full_static'"),
    ],
)
def test_what_is_refused(case, method, options, reason):
    with pytest.raises(ValueError, match=f"static=True: .*{reason}"):
        cache_of(model_of(case), method, static=True, **options)


def test_a_prompt_is_not_compiled(model):
    step = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError, match="prefill it with the uncompiled model"), torch.no_grad():
        step(tokens(1, 20), past_key_values=cache_of(model, static=True))
