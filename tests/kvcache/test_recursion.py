"""One recursion in four forms: the oracle, the cache in any chunks, token by token, and the training function."""

import pytest
import torch

from fathom.kvcache import METHODS, compress_in_training, prefill

from .cases import LENGTH, MODELS, SCHEDULE, N, cache_of, cached, double_angles, model_of, tokens
from .oracle import Oracle

FEW = (
    "qwen3",
    "qwen3-mha",
    "qwen3-yarn",
    "llama",
    "mistral-sliding",
    "gemma2",
    "mixtral",
    "cohere",
    "gpt_neox",
    "stablelm",
    "smollm3",
    "gemma3-window",
    "exaone4",
)
"""Families that differ in what a cache meets: windows, capped scores, parts of a head that are turned, experts."""
OURS = ("fathom", "depth_attention", "uniform_depth", "value_residual", "loop", "loop+depth_attention")
THEIRS = [case for case in MODELS if case not in OURS]
SCHEDULED = [name for name in METHODS if name != "sinks"]  # sinks goes token by token beyond the window


@torch.no_grad()
def trained(model, ids, method="freqkv", **options):
    with compress_in_training(model, method, **{**SCHEDULE, **options}):
        return model(ids, use_cache=False).logits


def stepped(model, ids, cache):
    """Logits of the first 104 tokens: 56 at once, the others one by one, across two compressions."""
    return torch.cat([cached(model, ids[:, :56], cache), cached(model, ids[:, 56:104], cache, 1)], 1)


def distance(a, b):
    return (a - b).abs().max().item()


@pytest.fixture(scope="module")
def qwen():
    return model_of("qwen3", torch.float64)


@pytest.fixture(scope="module")
def ids():
    return tokens(2, LENGTH)


@pytest.fixture
def exact_angles(monkeypatch):
    double_angles(monkeypatch)


@pytest.mark.quick("fathom-*", "llama-*-freqkv", "qwen3-mha-*-snapkv")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case,limit", [("fathom", 1e-11), ("qwen3-mha", 1e-6), ("llama", 1e-6)])
def test_oracle(exact_angles, case, limit, method):
    """Fathom's norms keep float64; those of the library are float32, whatever the model."""
    model, row = model_of(case, torch.float64), tokens(1, LENGTH)
    truth = torch.from_numpy(Oracle(model, method)(row[0].numpy()))
    assert 0.3 < truth.std() < 3
    assert distance(cached(model, row, cache_of(model, method))[0], truth) < limit
    assert distance(trained(model, row, method)[0], truth) < limit


@pytest.mark.quick("freqkv", "learned")
@pytest.mark.parametrize("method", SCHEDULED)
def test_chunks(qwen, ids, method):
    truth = trained(qwen, ids, method)
    for size in (16, None):
        assert distance(cached(qwen, ids, cache_of(qwen, method), size), truth) < 1e-11, size
    assert distance(stepped(qwen, ids, cache_of(qwen, method)), truth[:, :104]) < 1e-11


@pytest.mark.parametrize("seen", [0, 1, 63, 64, 65, 100, 128])
def test_prefill_from_anywhere(qwen, ids, seen):
    cache = cache_of(qwen)
    if seen:
        cached(qwen, ids[:, :seen], cache)
    with torch.no_grad():
        output = prefill(qwen, ids[:, seen:], cache)
    assert distance(output.logits[:, -1], trained(qwen, ids)[:, -1]) < 1e-11
    assert cache.compressions == 3


@pytest.mark.quick("mistral-sliding", "gemma2", "mixtral")
@pytest.mark.parametrize("case", THEIRS)
def test_every_family(case):
    """In float32: cache in chunks, token by token, and training, and the first window is the stock model's."""
    model, row = model_of(case), tokens(1, 110)
    truth = trained(model, row)
    chunked = cached(model, row, cache_of(model))
    scale = truth.std().item()
    assert 0.1 < scale < 10
    assert distance(chunked, truth) < 1e-5
    assert distance(stepped(model, row, cache_of(model)), truth[:, :104]) < 1e-5
    assert distance(truth[:, N:], model(row).logits[:, N:]) > 0.05 * scale  # it does compress


@pytest.mark.quick("value_residual", "loop+depth_attention")
@pytest.mark.parametrize("case", OURS)
def test_every_mechanism_to_the_last_digits(case):
    """Mixed values are what is stored, so compressing them commutes with reading layers and trips."""
    model, row = model_of(case, torch.float64), tokens(1, 110)
    truth = trained(model, row)
    assert distance(cached(model, row, cache_of(model)), truth) < 1e-11
    assert distance(stepped(model, row, cache_of(model)), truth[:, :104]) < 1e-11
    assert distance(truth[:, N:], model(row).logits[:, N:]) > 0.05 * truth.std()  # it does compress


@pytest.mark.quick(
    "freqkv-qwen3", "freqkv-mistral-sliding", "freqkv-gemma2", "freqkv-gpt_neox", "freqkv-fathom", "freqkv-loop*"
)
@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("method", ["freqkv", "snapkv"])
def test_first_window_is_the_stock_model(case, method):
    model, row = model_of(case), tokens(1, N)
    with torch.no_grad():
        stock = model(row, use_cache=True).logits
    # Products of experts round by how many tokens chose each, and sums over a window by its place in the text.
    rounds = getattr(model.config, "sliding_window", None) == 20 or "moe" in case or case == "mixtral"
    limit = 2e-6 if rounds else 0.0
    assert distance(cached(model, row, cache_of(model, method)), stock) <= limit
    assert distance(trained(model, torch.cat([row, row], 1), method)[:, :N], stock) <= limit


