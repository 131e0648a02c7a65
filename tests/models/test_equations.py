"""Every mechanism at options that matter to its equations: logits and gradients are those of `oracle_numpy.py`."""

import pytest
import torch

from fathom.models.registry import MECHANISMS
from fathom.models.residuals.released_streams import FORMS, GATED

from .cases import build, config_of, tokens
from .oracle import agree, oracle_of, truth
from .slot_oracle import METHODS, thinker

FIVE, SIX = {"num_hidden_layers": 5}, {"num_hidden_layers": 6}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
RELEASED = (*FORMS, GATED)
FREE = {"sinkhorn_iterations": 0}


def grid(stride, recent_layers=0, **options):
    return {"stride": stride, "recent_layers": recent_layers, **options}


def trips(count, prelude=0, coda=0, **options):
    return {"trips": count, "prelude": prelude, "coda": coda, **options}


def blocks(size, variant="block_sum"):
    return {"block_size": size, "variant": variant}


EQUATIONS = [
    # mechanisms, the options of each, and the shape
    *[("depth_attention", [options], SIX) for options in (grid(1), {}, grid(6, 2))],
    *[("depth_attention", [options], {**SIX, "num_key_value_heads": 1}) for options in (grid(2), grid(6, 2))],
    ("depth_attention", [grid(1, norm_scores=True)], {"qk_norm": "none"}),
    ("depth_attention", [grid(1, self_bias=0.75)], {"k_norm_position": "after_rope"}),
    *[("uniform_depth", [grid(n)], {**FIVE, "num_key_value_heads": kv}) for n, kv in ((1, 1), (2, 2), (5, 4))],
    *[("uniform_depth", [grid(n, recent)], FIVE) for n, recent in ((3, 1), (5, 4))],
    *[("value_residual", [{}], {"num_key_value_heads": kv}) for kv in (1, 4)],
    *[("loop+value_residual", [trips(2, prelude), {}], {}) for prelude in (0, 1)],
    *[
        ("denseformer", [{"dilation": dilation, "period": period}], FIVE)
        for dilation, period in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 3), (5, 5))
    ],
    *[
        ("loop+denseformer", [trips(3, prelude, coda), {"dilation": dilation}], FIVE)
        for dilation, prelude, coda in ((1, 0, 0), (2, 2, 0), (3, 1, 1))
    ],
    *[("attention_residuals", [blocks(size)], {}) for size in (1, 3, 8, 12)],
    *[
        ("attention_residuals", [blocks(size, variant)], {})
        for variant in ("snapshot", "delta_block")
        for size in (1, 2, 12)
    ],
    ("attention_residuals", [{"variant": "delta"}], {}),
    *[
        ("loop+attention_residuals", [trips(2, prelude, coda), blocks(3, variant)], {})
        for variants, prelude, coda in ((("block_sum", "delta"), 1, 1), (("snapshot", "delta_block"), 2, 0))
        for variant in variants
    ],
    *[
        ("hyper_connections", [{"streams": streams, "sinkhorn_iterations": rounds}], {"num_hidden_layers": 2})
        for streams, rounds in ((1, 20), (2, 20), (4, 20), (3, 1))
    ],
    *[("hyper_connections", [{"streams": n, **FREE}], {"num_hidden_layers": 2}) for n in (1, 2, 3)],
    ("loop+hyper_connections", [trips(2, 1), {"streams": 2, "sinkhorn_iterations": 3}], {}),
    *[("hyper_connections", [{"form": form, "streams": 3}], {"num_hidden_layers": 2}) for form in RELEASED],
    ("loop+hyper_connections", [trips(2, 1), {"form": "deepseek_v41", "streams": 2}], {}),
    *[("attention_residuals", [blocks(size, "inkling2") | {"queries": n}], SLIDING) for size, n in ((4, 3), (3, 1))],
    ("loop+attention_residuals", [trips(2, 1), blocks(3, "inkling2")], {}),
    ("mudd", [{}], FIVE),
    ("mudd", [{"ways": "vr", "last": 2, "sources": "few", "hidden": 5}], FIVE),
    *[("mudd", [{"ways": ways}], FIVE) for ways in ("qk", "r")],
    ("mudd", [{"ways": "v", "sources": "few"}], FIVE),
    ("mudd", [{"norm": "prepost"}], FIVE),
    ("mudd", [{"norm": "prepost", "ways": "kr", "last": 2, "sources": "few"}], FIVE),
    ("loop+mudd", [trips(2, 1), {}], {}),
    *[
        ("loop+depth_attention", [trips(*shape), grid(stride, across_trips=rule)], {})
        for shape, stride in (((2,), 2), ((2, 1, 1), 2), ((3, 2, 0), 1))
        for rule in ("none", "same_layer", "grid", "first")
    ],
    *[("loop+uniform_depth", [trips(2, 1, 1), grid(2, across_trips=rule)], {}) for rule in ("grid", "first")],
    *[
        ("loop", [trips(*shape, kv="first")], keys)
        for shape in ((2, 0, 0), (3, 1, 1))
        for keys in ({}, SLIDING, {"k_norm_position": "after_rope"})
    ],
    ("loop", [trips(3, 1, injection="diagonal", entry_norm=True, norm_between="own")], {}),
    ("loop", [trips(2, 1, injection="add", norm_between="final")], {}),
    *[("loop", [trips(3, norm_between="final", exit="joint", exit_threshold=q)], {}) for q in (0.3, 0.6, 0.75)],
    *[
        ("loop", [trips(count, 1, 1, damping=damping, blend=blend)], {})
        for count, damping, blend in ((3, 0.5, 1.0), (4, 0.25, 0.5), (3, 1.0, 0.25))
    ],
]


