"""The models that the conformance suite runs over: every registered mechanism and the sensible compositions."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from fathom.models import FathomConfig, FathomForCausalLM
from fathom.models.registry import DEFAULTS, known, parse_mechanism

SHAPE = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

# Few rounds, since each is a pass; exact where a property needs it.
SOLVED = {"prefill": "exact", "jacobi_train": [1, 1], "jacobi_eval": 1}

# id -> (mechanism, options by axis)
CASES: dict[str, tuple[str, dict]] = {
    "vanilla": ("vanilla", {}),
    "depth_attention": ("depth_attention", {}),
    "depth_attention-dense": ("depth_attention", {"mixer": {"stride": 1, "self_bias": 0.5}}),
    "depth_attention-window": ("depth_attention", {"mixer": {"stride": 4, "recent_layers": 1}}),
    "depth_attention-keys": ("depth_attention", {"mixer": {"stride": 1, "mixes": "key"}}),
    "depth_attention-both": ("depth_attention", {"mixer": {"stride": 1, "mixes": "both", "self_bias": 0.5}}),
    "loop+depth_attention-both": (
        "loop+depth_attention",
        {"recurrence": {"trips": 2, "prelude": 1}, "mixer": {"mixes": "both", "blend": 0.75}},
    ),
    "uniform_depth": ("uniform_depth", {}),
    "value_residual": ("value_residual", {}),
    "denseformer": ("denseformer", {}),
    "denseformer-sparse": ("denseformer", {"residual": {"dilation": 2, "period": 2}}),
    "attention_residuals": ("attention_residuals", {"residual": {"block_size": 3}}),
    "attention_residuals-snapshot": ("attention_residuals", {"residual": {"block_size": 3, "variant": "snapshot"}}),
    "attention_residuals-delta": ("attention_residuals", {"residual": {"variant": "delta"}}),
    "attention_residuals-delta_block": (
        "attention_residuals",
        {"residual": {"block_size": 3, "variant": "delta_block"}},
    ),
    "attention_residuals-delta-blend": ("attention_residuals", {"residual": {"variant": "delta", "blend": 0.5}}),
    "loop+attention_residuals-delta_block": (
        "loop+attention_residuals",
        {
            "recurrence": {"trips": 2, "prelude": 1},
            "residual": {"block_size": 3, "variant": "delta_block"},
        },
    ),
    "latent_cot+depth_attention+attention_residuals-delta": (
        "latent_cot+depth_attention+attention_residuals",
        {"recurrence": {"trips": 2, "tau": 0.3}, "residual": {"variant": "delta"}},
    ),
    "mudd": ("mudd", {}),
    "mudd-last": ("mudd", {"residual": {"ways": "vr", "last": 2, "sources": "few", "hidden": 5}}),
    "mudd-prepost": ("mudd", {"residual": {"norm": "prepost"}}),
    "loop+depth_attention+mudd": (
        "loop+depth_attention+mudd",
        {"recurrence": {"trips": 2, "prelude": 1}},
    ),
    "latent_cot+mudd": ("latent_cot+mudd", {"recurrence": {"trips": 2, "tau": 0.3}}),
    "hyper_connections": ("hyper_connections", {"residual": {"streams": 3}}),
    "hyper_connections-v41": ("hyper_connections", {"residual": {"streams": 3, "form": "deepseek_v41"}}),
    "hyper_connections-glm5": ("hyper_connections", {"residual": {"streams": 2, "form": "glm5_next"}}),
    "hyper_connections-hy_v4": ("hyper_connections", {"residual": {"streams": 3, "form": "hy_v4"}}),
    "hyper_connections-gated": ("hyper_connections", {"residual": {"streams": 2, "form": "qwen4_exp"}}),
    "attention_residuals-inkling2": ("attention_residuals", {"residual": {"block_size": 4, "variant": "inkling2"}}),
    "hyper_connections-free": ("hyper_connections", {"residual": {"streams": 2, "sinkhorn_iterations": 0}}),
    "loop": ("loop", {"recurrence": {"trips": 3}}),
    "loop-middle": ("loop", {"recurrence": {"trips": 2, "prelude": 1, "coda": 1}}),
    "loop-diagonal": (
        "loop",
        {
            "recurrence": {
                "trips": 3,
                "prelude": 1,
                "injection": "diagonal",
                "entry_norm": True,
                "norm_between": "own",
            }
        },
    ),
    "loop-exit": (
        "loop",
        {"recurrence": {"trips": 3, "norm_between": "final", "exit": "joint", "exit_threshold": 0.6}},
    ),
    "loop-shared": ("loop", {"recurrence": {"trips": 3, "prelude": 1, "coda": 1, "kv": "first"}}),
    "loop+depth_attention-shared": ("loop+depth_attention", {"recurrence": {"trips": 2, "prelude": 1, "kv": "first"}}),
    "loop+depth_attention-first": (
        "loop+depth_attention",
        {"recurrence": {"trips": 3, "prelude": 1, "coda": 1}, "mixer": {"across_trips": "first", "stride": 1}},
    ),
    "latent_cot+depth_attention-first": (
        "latent_cot+depth_attention",
        {"recurrence": {"trips": 3, "tau": 0.2}, "mixer": {"across_trips": "first", "stride": 2}},
    ),
    "loop+hyper_connections-visits": (
        "loop+hyper_connections",
        {"recurrence": {"trips": 3, "prelude": 1}, "residual": {"streams": 2, "per_visit": True}},
    ),
    "latent_cot+hyper_connections-visits": (
        "latent_cot+hyper_connections",
        {"recurrence": {"trips": 2, "tau": 0.3}, "residual": {"streams": 2, "per_visit": True}},
    ),
    "loop+depth_attention": ("loop+depth_attention", {"recurrence": {"trips": 2}}),
    "loop+depth_attention-grid": (
        "loop+depth_attention",
        {"recurrence": {"trips": 3, "prelude": 1}, "mixer": {"across_trips": "grid", "stride": 2}},
    ),
    "denseformer+depth_attention": ("denseformer+depth_attention", {}),
    "loop+denseformer": ("loop+denseformer", {"recurrence": {"trips": 2, "prelude": 1}}),
    "ponder": ("ponder", {"recurrence": {"trips": 3, "top_k": 9}}),
    "ponder-hidden-duo": ("ponder", {"recurrence": {"trips": 3, "feed": "hidden", "view": "duo"}}),
    "ponder-all": ("ponder", {"recurrence": {"trips": 2, "view": "all", **SOLVED}}),
    "ponder-projected": ("ponder", {"recurrence": {"trips": 3, "feed": "projected"}}),
    "ponder-pause": ("ponder", {"recurrence": {"trips": 3, "feed": "pause", "view": "all"}}),
    "ponder-pause-duo": ("ponder", {"recurrence": {"trips": 3, "feed": "pause", "view": "duo", "blend": 0.75}}),
    "ponder2": ("ponder2", {"recurrence": {"trips": 2, **SOLVED}}),
    "ponder3": ("ponder3", {"recurrence": {"trips": 3, **SOLVED, "penalty_steps": [0, 0], "tau": 0.1}}),
    "adaponder": ("adaponder", {"recurrence": {"trips": 3, "top_k": 9, "tau": 0.4}}),
    "adaponder-shared": ("adaponder", {"recurrence": {"trips": 3, "top_k": 9, "tau": 0.4, "halting": "shared"}}),
    "adaponder-uniform": ("adaponder", {"recurrence": {"trips": 3, "top_k": 9, "halting": "uniform", "kept": 0.4}}),
    "adaponder-geometric": ("adaponder", {"recurrence": {"trips": 3, "top_k": 9, "halting": "geometric", "kept": 0.2}}),
    "latent_cot": ("latent_cot", {"recurrence": {"trips": 3, "tau": 0.2}}),
    "latent_cot-mlp": ("latent_cot", {"recurrence": {"trips": 3, "tau": 0.2, "router": "mlp"}}),
    "ponder+depth_attention": ("ponder+depth_attention", {"recurrence": {"trips": 2}}),
    "ponder2+depth_attention": ("ponder2+depth_attention", {"recurrence": {"trips": 2, **SOLVED}}),
    "ponder3+depth_attention": (
        "ponder3+depth_attention",
        {"recurrence": {"trips": 2, **SOLVED, "penalty": "expected_trips", "tau": 0.5}},
    ),
    "adaponder+depth_attention": (
        "adaponder+depth_attention",
        {"recurrence": {"trips": 3, "tau": 0.4}, "mixer": {"across_trips": "same_layer"}},
    ),
    "latent_cot+depth_attention": (
        "latent_cot+depth_attention",
        {"recurrence": {"trips": 3, "tau": 0.2}, "mixer": {"across_trips": "grid", "stride": 2}},
    ),
    "latent_cot+hyper_connections": ("latent_cot+hyper_connections", {"recurrence": {"trips": 2, "tau": 0.3}}),
    "depth_attention-blend": ("depth_attention", {"mixer": {"stride": 1, "blend": 0.25}}),
    "uniform_depth-blend": ("uniform_depth", {"mixer": {"blend": 0.75}}),
    "value_residual-blend": ("value_residual", {"mixer": {"blend": 0.75}}),
    "attention_residuals-blend": ("attention_residuals", {"residual": {"block_size": 3, "blend": 0.5}}),
    "hyper_connections-blend": ("hyper_connections", {"residual": {"streams": 3, "blend": 0.5}}),
    "loop-damped": ("loop", {"recurrence": {"trips": 3, "prelude": 1, "coda": 1, "damping": 0.5, "blend": 0.75}}),
    "ponder-blend": ("ponder", {"recurrence": {"trips": 3, "top_k": 9, "blend": 0.5}}),
    "adaponder-blend": ("adaponder", {"recurrence": {"trips": 3, "top_k": 9, "tau": 0.4, "blend": 0.5}}),
    "latent_cot-blend": ("latent_cot", {"recurrence": {"trips": 3, "tau": 0.2, "blend": 0.5}}),
    "loop+denseformer-damped": (
        "loop+denseformer",
        {"recurrence": {"trips": 2, "prelude": 1, "damping": 0.5}},
    ),
    "loop+depth_attention+hyper_connections-blend": (
        "loop+depth_attention+hyper_connections",
        {
            "recurrence": {"trips": 2, "prelude": 1, "blend": 0.5},
            "mixer": {"stride": 1, "blend": 0.75},
            "residual": {"streams": 2, "blend": 0.25},
        },
    ),
    "depth_attention-learned": ("depth_attention", {"mixer": {"stride": 1, "blend": "learned", "gates": "head"}}),
    "uniform_depth-learned": ("uniform_depth", {"mixer": {"blend": "learned", "gates": "channel"}}),
    "value_residual-learned": ("value_residual", {"mixer": {"blend": "learned"}}),
    "attention_residuals-learned": (
        "attention_residuals",
        {"residual": {"block_size": 3, "blend": "learned", "gates": "channel"}},
    ),
    "attention_residuals-delta-learned": (
        "attention_residuals",
        {"residual": {"variant": "delta", "blend": "learned"}},
    ),
    "hyper_connections-learned": ("hyper_connections", {"residual": {"streams": 2, "blend": "learned"}}),
    "loop-learned": ("loop", {"recurrence": {"trips": 3, "prelude": 1, "coda": 1, "blend": "learned"}}),
    "loop+depth_attention-learned": (
        "loop+depth_attention",
        {
            "recurrence": {"trips": 2, "prelude": 1, "blend": "learned"},
            "mixer": {"stride": 2, "blend": "learned", "gates": "head"},
        },
    ),
    "branch_gain": ("branch_gain", {}),
    "value_gain-queries": ("value_gain", {"mixer": {"queries": True}}),
    "loop+branch_gain+value_gain": (
        "loop+branch_gain+value_gain",
        {
            "recurrence": {"trips": 2, "prelude": 1, "coda": 1},
            "residual": {"per_visit": True},
            "mixer": {"gates": "layer", "queries": True},
        },
    ),
    "depth_attention+attention_residuals": ("depth_attention+attention_residuals", {"residual": {"block_size": 3}}),
}


def with_every_mechanism(cases: dict[str, tuple[str, dict]], names: Iterable[str]) -> dict[str, tuple[str, dict]]:
    """The cases, and one at its defaults for each mechanism that none of them has."""
    used = {name for mechanism, _ in cases.values() for name in mechanism.split("+")}
    return {**cases, **{name: (name, {}) for name in names if name not in used}}


# Also those of installed packages.
CASES = with_every_mechanism(CASES, sorted(known().keys() - set(DEFAULTS.values())))

LAYER_NORM = {"norm": "layer", "qk_norm": "none", "gated_mlp": False, "attention_bias": True, "mlp_bias": True}
BACKBONES = {
    # Softer scores: without norms on queries and keys, trips that read one another multiply rounding by 1e5.
    "llama": {"qk_norm": "none", "attention_scale": 0.125},
    "neox": {
        **LAYER_NORM,
        "parallel_residual": True,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "gpt2": {**LAYER_NORM, "positions": "learned", "position_offset": 2, "scale_queries": True},
    "olmo2": {"norm": "rms_wide", "norm_placement": "after", "qk_norm": "full", "rope_float32": True},
    "gemma": {
        **{"norm": "rms_offset", "norm_placement": "both", "embedding_scale": 5.7, "round_embedding_scale": True},
        **{"final_logit_softcapping": 3.0, "no_rope_layers": [1, 0, 1, 1], "residual_multiplier": 0.7},
    },
    # A loss that balances experts is of all tokens together: sequences and ranks no longer add up.
    "experts": {"experts": 5, "experts_per_token": 2, "router_aux_loss_coef": 0.0},
}
"""The kinds of backbones, by the family that each is most like."""
ALONE = [case for case in CASES if "+" not in case and "-" not in case]
CASES |= {
    f"{case}@{backbone}": (CASES[case][0], {**CASES[case][1], "backbone": switches})
    for case in (*ALONE, "loop+depth_attention-grid", "latent_cot+depth_attention", "attention_residuals-delta")
    for backbone, switches in BACKBONES.items()
}
CASES["depth_attention-normed@llama"] = (
    "depth_attention",
    {"mixer": {"norm_scores": True}, "backbone": BACKBONES["llama"]},
)
LATER = (
    *(
        "-blend",
        "-diagonal",
        "-dense",
        "-sparse",
        "-snapshot",
        "-free",
        "-v41",
        "-glm5",
        "-hy_v4",
        "-gated",
        "-inkling2",
        "-middle",
        "-last",
        "-delta",
        "-exit",
        "-shared",
        "-learned",
        "-queries",
    ),
    *("-window", "-prepost", "-all", "-damped", "-delta_block"),
    *("-keys", "-both", "-projected", "-pause", "-pause-duo", "-uniform", "-geometric", "-mlp"),
)
BACKED = ["depth_attention@neox", "ponder@gpt2", "loop@olmo2", "latent_cot@gemma", "loop@experts"]
FAST = [case for case in ALONE if case not in ("loop", "ponder", "latent_cot")]
FAST += [case for case in CASES if "-" in case and not set("+@") & set(case) and not case.endswith(LATER)]
FAST += ["loop+depth_attention-grid", *BACKED]
"""Every mechanism alone or on another backbone, a composition, and every kind of backbone; the others are slow."""


def in_turn(cases: Iterable[str]) -> list:
    """Cases for `parametrize`, of which those that are not in FAST are slow."""
    return [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def config_of(case: str, **shape) -> FathomConfig:
    """The case's configuration at the small shape."""
    name, options = CASES[case]
    keys = {f"{axis}_options": value for axis, value in options.items() if axis != "backbone"}
    backbone = dict(options.get("backbone", {}))
    if "num_hidden_layers" in shape:
        backbone.pop("no_rope_layers", None)
    return FathomConfig(**{**SHAPE, **parse_mechanism(name), **keys, **backbone, **shape})


