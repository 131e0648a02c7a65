"""The published counts, and the arithmetic behind every declared number."""

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from fathom.models import FathomConfig
from fathom.models.cost import (
    cache_bytes_per_token,
    count_parameters,
    flops_per_token,
    mechanism_cost,
    training_flops_per_token,
    training_flops_range,
    training_visits,
)
from fathom.models.decoder.arithmetic import attention_flops, head_flops, layer_flops
from tests.tiny import seeded

from .cases import CASES, build, config_of, tokens

# L, hidden, intermediate, heads, key-value heads, vocabulary, parameters
PAPER = {
    "tiny": (4, 64, 176, 4, 2, 64, 193_216),
    "410m": (32, 1024, 2816, 16, 4, 32_000, 426_316_800),
    "360m": (24, 960, 2540, 15, 15, 50_304, 360_672_192),
    "500m": (24, 1152, 3072, 18, 18, 50_304, 498_165_888),
    "710m": (32, 1280, 3072, 20, 20, 50_304, 716_068_096),
    "1.5b": (48, 1536, 4096, 24, 6, 50_304, 1_343_774_208),
    "3b": (48, 2048, 6912, 32, 8, 50_304, 2_747_998_208),
}


def paper_config(size, **keys):
    layers, hidden, intermediate, heads, kv, vocabulary, _ = PAPER[size]
    return FathomConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        head_dim=16 if size == "tiny" else 64,
        **keys,
    )


@pytest.mark.parametrize("size", PAPER)
def test_published_parameter_counts(size):
    assert count_parameters(paper_config(size)) == PAPER[size][-1]


@pytest.mark.parametrize(
    "keys,added",
    [
        ({"mixer": "depth_attention"}, 0),
        ({"residual": "denseformer"}, 1_224),
        ({"residual": "attention_residuals"}, 397_312),
        ({"residual": "attention_residuals", "residual_options": {"variant": "snapshot"}}, 397_409),
        ({"residual": "hyper_connections"}, 19_663_396),
    ],
)
def test_added_parameters_at_three_billion(keys, added):
    config = paper_config("3b", **keys)
    assert count_parameters(config) - PAPER["3b"][-1] == added == mechanism_cost(config).parameters


@pytest.mark.parametrize(
    "size,flops,io,transient",
    [
        ("360m", 218_880, 264_960, 7_680),
        ("500m", 262_656, 317_952, 9_216),
        ("710m", 394_240, 476_160, 10_240),
        ("1.5b", 179_712, 216_576, 3_072),
        ("3b", 239_616, 288_768, 4_096),
    ],
)
def test_published_depth_attention_cost(size, flops, io, transient):
    cost = mechanism_cost(paper_config(size, mixer="depth_attention"))
    assert (cost.flops, cost.io_bytes, cost.transient_bytes) == (flops, io, transient)


def test_io_of_the_sister_mixers():
    """b·d_kv·(ΣM + L) and b·d_kv·(3L - 3)."""
    assert mechanism_cost(paper_config("3b", mixer="uniform_depth")).io_bytes == 2 * 512 * (117 + 48)
    assert mechanism_cost(paper_config("3b", mixer="value_residual")).io_bytes == 2 * 512 * (3 * 48 - 3)


def test_published_rival_cost():
    """Tables 2 and 3 of the paper at 3B; its attention residuals leave out the read before the final norm."""
    dense = mechanism_cost(paper_config("3b", residual="denseformer"))
    assert dense.flops == pytest.approx(5.01e6, rel=2e-3) and dense.io_bytes == pytest.approx(4.97 * 2**20, rel=2e-3)
    attention = mechanism_cost(paper_config("3b", residual="attention_residuals"))
    assert attention.flops == pytest.approx(4.26e6 * 529 / 520, rel=2e-3)
    hyper = mechanism_cost(paper_config("3b", residual="hyper_connections"))
    assert hyper.flops == pytest.approx(4.72e7, rel=2e-3) and hyper.io_bytes == pytest.approx(8.63 * 2**20, rel=2e-3)