def name_of(equation):
    mechanisms, options, shape = equation
    said = [f"{key}={value}" for part in (*options, shape) for key, value in part.items() if key != "layer_types"]
    return "-".join([mechanisms, *said])


def config_by(mechanisms, options, shape):
    keys = {}
    for name, chosen in zip(mechanisms.split("+"), options, strict=True):
        axis = MECHANISMS[name].axis
        keys |= {axis: name, f"{axis}_options": chosen}
    return config_of("vanilla", **keys, **shape)


@pytest.mark.quick("[!l]*", "loop-*", "loop+*-prelude=1-*")  # of loops with mechanisms, those with a prelude
@pytest.mark.parametrize("equation", EQUATIONS, ids=name_of)
def test_a_model_is_its_equations(equation):
    agree(build(config_by(*equation), dtype=torch.float64), tokens(1, 5))


@pytest.mark.quick(
    "ponder-all-+depth_attention",
    "ponder3-+depth_attention",
    "adaponder-+depth_attention",
    "latent_cot-+depth_attention",
)
@pytest.mark.parametrize("mixer", ["", "+depth_attention"])
@pytest.mark.parametrize("method", METHODS)
def test_a_thinking_model_is_its_equations(method, mixer):
    """Through every trip, mixture, gate, key bias and, under ALL, through the rounds of the solver."""
    agree(thinker(method, mixer), tokens(1, 5), exact=1e-11)


@pytest.mark.parametrize(
    "mechanism,options,others",
    [
        ("depth_attention", grid(2), [grid(1), {"norm_scores": True}, {"self_bias": 1.0}]),
        ("denseformer", {"dilation": 2}, [{"period": 3}]),
        ("attention_residuals", blocks(3), [blocks(12)]),
        (
            "hyper_connections",
            {"sinkhorn_iterations": 2},
            [{"sinkhorn_iterations": n} for n in (0, 1, 19)],
        ),
        ("loop", trips(3, 1), [{"kv": "first"}, {"damping": 0.5}, {"blend": 0.5}]),
    ],
)
def test_other_options_are_seen(mechanism, options, others):
    """The negative control: the same weights read otherwise."""
    model, ids = build(config_by(mechanism, [options], {}), dtype=torch.float64), tokens(1, 6)
    axis = MECHANISMS[mechanism].axis
    with torch.no_grad():
        logits = model(ids).logits
        for other in others:
            assert (truth(oracle_of(model, **{axis: other}), ids) - logits).abs().max() > 1e-5, other


@pytest.mark.parametrize("way", range(4))
def test_every_way_of_mudd_matters(way):
    """The negative control: a way that keeps the newest alone is another model."""
    model, ids = build(config_of("mudd"), dtype=torch.float64), tokens(1, 6)
    oracle = oracle_of(model)
    for name, made in oracle.w.items():
        if name.endswith("static") and way < len(made):
            made[way] = [0] * (made.shape[1] - 1) + [1]
            oracle.w[name.replace("static", "weigher.w2.weight")].reshape(*made.shape, -1)[way] = 0
    with torch.no_grad():
        assert (truth(oracle, ids) - model(ids).logits).abs().max() > 1e-2