@pytest.fixture(scope="module", params=METHODS)
def two_ways(request, qwen, ids):
    """By the training function and by the cache, each with what it makes of the ids."""
    method = request.param
    ways = (lambda x: trained(qwen, x, method), lambda x: cached(qwen, x, cache_of(qwen, method)))
    return ids[:1], [(run, run(ids[:1])) for run in ways]


@pytest.mark.quick("freqkv-10", "freqkv-64", "freqkv-130", "snapkv-64")  # test_oracle has every method
@pytest.mark.parametrize("token", [10, 63, 64, 65, 100, 127, 128, 130])
def test_causality(two_ways, token):
    ids, ways = two_ways
    changed = ids.clone()
    changed[:, token] = 3 + (ids[:, token] + 1) % 50
    for run, a in ways:
        b = run(changed)
        assert torch.equal(a[:, :token], b[:, :token])
        assert not torch.equal(a[:, token], b[:, token])


@pytest.mark.quick("freqkv", "sinks")
@pytest.mark.parametrize("method", METHODS)
def test_a_common_offset_of_positions_changes_nothing(exact_angles, qwen, ids, method):
    cache, moved = cache_of(qwen, method), cache_of(qwen, method)
    at = 0
    for part in ids[:, :104].split([56, *[1] * 16, 24, *[1] * 8], 1):  # across both compressions token by token
        positions = torch.arange(at, at + part.shape[1]).expand(2, -1)
        with torch.no_grad():
            a = qwen(part, past_key_values=cache).logits
            b = qwen(part, past_key_values=moved, position_ids=1000 + positions).logits
        at += part.shape[1]
        assert distance(a, b) < 1e-6


@pytest.mark.parametrize("compressions", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_half_precision_is_no_worse_than_without_compression(compressions):
    """Error of bf16 against the same weights in float64, beyond the window, as a multiple of the full cache's."""
    half = model_of("qwen3", torch.bfloat16)
    exact = model_of("qwen3", torch.bfloat16).double()
    row = tokens(1, N + 32 * compressions - 5)
    with torch.no_grad():
        full = half(row).logits - exact(row).logits
        for method in ("freqkv", "average", "drop"):
            ours = trained(half, row, method) - trained(exact, row, method)
            chunked = cached(half, row, cache_of(half, method)) - trained(exact, row, method)
            for error in (ours, chunked):
                assert error[:, N:].pow(2).mean().sqrt() < 2 * full[:, N:].pow(2).mean().sqrt(), method


def test_generate_across_rounds(qwen):
    """Greedy decoding after chunked prefill equals recomputing everything at each step."""
    prompt = tokens(1, 120, seed=3)
    cache = cache_of(qwen)
    done = qwen.generate(
        prompt, past_key_values=cache, max_new_tokens=20, do_sample=False, prefill_chunk_size=cache.schedule.chunk
    )
    slow = prompt
    for _ in range(20):
        slow = torch.cat([slow, trained(qwen, slow)[:, -1:].argmax(-1)], 1)
    assert torch.equal(done, slow)
    assert cache.compressions == 3


def test_beam_search(qwen):
    """Beams across a compression equal beam search that recomputes everything, and a plain cache would not have."""
    prompt = tokens(2, 60, seed=3)
    options = dict(max_new_tokens=16, num_beams=3, do_sample=False)
    done = qwen.generate(prompt, past_key_values=cache_of(qwen), **options)
    with compress_in_training(qwen, **SCHEDULE):
        slow = qwen.generate(prompt, use_cache=False, **options)
    assert torch.equal(done, slow)
    assert not torch.equal(done, qwen.generate(prompt, **options))


@pytest.mark.parametrize("method", ["freqkv", "learned", "snapkv"])
def test_gradients_through_cache_and_function(qwen, ids, method):
    row = ids[:1]

    def gradients(logits):
        return torch.autograd.grad(logits.square().mean(), list(qwen.parameters()), allow_unused=False)

    cache = cache_of(qwen, method)
    pieces = [qwen(piece, past_key_values=cache).logits for piece in row.split(32, dim=1)]
    through_cache = gradients(torch.cat(pieces, 1))
    with compress_in_training(qwen, method, **SCHEDULE):
        through_function = gradients(qwen(row, use_cache=False).logits)
    for a, b in zip(through_cache, through_function, strict=True):
        assert distance(a, b) < 1e-6 * max(1, b.abs().max().item())


def test_multi_trip_models_hold_a_memory_per_trip():
    model = model_of("loop")
    cache = cache_of(model)
    cached(model, tokens(1, 100), cache)
    trips = model.config.recurrence_options["trips"]
    assert len(cache.layers) == trips * model.config.num_hidden_layers
    assert len({id(layer.method) for layer in cache.layers}) == 1
    assert all(layer.keys.shape[2] == cache.entries for layer in cache.layers)