def vanilla_of(case: str) -> str:
    """The case without mechanisms, of the same backbone."""
    return "@".join(("vanilla", *case.split("@")[1:]))


def build(config: FathomConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> FathomForCausalLM:
    """A model whose every parameter is away from its initial value, as training would leave it."""
    torch.manual_seed(seed)
    model = FathomForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            # Matrices large enough for attention and mixing to be far from uniform.
            parameter.add_(noise * (0.2 if parameter.ndim < 2 or "residual" in name else 0.25))
    return model.to(dtype)


def closed(config: FathomConfig) -> dict[str, dict]:
    """Options of every axis with which a model starts as the one without mechanisms, as far as there are any."""
    parts = {axis: known()[getattr(config, axis)].closed for axis in DEFAULTS}
    given = {axis: getattr(config, f"{axis}_options") for axis in DEFAULTS}
    parts = {axis: {} if given[axis].get("blend") == "learned" else keys for axis, keys in parts.items()}
    made = {f"{axis}_options": {**given[axis], **(keys or {})} for axis, keys in parts.items()}
    if config.residual != "plain" and "coda" in made["recurrence_options"]:
        made["recurrence_options"]["coda"] = 0  # a blended loop with a coda needs the plain residual
    if "exit" in made["recurrence_options"]:
        made["recurrence_options"]["exit"] = "none"  # a gate needs an open loop
    return made


def with_gains(model: FathomForCausalLM, gain: float = 3.0) -> FathomForCausalLM:
    """The model with queries and keys of that many times their size, and other weights of one dimension moved."""
    drawn = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = "norm" if model.config.qk_norm != "none" else "proj"
            if name.endswith((f"q_{last}.weight", f"k_{last}.weight")):
                parameter.mul_(gain)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=drawn, device=model.device))
    return model


def set_options(model: FathomForCausalLM, **options) -> None:
    """Give a model that exists other options of its recurrence, in its configuration too."""
    model.config.recurrence_options |= options
    model.model.recurrence.options = replace(model.model.recurrence.options, **options)


def with_rounds(model: FathomForCausalLM, rounds: int) -> None:
    """Give a model other Jacobi rounds for evaluation."""
    recurrence = model.model.recurrence
    recurrence.options = replace(recurrence.options, jacobi_eval=rounds)


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random ids without the special ones, the same on every device."""
    drawn = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randint(3, SHAPE["vocab_size"], shape, generator=drawn, device="cpu").to(torch.get_default_device())