def test_cache_bytes_at_three_billion():
    for keys in ({}, {"mixer": "depth_attention"}, {"residual": "hyper_connections"}):
        assert cache_bytes_per_token(paper_config("3b", **keys)) == 98_304
    looped = paper_config("3b", recurrence="loop", recurrence_options={"trips": 3})
    assert cache_bytes_per_token(looped) == 3 * 98_304


def llama(recurrence="once", **options):
    """410M as the pondering papers shape it, with a key and a value for every head."""
    return FathomConfig(
        num_hidden_layers=24,
        hidden_size=1024,
        intermediate_size=2752,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=64,
        vocab_size=50_304,
        tie_word_embeddings=False,
        recurrence=recurrence,
        recurrence_options=options,
    )


def multiple(config):
    """Of vanilla's forward pass, attention scores left out on both sides."""
    vanilla = 24 * layer_flops(config) + head_flops(config)
    return 1 + mechanism_cost(config).flops / vanilla


def test_worked_check_of_the_pondering_models():
    assert 24 * layer_flops(llama()) == pytest.approx(607e6, rel=1e-3)
    assert multiple(llama("ponder", trips=4, top_k=0)) == pytest.approx(4.44, abs=0.005)
    assert multiple(llama("ponder", trips=4)) == pytest.approx(4.00, abs=0.005)
    assert multiple(llama("ponder2", trips=2)) == pytest.approx(1.85, abs=0.01)


@pytest.mark.parametrize("recurrence", ["ponder", "ponder2", "ponder3", "adaponder", "latent_cot"])
def test_pondering_parameters_and_cache(recurrence):
    plain, config = llama(), llama(recurrence, trips=4)
    added = {"ponder3": 4_100, "adaponder": 3 * (4 * 1024**2 + 8 * 1024 + 1), "latent_cot": 1_025}.get(recurrence, 0)
    assert count_parameters(config) - count_parameters(plain) == added == mechanism_cost(config).parameters
    bias = 4 * 4 if recurrence == "ponder3" else 0
    assert cache_bytes_per_token(config) == 4 * cache_bytes_per_token(plain) + bias


@pytest.mark.parametrize("view,reads", [("same", 4), ("duo", 10), ("all", 16)])
def test_attention_reads_by_view(view, reads):
    config = llama("ponder", trips=4, feed="hidden", view=view)
    per_position = (flops_per_token(config, 2048) - flops_per_token(config, 0)) / 2048
    assert per_position == pytest.approx(reads * 24 * attention_flops(config, 0, 0))


@pytest.mark.parametrize(
    "recurrence,depth,rounds,passes,reads",
    [
        ("ponder2", 1, [2, 3], (7, 8, 9), (13, 15, 17)),
        ("ponder2", 3, [2, 3], (18, 20, 22), (62, 70, 78)),
        ("ponder3", 3, [4, 6], (26, 30, 34), (94, 110, 126)),
    ],
)
def test_training_passes_of_views_that_need_a_solver(recurrence, depth, rounds, passes, reads):
    free = {"penalty": "none"} if recurrence == "ponder3" else {}
    config = llama(recurrence, trips=depth + 1, jacobi_train=rounds, **free)
    stack, length = 24 * layer_flops(config), 512
    attention = 24 * attention_flops(config, 0, length)
    wider = 1 + (recurrence == "ponder3") / config.head_dim  # the bias of keys, but in the pass of first trips alone
    for found, linear, scores in zip(training_flops_range(config, length), passes, reads, strict=True):
        forward, scores = found / 3 - head_flops(config), 1 + (scores - 1) * wider
        assert forward == pytest.approx(linear * stack + scores * attention, rel=1e-4)
    assert training_visits(config) == (24 * passes[1], 24 * passes[2])


def test_training_cost_of_everything_else():
    for config in (llama(), llama("loop", trips=2), llama("ponder", feed="hidden")):
        assert training_flops_range(config, 128) == (3 * flops_per_token(config, 128),) * 3
    config = llama("latent_cot", trips=4, penalty=0.0)
    again = (2 + 3 + 4) * 24 * attention_flops(config, 0, 128) / 2  # the scores of what reads earlier trips
    assert training_flops_range(config, 128) == pytest.approx((3 * flops_per_token(config, 128) + again,) * 3)
    drawn = llama("ponder", trips_range=[2, 4])
    ends = [training_flops_per_token(llama("ponder", trips=k + 1), 128) for k in (1, 2, 3)]
    assert training_flops_range(drawn, 128) == pytest.approx((ends[0], ends[1], ends[2]))
    assert training_flops_per_token(drawn, 128) == pytest.approx(ends[1])


