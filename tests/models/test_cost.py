"""The published counts, and the arithmetic behind every declared number."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fathom.models import FathomConfig
from fathom.models.cost import cache_bytes_per_token, count_parameters, flops_per_token, mechanism_cost

from .cases import build, config_of, tokens

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
    looped = paper_config("3b", recurrence="loop", recurrence_options={"count": 3})
    assert cache_bytes_per_token(looped) == 3 * 98_304


@pytest.mark.parametrize("case", ["vanilla", "loop", "loop-middle"])
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