def test_a_mixture_is_made_between_all_trips_that_a_pass_holds():
    mixed, plain = (
        llama("ponder", trips=3, view="all", feed=feed, jacobi_train=[1, 1]) for feed in ("mixture", "hidden")
    )
    one = head_flops(mixed) + 7 * 2 * 100 * 1024  # the choice of the words has no gradient; see the test below
    difference = training_flops_per_token(mixed, 64) - training_flops_per_token(plain, 64)
    assert difference == pytest.approx((1 + 2 + 2) * one), "in the end nothing is fed"


@pytest.mark.parametrize("case", ["vanilla", "loop", "loop-middle", "ponder-hidden-duo"])
def test_flops_are_what_a_counter_counts(case):
    config = config_of(case)
    model, length = build(config), 16
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, length), use_cache=False)
    causal = flops_per_token(config, length)
    full = flops_per_token(config, 2 * length - 1)  # the counter sees every score, masked or not
    assert counter.get_total_flops() / length == pytest.approx(full, rel=1e-9)
    assert causal < full


def decoded(config, length):
    """FLOPs of so many tokens one by one, and their cache."""
    model, cache = build(config), DynamicCache(config=config)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for token in tokens(1, length).split(1, 1):
            model(token, past_key_values=cache)
    return counter.get_total_flops(), cache


@pytest.mark.quick("None-vanilla", "2-loop-middle", "6-loop+depth_attention-grid", "40-vanilla")
@pytest.mark.parametrize("case", ["vanilla", "loop-middle", "loop+depth_attention-grid"])
@pytest.mark.parametrize("window", [None, 2, 4, 6, 40])
def test_windowed_layers_read_as_far_as_they_see(case, window):
    """Decoded token by token, as the only way in which a window's scores alone are made."""
    shape = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1} if window else {}
    config, length = config_of(case, mixer="none", mixer_options={}, **shape), 6
    flops, _ = decoded(config, length)
    assert flops / length == pytest.approx(flops_per_token(config, length), rel=1e-9)


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("recurrence", ["loop", "ponder"])
def test_decoding_within_max_trips_is_counted_so(recurrence, limit):
    """Training, which makes every trip, is not."""
    whole = config_of("vanilla", recurrence=recurrence, recurrence_options={"trips": 3})
    config, length = config_of("vanilla", recurrence=recurrence, recurrence_options={"trips": 3}, max_trips=limit), 5
    flops, cache = decoded(config, length)
    assert flops / length == pytest.approx(flops_per_token(config, length), rel=1e-9)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert held == length * cache_bytes_per_token(config, 4) < length * cache_bytes_per_token(whole, 4)
    assert training_flops_per_token(config, length) == training_flops_per_token(whole, length)


def test_windows_count_in_training_and_in_every_view():
    slide = {"use_sliding_window": True, "sliding_window": 4}
    for case in ("vanilla", "ponder2", "latent_cot"):
        wide, three, four = (config_of(case, **shape) for shape in ({}, {**slide, "max_window_layers": 1}, slide))
        four.layer_types = ["sliding_attention"] * 4
        near, far = attention_flops(three, 1, 64), attention_flops(three, 0, 64)
        assert far == attention_flops(wide, 1, 64) and near / far == pytest.approx((4 - 4 * 3 / 128) / 32.5)
        for count in (flops_per_token, training_flops_per_token):
            saved = [count(wide, 64) - count(config, 64) for config in (three, four)]
            assert saved[0] == pytest.approx(0.75 * saved[1]) and saved[0] > 2.9 * (far - near)


def bagged(table, words, *rest, out_shape=None, **kwargs):
    """`embedding_bag`: a product and a sum for every word and channel."""
    return 2 * prod(words) * table[1]


def added(table, dim, index, source, *rest, out_shape=None, **kwargs):
    """`index_add`, its terms included, which are outer products: the same."""
    return 2 * prod(source)


def multiplied(this, a, b, *rest, out_shape=None, **kwargs):
    """`addmm_`, in place."""
    return 2 * a[0] * a[1] * b[1]


UNCOUNTED = {  # by torch
    torch.ops.aten.addmm_: multiplied,
    torch.ops.aten._embedding_bag: bagged,
    torch.ops.aten._embedding_bag_forward_only: bagged,
    torch.ops.aten.index_add_: added,
}


def counted_step(config, length):
    """FLOPs of a training step per token, as a counter sees them; attention is eager, so every score is made."""
    model = build(config).train()
    model.set_attn_implementation("eager")
    model.set_step(0, 10)
    ids = torch.randint(3, config.vocab_size, (2, length), generator=seeded(0))
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        model(ids, labels=ids).loss.backward()
    return counter.get_total_flops() / ids.numel()


WIDER = {"hidden_size": 96, "intermediate_size": 288, "head_dim": 24}  # where sums and norms, uncounted, are few


@pytest.mark.quick(
    *("vanilla-61", "attention_residuals-61", "loop+depth_attention-grid-61", "ponder@gpt2-61", "ponder-pause-duo-61")
)
@pytest.mark.parametrize("words", [61, 2000])
@pytest.mark.parametrize("case", CASES)
def test_a_declared_training_step_is_a_measured_one(case, words):
    config = config_of(case, vocab_size=words, **WIDER)
    assert counted_step(config, 16) == pytest.approx(training_flops_per_token(config, 2 * 16 - 1), rel=0.02)


def test_a_balance_of_experts_reads_what_a_fed_pause_does_not():
    config = config_of("ponder-pause-duo", vocab_size=61, experts=4, experts_per_token=2, **WIDER)
    assert counted_step(config, 16) == pytest.approx(training_flops_per_token(config, 2 * 16 - 1), rel=0.01)


@pytest.mark.quick("ponder3")
@pytest.mark.parametrize("case", ["ponder2", "ponder3", "ponder-all"])
def test_passes_without_gradients_are_declared(case):
    """They cost a forward pass, where the others cost three."""
    options = {**CASES[case][1]["recurrence"], "gradient_passes": 2}
    config = config_of(case, vocab_size=500, recurrence_options=options, **WIDER)
    declared = training_flops_per_token(config, 2 * 16 - 1)
    assert counted_step(config, 16) == pytest.approx(declared, rel=0.02)
    whole = config_of(case, vocab_size=500, **WIDER)
    assert declared < 0.9 * training_flops_per_token(whole, 2 * 16 - 1)


@pytest.mark.quick("same-32-500")
@pytest.mark.parametrize("words", [500, 2000])
@pytest.mark.parametrize("top_k", [0, 31, 32, 125, 126])
@pytest.mark.parametrize("view", ["same", "all"])
def test_every_way_to_mix_is_declared(view, top_k, words):
    """Dense or sparse: 31 of 500 and 125 of 2000 words are the most that are gathered."""
    options = {"trips": 3, "top_k": top_k, "view": view, "jacobi_train": [2, 2]}
    config = config_of("ponder", vocab_size=words, recurrence_options=options, **WIDER)
    declared = training_flops_per_token(config, 2 * 16 - 1)
    assert counted_step(config, 16) == pytest.approx(declared, rel=0.005)
    three_forward = declared - mechanism_cost(config).training_flops * (5 / 2 if view == "all" else 1)
    assert abs(three_forward / declared - 1) > 0.01, "which three forward passes are not"


@pytest.mark.quick("latent_cot")
@pytest.mark.parametrize("case", ["ponder3", "latent_cot"])
def test_a_penalty_that_looks_at_words_is_declared(case):
    """With every token in the sample."""
    options = {**CASES[case][1]["recurrence"], "penalty_token_fraction": 1.0}
    config = config_of(case, vocab_size=2000, recurrence_options=options, **WIDER)
    declared = training_flops_per_token(config, 2 * 16 - 1)
    assert counted_step(config, 16) == pytest.approx(declared, rel=0.005)
    assert declared - 2 * head_flops(config) < 0.99 * counted_step(config, 16)
