"""Random models in random use against `oracle_numpy.py`, batch of one included.

A case is a pure function of its seed: a composition, its options and weights, and what is done with the model (chunks,
padding, packing, mutations of the cache and reading on, generating, training). Seeds below 10,000 have Qwen3's
backbone; those above draw one as well, those above 20,000 the newer mechanisms too, those above 22,000 what loops
share between trips and what they do not, and those above 24,000 the arms by which papers argue.
`python -m tests.models.test_oracle 17` runs one again, and with a second number as many from there on.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache

from fathom.checkpoints.families import gpt_neox
from fathom.checkpoints.families.tensor_names import LAYER
from fathom.models import FathomConfig, FathomForCausalLM, modeling, sublayers
from fathom.models.configuration import CHOICES
from fathom.models.decoder.rotary import signed
from fathom.models.mixers.depth_attention import DepthAttention
from fathom.models.recurrences.adaponder import Adaponder, AdaponderOptions
from fathom.models.recurrences.looping import Loop
from fathom.models.recurrences.ponder import Ponder
from fathom.models.recurrences.pondering import GateMLP, Solved
from fathom.models.registry import known
from fathom.models.trips import reading, slot_table, slots, walk
from fathom.models.trips.slot_table import SlotTable

from .oracle import angles_of
from .oracle_numpy import Held, Oracle, Row, Token

TOLERANCE = {"sdpa": 1e-11, "eager": 1e-4, "capped": 1e-11}
"""Eager attention has its softmax in float32, unless logits are capped."""
UNDECIDED = {"sdpa": 1e-11, "eager": 1e-3, "capped": 1e-11}
"""A threshold missed by less may be missed on either side: such a case is not judged."""
AMPLIFIED = 1e-9
"""No rounding excuses more: a case whose rounding is amplified beyond it is not judged."""
SLOPE = {"sdpa": 1e-8, "eager": 1e-3, "capped": 1e-8}
"""Of derivatives, which the oracle takes from losses at places a stride apart."""
FOUR, EIGHT = (2 / 3, -1 / 12), (4 / 5, -1 / 5, 4 / 105, -1 / 280)
"""Weights of the pairs of places, nearest first. Eight places leave an error of stride⁸, four of stride⁴."""
DIFFERENCES = ((FOUR, 1e-4), (EIGHT, 5e-5), (EIGHT, 1e-5))
"""A derivative that bends much needs more places, or a shorter stride, in which rounding weighs more."""
STEEP, ULP = 1e-2, 2.0**-52
Place = tuple[int, int, int]
"""A token's column, position and id."""
NAMES = {
    "recurrence": ("once", "loop", "ponder", "ponder2", "ponder3", "adaponder", "latent_cot"),
    "residual": ("plain", "denseformer", "attention_residuals", "hyper_connections", "mudd"),
    "mixer": ("none", "depth_attention", "uniform_depth", "value_residual"),
}
"""What the oracle computes. Seeds stand for places in these lists, so a new name goes to `LATER`."""
LATER = {"mudd"}
"""Mechanisms that only the seeds from `NEIGHBOURS` on draw."""
COMPOSITIONS = list(itertools.product(*([name for name in names if name not in LATER] for names in NAMES.values())))
KINDS = (
    *("full", "default", "chunks", "tokens", "static", "left", "holes", "packed"),
    *("crop", "reorder", "repeat", "select", "budget", "embeds"),
)
MUTATIONS = ("crop", "reorder", "repeat", "select")
OTHERS = 10_000
"""The first seed that draws a backbone; before it all are Qwen3's."""
NEIGHBOURS = 20_000
"""The first seed that draws mechanisms which `COMPOSITIONS` and `draw_options` lack."""
SHARING = 22_000
"""The first seed that draws what trips share, in compositions that have several trips."""
PAPERS = 24_000
"""The first seed that draws the arms by which papers argue, in compositions that have one."""
SHARED = [
    c for c in COMPOSITIONS if c[0] == "loop" or (c[0] in ("ponder", "adaponder", "latent_cot") and "hyper" in c[1])
]
ARMS = [c for c in COMPOSITIONS if c[2] == "depth_attention" or c[0] in ("ponder", "adaponder", "latent_cot")]
MORE = ("generate", "train", "train")
"""Further kinds of use, which every fourth of these seeds has."""


# --- drawing ----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model, and what is done with it."""

    seed: int
    config: dict[str, Any]
    backend: str
    kind: str
    batch: int
    cache: str
    """`none`, `default` (whatever the first call returns), `dynamic`, `configured` or `static`."""
    steps: list[tuple[str, int]]
    """(`read`, tokens) or (a mutation, how much)."""
    padding: str = ""
    """`left`, `holes`, or a mask of `ones`."""
    positions: bool = False
    """Whether rotary positions are handed over."""
    embeds: bool = False
    budget: int | None = None
    grad: bool = False
    backbone: str = "qwen3"

    @property
    def precision(self) -> str:
        """The key of its tolerances."""
        return "capped" if self.config.get("attn_logit_softcapping") else self.backend

    def __str__(self) -> str:
        name = "+".join(self.config[axis] for axis in NAMES)
        said = [
            f"{self.backbone}, {self.kind}, {self.backend}, batch {self.batch}, cache {self.cache}",
            str(self.steps),
        ]
        extra = {k: getattr(self, k) for k in ("padding", "positions", "embeds", "budget", "grad") if getattr(self, k)}
        replay = f"python -m tests.models.test_oracle {self.seed}"
        return "\n".join([f"seed {self.seed}: {name}", *said, str(extra), str(self.config), replay])


def draw_options(rng: random.Random, config: dict[str, Any]) -> None:
    """Options of the three axes."""
    layers, recurrence = config["num_hidden_layers"], config["recurrence"]
    trips = {"trips": rng.choice((1, 2, 3, 3, 4))}
    words = {
        "top_k": rng.choice((0, 3, 7, 100)),
        "temperature": rng.uniform(0.6, 1.5),
        "mixture_gain": rng.uniform(0.3, 1),
    }
    rounds = {
        "jacobi_eval": rng.randrange(4),
        "jacobi_prefill": rng.randrange(4),
        "prefill": rng.choice(("jacobi", "jacobi", "exact")),
    }
    prelude = rng.randrange(layers)
    tau = {"tau": rng.choice((1e-4, rng.uniform(0.1, 0.6), rng.uniform(0.3, 0.8)))}
    feeds = {"feed": rng.choice(("mixture", "hidden")), "view": rng.choice(("same", "duo", "all"))}
    config["recurrence_options"] = {
        "once": {},
        "loop": {"trips": rng.randint(1, 3), "prelude": prelude, "coda": rng.randrange(layers - prelude)},
        "ponder": trips | words | rounds | feeds,
        "ponder2": trips | rounds,
        "ponder3": trips | rounds | tau | {"router_damping": rng.choice((1.0, 1.0, 0.3))},
        "adaponder": trips | words | tau,
        "latent_cot": trips | tau,
    }[recurrence]
    if recurrence == "ponder3" and rounds["prefill"] == "exact":
        config["recurrence_options"]["router_damping"] = 1.0  # damping and exactness exclude each other
    config["residual_options"] = {
        "plain": {},
        "denseformer": {"dilation": rng.randint(1, layers), "period": rng.randint(1, layers)},
        "attention_residuals": {
            "block_size": rng.choice((1, 2, 3, 5, 12)),
            "variant": rng.choice(("block_sum", "snapshot")),
        },
        "hyper_connections": {"streams": rng.randint(1, 4), "sinkhorn_iterations": rng.choice((0, 1, 5, 20))},
    }[config["residual"]]
    crosses = recurrence != "once" and view_of(config) != "all"
    grid = {"stride": rng.randint(1, layers), "recent_layers": rng.choice((0, 0, 1, layers))}
    grid["across_trips"] = rng.choice((None, "none", "same_layer", "grid") if crosses else (None, "none"))
    config["mixer_options"] = {
        "none": {},
        "value_residual": {},
        "uniform_depth": grid,
        "depth_attention": grid | {"self_bias": rng.choice((0.0, 0.75))},
    }[config["mixer"]]


def draw_config(rng: random.Random, seed: int) -> dict[str, Any]:
    """A small model; neighbouring seeds have different compositions, 112 of them all there are."""
    heads, kv_heads = rng.choice(((4, 1), (4, 2), (4, 4), (2, 1), (2, 2)))
    layers = rng.choice((2, 2, 3))
    compositions = ARMS if seed >= PAPERS else SHARED if seed >= SHARING else COMPOSITIONS
    config: dict[str, Any] = {
        **dict(zip(NAMES, compositions[seed * 31 % len(compositions)], strict=True)),
        **{"vocab_size": rng.randint(11, 31), "hidden_size": rng.choice((8, 12, 20)), "intermediate_size": 12},
        **{"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        **{"head_dim": rng.choice((4, 6)), "max_position_embeddings": 128, "pad_token_id": 0},
        "rms_norm_eps": rng.choice((1e-6, 1e-2)),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice((1e4, 20.0))},
        "attention_bias": rng.random() < 0.3,
        "tie_word_embeddings": rng.random() < 0.3,
        "k_norm_position": rng.choice(("before_rope", "before_rope", "after_rope")),
        "embedding_scale": rng.choice((1.0, 0.5, 1.7)),
    }
    if rng.random() < 0.25:
        kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
        config |= {"use_sliding_window": True, "sliding_window": rng.randint(2, 5), "layer_types": kinds}
    draw_options(rng, config)
    return config


def draw_rms(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Llama, Qwen2, SmolLM3, Granite: RMS norms before sub-layers."""
    layers = config["num_hidden_layers"]
    return {
        "qk_norm": "none",
        "output_bias": rng.choice((None, False, True)),
        "mlp_bias": rng.random() < 0.3,
        "no_rope_layers": rng.choice((None, [rng.randrange(2) for _ in range(layers)])),
        "residual_multiplier": rng.choice((1.0, 0.4)),
        "logits_scaling": rng.choice((1.0, 3.0)),
        "attention_scale": rng.choice((None, 0.3)),
    }


def draw_parallel(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """GPT-NeoX: LayerNorms, attention and MLP side by side, a part of a head turned."""
    rope = config["rope_parameters"] | {"partial_rotary_factor": rng.choice((0.25, 0.5, 0.75))}
    bias = rng.random() < 0.8
    return {
        **{"norm": "layer", "parallel_residual": rng.random() < 0.85, "gated_mlp": False, "hidden_act": "gelu"},
        **{"head_dim": 8, "rope_parameters": rope, "qk_norm": "none", "attention_bias": bias, "mlp_bias": bias},
    }


def draw_learned(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """GPT-2, OPT, Galactica: learned positions, queries scaled."""
    return {
        **{"norm": rng.choice(("layer", "layer_plain")), "gated_mlp": False, "positions": "learned"},
        **{"position_offset": rng.choice((0, 2)), "scale_queries": rng.random() < 0.7, "qk_norm": "none"},
        **{"hidden_act": rng.choice(("gelu_new", "relu", "gelu")), "mlp_bias": rng.random() < 0.5},
        **{"attention_scale": rng.choice((None, 0.2)), "attention_bias": rng.random() < 0.7},
    }


def draw_after(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """OLMo 2: norms after sub-layers, and over whole projections."""
    placed = {"norm": "rms_wide", "norm_placement": "after", "qk_norm": "full"}
    return {**placed, "rope_float32": rng.random() < 0.7, "residual_multiplier": rng.choice((1.0, 0.6))}


def draw_gemma(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma: norms before and after sub-layers, scaled embeddings, caps, angles by type of layer."""
    kinds = ["sliding_attention", "full_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in zip(kinds, (1e4, 30.0), strict=True)}
    by_type = rng.random() < 0.6
    layered = {"rope_parameters": rope, "use_sliding_window": True, "sliding_window": rng.randint(2, 5)}
    layered["layer_types"] = (kinds * 2)[: config["num_hidden_layers"]]
    return {
        **{"norm": "rms_offset", "norm_placement": rng.choice(("before", "both", "both"))},
        **{"qk_norm": rng.choice(("none", "head")), "hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
        **{"attention_scale": rng.choice((None, 0.25)), "attn_logit_softcapping": rng.choice((None, 1.5, 5.0))},
        **{"final_logit_softcapping": rng.choice((None, 3.0)), "embedding_scale": rng.choice((1.0, 2.8))},
        "round_embedding_scale": rng.random() < 0.5,
        **(layered if by_type else {}),
    }


def draw_any(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Switches of several families in one model, which no family has."""
    parallel = rng.random() < 0.4
    mixed = draw_parallel(rng, config) | draw_gemma(rng, config) | draw_rms(rng, config)
    if rng.random() < 0.4:
        mixed |= {"positions": "learned", "position_offset": rng.randrange(3)}
    return {
        **mixed,
        **{"norm": rng.choice(("rms", "rms_wide", "rms_offset", "layer", "layer_plain"))},
        **{"norm_placement": "before" if parallel else rng.choice(("before", "after", "both"))},
        **{"parallel_residual": parallel, "qk_norm": rng.choice(("head", "full", "none")), "head_dim": 8},
        **{"gated_mlp": rng.random() < 0.5, "scale_queries": rng.random() < 0.5, "rope_float32": rng.random() < 0.5},
    }


BACKBONES: dict[str, Callable[[random.Random, dict[str, Any]], dict[str, Any]]] = {
    "rms": draw_rms,
    "parallel": draw_parallel,
    "learned": draw_learned,
    "after": draw_after,
    "gemma": draw_gemma,
    "any": draw_any,
}
"""Kinds of backbone, by what they set in a configuration of Qwen3's shape."""


def draw(seed: int) -> Case:
    """The case of a seed: a use of a model, and from `OTHERS` on another backbone than Qwen3's."""
    case = draw_use(seed)
    if seed >= NEIGHBOURS:
        draw_neighbour(random.Random(f"neighbour {seed}"), case.config)
    if SHARING <= seed < PAPERS:
        draw_sharing(random.Random(f"sharing {seed}"), case)
    if seed >= PAPERS:
        draw_arm(random.Random(f"arm {seed}"), case.config)
    draw_blend(random.Random(f"blend {seed}"), case.config)
    if seed < OTHERS:
        return case
    rng = random.Random(f"backbone {seed}")
    case.backbone = rng.choice(list(BACKBONES))
    case.config |= BACKBONES[case.backbone](rng, case.config)
    if case.config.get("qk_norm") != "head":
        case.config["k_norm_position"] = "before_rope"
    if case.config.get("attn_logit_softcapping"):
        case.backend = "eager"
    elif rng.random() < 0.5:
        case.backend = "sdpa"
    if seed % 4 == 0:
        case.kind, case.embeds, case.positions, case.grad = rng.choice(MORE), False, False, False
        case.padding, case.steps = rng.choice(("", "left")), [("read", rng.randint(3, 8))]
        case.cache = "default" if case.kind == "generate" else "none"
        options = case.config["recurrence_options"]
        if case.kind == "train" and "jacobi_eval" in options:
            options |= {"gradient_passes": rng.randrange(4), "jacobi_train": [rng.randrange(3)] * 2}
        if case.kind == "train" and case.config["recurrence"] in ("adaponder", "latent_cot"):
            options["skip_dead_rows"] = rng.random() < 0.5
    restrict(case)
    return case


def draw_use(seed: int) -> Case:
    """A use of a model with Qwen3's backbone."""
    rng = random.Random(seed)
    config = draw_config(rng, seed)
    kind = KINDS[(seed + seed // len(COMPOSITIONS)) % len(KINDS)]
    length, batch = rng.choice((rng.randint(3, 5), rng.randint(5, 14))), rng.choice((1, 1, 2, 3))
    caches = ("dynamic", "configured", "default", "static")
    case = Case(seed, config, "eager" if rng.random() < 0.25 else "sdpa", kind, batch, rng.choice(caches), [])
    case.embeds = kind == "embeds" or rng.random() < 0.1
    several = trips_of(config) > 1
    if several and (kind == "budget" or rng.random() < 0.15):
        case.budget = rng.randint(1, trips_of(config))
    if kind in ("left", "holes"):
        case.padding = kind
    elif kind != "packed" and rng.random() < 0.15:
        case.padding = "left"
    if kind == "full" or (kind in ("left", "holes", "budget", "embeds") and rng.random() < 0.4) or kind == "packed":
        case.cache = "default" if kind == "packed" and rng.random() < 0.5 else "none"
        case.steps, case.grad = [("read", length)], case.cache == "none" and rng.random() < 0.5
    elif kind in MUTATIONS:
        case.steps = [("read", length), (kind, rng.randrange(100)), ("read", rng.randint(1, 3))]
        case.steps += [(rng.choice(MUTATIONS), rng.randrange(100)), ("read", 1), ("read", rng.randint(1, 4))]
    else:
        case.steps = draw_chunks(rng, kind, length)
    if kind in ("default", "static"):
        case.cache = kind
    if not case.padding and rng.random() < 0.15:
        case.padding = "ones"
    case.positions = rng.random() < 0.3
    restrict(case)
    if config["recurrence"] == "loop" and rng.random() < 0.7:
        options = config["recurrence_options"]
        options["injection"] = rng.choice(("none", "add", "diagonal", "diagonal"))
        options["norm_between"] = rng.choice(("none", "final", "own"))
        options["entry_norm"] = options["injection"] != "none" and rng.random() < 0.5
        if rng.random() < 0.3:
            options["trips_max"], case.budget = options["trips"] + 1, rng.randint(1, options["trips"] + 1)
    if config["recurrence"] == "ponder" and rng.random() < 0.3:  # more trips than it makes by itself
        most = config["recurrence_options"]["trips"] + 1
        config["recurrence_options"]["trips_range"], case.budget = [1, most], rng.randint(1, most)
    return case


def draw_blend(rng: random.Random, config: dict[str, Any]) -> None:
    """λ of every mechanism that has one, and a loop's damping."""
    for axis in ("mixer", "residual", "recurrence"):
        closed = known()[config[axis]].closed
        if "exit" in config[f"{axis}_options"]:
            continue
        inside = axis == "recurrence" and config["residual"] != "plain" and config[f"{axis}_options"].get("coda")
        if closed and "blend" in closed and not inside and rng.random() < 0.4:
            config[f"{axis}_options"]["blend"] = rng.choice((0.0, 0.25, 0.75))  # numbers of float32, which λ is
    loop = config["recurrence_options"]
    plain = loop.get("injection", "none") == loop.get("norm_between", "none") == "none"
    if config["recurrence"] == "loop" and plain and "exit" not in loop and rng.random() < 0.5:
        damping = rng.choice((0.25, 0.5, 0.8))
        if not (loop.get("coda") and config["residual"] != "plain"):
            loop["damping"] = damping


def draw_neighbour(rng: random.Random, config: dict[str, Any]) -> None:
    """Newer mechanisms and variants, in place of what was drawn."""
    layers = config["num_hidden_layers"]
    if config["recurrence"] == "loop" and rng.random() < 0.4:
        config["recurrence_options"] |= {"coda": 0, "exit": "gate", "exit_threshold": rng.choice((1.0, 0.5, 0.7, 0.9))}
    if rng.random() < 0.4:
        config["residual"] = "mudd"
        ways = "".join(way for way in "qkvr" if rng.random() < 0.6) or "qkvr"
        config["residual_options"] = {
            "ways": rng.choice(("qkvr", ways)),
            "last": rng.choice((None, None, rng.randint(1, layers))),
            "sources": rng.choice(("all", "few")),
            "hidden": rng.choice((None, 3)),
            "norm": rng.choice(("none", "prepost")),
        }
    elif config["residual"] == "attention_residuals" and rng.random() < 0.7:
        config["residual_options"]["variant"] = rng.choice(("delta", "delta_block"))


def draw_sharing(rng: random.Random, case: Case) -> None:
    """What trips share: keys and values, a mixer's sources; and what they do not: a residual's parameters."""
    config = case.config
    loop, mixer, view = config["recurrence_options"], config["mixer_options"], view_of(config)
    if config["recurrence"] == "loop" and rng.random() < 0.5:
        loop["kv"] = "first"
        mixer |= {"across_trips": None} if "across_trips" in mixer else {}
    elif "across_trips" in mixer and view != "all" and rng.random() < 0.6:
        mixer["across_trips"] = "first"
    if config["residual"] == "hyper_connections" and view != "all" and rng.random() < 0.8:
        config["residual_options"]["per_visit"] = True
        loop.pop("trips_max", None)
        loop.pop("trips_range", None)
        case.budget = None if case.budget is None else min(case.budget, trips_of(config))


def draw_arm(rng: random.Random, config: dict[str, Any]) -> None:
    """What the papers compare their methods with."""
    options = config["recurrence_options"]
    if config["mixer"] == "depth_attention":
        config["mixer_options"]["mixes"] = rng.choice(("value", "key", "both", "both"))
    if config["recurrence"] == "ponder":
        views = ("duo", "all") if view_of(config) != "same" else ("same",)
        options["feed"] = rng.choice(("hidden", "projected", *(("pause", "pause") if "all" in views else ())))
    if config["recurrence"] == "adaponder":
        options |= {
            "halting": rng.choice(("shared", "uniform", "geometric")),
            "kept": rng.choice((0.2, 0.5, 0.85, 1.0)),
        }
    if config["recurrence"] == "latent_cot":
        options["router"] = rng.choice(("linear", "mlp"))


def draw_chunks(rng: random.Random, kind: str, length: int) -> list[tuple[str, int]]:
    """A prompt in parts."""
    if kind == "tokens":
        return [("read", 1)] * length
    steps = []
    while length > 0:
        steps.append(("read", min(length, rng.choice((1, 1, 2, 3, 5, 8)) if steps or kind == "chunks" else length)))
        length -= steps[-1][1]
    return steps + [("read", 1)] * rng.randint(1, 3)


def view_of(config: dict[str, Any]) -> str:
    """What a trip reads of others, by the names of docs/explanation/recurrence.md."""
    default = {"ponder2": "all", "ponder3": "all", "latent_cot": "duo"}.get(config["recurrence"], "same")
    return config["recurrence_options"].get("view", default)


def trips_of(config: dict[str, Any]) -> int:
    """Trips that the model makes at most."""
    return config["recurrence_options"].get("trips", 1)


def restrict(case: Case) -> None:
    """Leave out what transformers cannot do: a static cache is only reordered, a sliding one not cropped, and in
    float64 padding under eager attention is NaN, for Qwen3 too (its lowest number is no float32). Windows refuse
    padding between tokens."""
    if case.padding == "holes" and case.config.get("use_sliding_window"):
        case.padding = "left"
    if case.padding not in ("", "ones") and case.precision != "capped":
        case.backend = "sdpa"
    if case.kind in MUTATIONS and case.cache == "static":
        case.cache = "dynamic"
    if "crop" in dict(case.steps) and case.config.get("use_sliding_window"):
        case.cache = "dynamic"


# --- running ----------------------------------------------------------------------------------------------------------


def build(case: Case) -> tuple[FathomForCausalLM, Oracle, np.random.Generator]:
    """The model in float64, every parameter away from its initial value, and its oracle."""
    numbers = np.random.default_rng(case.seed)
    # Trips that feed on all trips before them amplify an error from token to token; rounding is not to grow so far.
    gain = 0.8 if case.backend == "eager" or view_of(case.config) == "all" else 1.3
    torch.manual_seed(case.seed)
    config = FathomConfig(**case.config, attn_implementation=case.backend)
    model = FathomForCausalLM(config).eval().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.as_tensor(numbers.standard_normal(tuple(p.shape)))
            if p.ndim < 2 or "residual_logits" in name:
                p.add_(0.4 * noise)
            else:
                p.copy_(noise if ".embed_" in name else noise * gain / math.sqrt(p.shape[1]))
    model.generation_config.eos_token_id = None
    weights = {name: tensor.numpy(force=True).copy() for name, tensor in model.state_dict().items()}
    if case.backbone == "parallel" and config.num_attention_heads == config.num_key_value_heads:
        read_fused(model, weights)
    return model, Oracle(config.to_dict(), weights, angles_of(model)), numbers


def read_fused(model: FathomForCausalLM, weights: dict[str, np.ndarray]) -> None:
    """Queries, keys and values go through GPT-NeoX's own layout, head by head in one tensor, and its reader."""
    config, state = model.config, model.state_dict()
    rules = [rule for rule in gpt_neox.RULES if len(rule.ours) == 3]
    for rule, layer in itertools.product(rules, range(config.num_hidden_layers)):
        names = [name.replace(LAYER, str(layer)) for name in rule.ours]
        if names[0] in weights:
            heads = [np.split(weights[name], config.num_attention_heads) for name in names]
            fused = np.concatenate([part for head in zip(*heads, strict=True) for part in head])
            for name, part in zip(names, rule.split(torch.as_tensor(fused), config), strict=True):
                state[name].copy_(part)


@dataclass
class Session:
    """A model and its oracle in lockstep."""

    case: Case
    model: FathomForCausalLM
    oracle: Oracle
    numbers: np.random.Generator
    rows: list[Row] = field(default_factory=list)
    mask: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool))
    """`[B, columns]`, False for padding."""
    cache: Cache | None = None
    worst: float = 0.0
    expected: list[np.ndarray] = field(default_factory=list)
    """All that the oracle said."""
    slope: float = 0.0
    """By how much the derivative of a training loss is off."""

    @classmethod
    def of(cls, case: Case, moved: bool = False) -> Session:
        """Nothing read yet; `moved`: by an oracle whose weights are off by their rounding."""
        model, oracle, numbers = build(case)
        if moved:
            noise = np.random.default_rng(0)
            weights = {name: w * (1 + ULP * noise.standard_normal(w.shape)) for name, w in oracle.w.items()}
            oracle = Oracle(oracle.config, weights, oracle.angles)
        session = cls(case, model, oracle, numbers)
        session.rows = [Row(session.oracle.layers) for _ in range(case.batch)]
        session.mask = np.zeros((case.batch, 0), bool)
        room = sum(n for name, n in case.steps if name == "read")
        config = session.model.config
        if case.cache == "static":
            session.cache = StaticCache(config=config, max_cache_len=room)
        elif case.cache in ("dynamic", "configured"):
            session.cache = DynamicCache(config=config) if case.cache == "configured" else DynamicCache()
        return session

    def run(self) -> float:
        """All steps; the worst difference of a logit or a loss, infinite where the numbers of trips disagree."""
        if self.case.kind in MORE:
            length = self.case.steps[0][1]
            self.generate(length) if self.case.kind == "generate" else self.train(length)
            return self.worst
        for name, amount in self.case.steps:
            if name == "read":
                self.read(amount)
            else:
                self.mutate(name, amount)
        return self.worst

    def mutate(self, name: str, amount: int) -> None:
        """Change the cache, and with it the rows."""
        batch, columns = self.mask.shape
        cache = self.cache
        assert cache is not None
        if name == "crop":
            remove = 1 + amount % (columns - 1)
            cache.crop(-remove)
            self.mask = self.mask[:, : columns - remove]
            for row in self.rows:
                row.crop(columns - remove)
            return
        if name == "repeat":
            times = 2 + amount % 2
            chosen = np.repeat(np.arange(batch), times)
            cache.batch_repeat_interleave(times)
        elif name == "select":
            chosen = np.flatnonzero(self.numbers.random(batch) < 0.6)
            chosen = chosen if len(chosen) else np.array([amount % batch])
            cache.batch_select_indices(torch.as_tensor(chosen))
        else:
            chosen = self.numbers.integers(0, batch, batch)
            cache.reorder_cache(torch.as_tensor(chosen))
        self.rows, self.mask = [self.rows[i].copy() for i in chosen], self.mask[chosen]

    def draw_padding(self, length: int) -> np.ndarray:
        """Which of the new columns are tokens."""
        batch, columns = self.mask.shape
        live = np.ones((batch, length), bool)
        if self.case.padding == "left" and not columns:
            live = np.arange(length) >= self.numbers.integers(0, length, (batch, 1))
        if self.case.padding == "holes":
            live = self.numbers.random((batch, length)) < 0.7
            live &= self.numbers.random((batch, 1)) < 0.9  # now and then nothing of a row
            live[0, -1] |= ~live.any()
        return live

    def draw_positions(self, length: int) -> np.ndarray:
        """Rotary indices `[B, length]`: columns, tokens from the row's first, or documents that begin anew."""
        batch, columns = self.mask.shape[0], self.mask.shape[1] - length
        if self.case.kind == "packed":
            cuts = np.sort(
                self.numbers.choice(np.arange(1, length), self.numbers.integers(1, min(4, length)), replace=False)
            )
            row = np.concatenate([np.arange(n) for n in np.diff([0, *cuts, length])])
            return np.tile(row, (batch, 1))
        if self.case.padding in ("left", "holes"):
            return np.maximum(self.mask.cumsum(1) - 1, 0)[:, columns:]
        return np.tile(np.arange(columns, columns + length) + (3 if self.case.positions else 0), (batch, 1))

    def arguments(self, ids: np.ndarray, x: np.ndarray, positions: np.ndarray) -> dict[str, Any]:
        """Of a forward call, as the case wants it made."""
        case = self.case
        call: dict[str, Any] = {"input_ids": torch.as_tensor(ids)}
        if case.embeds:
            call = {"inputs_embeds": torch.as_tensor(x)}
        if case.padding:
            call["attention_mask"] = torch.as_tensor(self.mask).long()
        if case.positions or case.kind == "packed":
            call["position_ids"] = torch.as_tensor(positions)
        if case.budget is not None:
            call["max_trips"] = case.budget
        if case.cache == "none":
            call["use_cache"] = False
        elif self.cache is not None:
            call["past_key_values"] = self.cache
        elif len(case.steps) > 1:
            call["use_cache"] = True
        return call

    def read(self, length: int) -> None:
        """The model reads new tokens, and so does the oracle."""
        case, (batch, columns) = self.case, self.mask.shape
        live = self.draw_padding(length)
        self.mask = np.concatenate([self.mask, live], 1)
        positions = self.draw_positions(length)
        table = self.oracle.w["model.embed_tokens.weight"]
        ids = self.numbers.integers(1, len(table), (batch, length))
        x = self.numbers.standard_normal((batch, length, table.shape[1])) if case.embeds else table[ids]
        with nullcontext() if case.grad else torch.no_grad():
            out = self.model(**self.arguments(ids, x, positions))
        self.cache = out.past_key_values
        rounds = self.rounds()
        for i in np.flatnonzero(live.any(1)):
            tokens = [Token(columns + t, int(positions[i, t]), x[i, t]) for t in np.flatnonzero(live[i])]
            expected, trips = self.expect(i, tokens, rounds)
            self.expected.append(expected)
            self.worst = max(self.worst, deviation(out.logits[i].numpy(force=True)[live[i]], expected))
            if out.trips is not None and out.trips[i].numpy(force=True)[live[i]].tolist() != trips:
                self.worst = math.inf

    def prompt(self, length: int) -> tuple[np.ndarray, list[list[Place]]]:
        """Ids `[B, length]`, and every row's tokens, for a call of its own; `mask` says what is not padding."""
        self.mask = self.draw_padding(length)
        positions = self.draw_positions(length)
        ids = self.numbers.integers(1, len(self.oracle.table), self.mask.shape)
        return ids, [
            [(int(t), int(positions[i, t]), int(ids[i, t])) for t in np.flatnonzero(live)]
            for i, live in enumerate(self.mask)
        ]

    def generate(self, length: int) -> None:
        """The model continues a prompt greedily; the oracle reads what it says."""
        ids, rows = self.prompt(length)
        budget = {} if self.case.budget is None else {"max_trips": self.case.budget}
        heard: list[Any] = []  # `generate` itself gives logits in float32
        self.model.register_forward_hook(lambda model, inputs, out: heard.append(out.logits[:, -1].numpy(force=True)))
        mask = torch.as_tensor(self.mask).long()
        said = self.model.generate(
            torch.as_tensor(ids), attention_mask=mask, max_new_tokens=4, do_sample=False, **budget
        ).numpy(force=True)
        for i, places in enumerate(rows):
            for k, logits in enumerate(heard):
                expected, _ = self.expect(i, embedded(self.oracle, places), self.rounds(prefill=True))
                self.expected.append(expected)
                self.worst = max(self.worst, deviation(logits[i], expected[-1]))
                places = [(length + k, places[-1][1] + 1, int(said[i, length + k]))]

    def train(self, length: int) -> None:
        """A training step: its loss without penalties, and how it changes along a random direction of all weights,
        where the passes that `gradient_passes` leaves out stay as they are."""
        ids, rows = self.prompt(length)
        model, oracle, recurrence = self.model.train(), self.oracle, self.model.model.recurrence
        if "exit" in oracle.options:  # in training the last trip is read out
            oracle.options["exit_threshold"] = 1.0
        depth = (self.case.budget or recurrence.drawn_trips) - 1
        first = self.mask.cumsum(1) == 1  # nothing comes before it but padding
        labels = np.where(self.mask & ~first & (self.numbers.random(ids.shape) < 0.9), ids, -100)
        call = {"input_ids": torch.as_tensor(ids), "labels": torch.as_tensor(labels)}
        call |= {"attention_mask": torch.as_tensor(self.mask).long()} if self.case.padding else {}
        call |= {} if self.case.budget is None else {"max_trips": self.case.budget}
        out = model(**call)
        loss = out.loss - sum((out.aux_losses or {}).values())
        loss.backward()

        rounds = recurrence.drawn_rounds if oracle.view == "all" else None
        kept = recurrence.gradient_passes
        first_passes = max(depth + 1 + rounds - kept, 0) if kept and rounds is not None else 0

        def expected(weights: dict[str, np.ndarray]) -> float:
            moved, found = Oracle(oracle.config, weights, oracle.angles), []
            for places in rows:
                held = Held(first_passes, oracle, embedded(oracle, places))
                tokens = embedded(moved, places)
                found.append(moved.read(Row(oracle.layers), tokens, depth, rounds, held)[0])
            oracle.margin = min(oracle.margin, moved.margin)
            return mean_loss(found, rows, labels)

        self.expected.append(np.array(expected(oracle.w)))
        self.worst = deviation(np.array(loss.item()), self.expected[0])
        if oracle.margin < STEEP or oracle.config["hidden_act"] == "relu":
            return  # the loss has an edge nearby
        slopes = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        way = {name: self.numbers.standard_normal(p.shape) for name, p in model.named_parameters()}
        size = math.sqrt(sum((v**2).sum() for v in way.values()))
        found = sum((slopes[name].numpy(force=True) * way[name]).sum() for name in slopes) / size

        def moved(by: float) -> float:
            return expected(oracle.w | {name: oracle.w[name] + by / size * v for name, v in way.items()})

        for weights, stride in DIFFERENCES:
            pairs = enumerate(weights, 1)
            along = sum(w * (moved(n * stride) - moved(-n * stride)) for n, w in pairs) / stride
            self.slope = abs(found - along)
            if self.slope <= SLOPE[self.case.precision]:
                return
        self.worst = math.inf

    def rounds(self, prefill: bool = False) -> int | None:
        """Of the solver in this call; None where a call is exact."""
        options = self.oracle.options
        if self.oracle.view != "all" or options["prefill"] == "exact":
            return None
        return options["jacobi_eval" if self.cache is None and not prefill else "jacobi_prefill"]

    def expect(self, i: int, tokens: list[Token], rounds: int | None) -> tuple[np.ndarray, list[int]]:
        """Logits and trips by the oracle; packed documents are rows of their own, unless there is a mask."""
        depth = self.oracle.depth if self.case.budget is None else self.case.budget - 1
        if self.case.kind != "packed" or self.case.padding:
            return self.oracle.read(self.rows[i], tokens, depth, rounds)
        cuts = [t for t, token in enumerate(tokens) if token.position == 0]
        parts = [
            self.oracle.read(Row(self.oracle.layers), tokens[a:b], depth, rounds)
            for a, b in itertools.pairwise([*cuts, len(tokens)])
        ]
        return np.concatenate([logits for logits, _ in parts]), [k for _, trips in parts for k in trips]


def embedded(oracle: Oracle, places: Iterable[Place]) -> list[Token]:
    """Tokens by their columns, positions and ids."""
    table = oracle.w["model.embed_tokens.weight"]
    return [Token(column, position, table[word]) for column, position, word in places]


def mean_loss(logits: list[np.ndarray], rows: list[list[Place]], labels: np.ndarray) -> float:
    """Mean cross-entropy of the labels `[B, T]`, each predicted one column before."""
    losses = [
        z.max() + np.log(np.exp(z - z.max()).sum()) - z[labels[i, column + 1]]
        for i, places in enumerate(rows)
        for (column, _, _), z in zip(places, logits[i], strict=True)
        if column + 1 < labels.shape[1] and labels[i, column + 1] >= 0
    ]
    return float(np.sum(losses) / max(len(losses), 1))


def deviation(found: np.ndarray, expected: np.ndarray) -> float:
    """Of the worst logit; infinite where one is no number."""
    error = np.abs(found - expected).max()
    return float(error) if np.isfinite(error) else math.inf


def judge(case: Case) -> tuple[float, float, float]:
    """Worst deviation, the margin of the nearest decision, and by how much a derivative is off."""
    session = Session.of(case)
    return session.run(), session.oracle.margin, session.slope


def rounding(case: Case) -> float:
    """How far the oracle's own numbers move if every weight does by its rounding: some cases amplify it."""
    here, there = Session.of(case), Session.of(case, moved=True)
    here.run(), there.run()
    return max(deviation(a, b) for a, b in zip(here.expected, there.expected, strict=True))


def is_right(case: Case, worst: float) -> bool:
    """Whether a deviation is within tolerance, or no more than rounding is amplified to."""
    return worst <= TOLERANCE[case.precision] or (worst < AMPLIFIED and worst <= rounding(case))


def undecided(case: Case, margin: float, worst: float) -> bool:
    """Whether rounding could have decided otherwise somewhere, or moves the oracle's own numbers by as much as the
    model deviates, and by more than is excused."""
    return margin < UNDECIDED[case.precision] or (AMPLIFIED <= worst < math.inf and worst <= rounding(case))


def check(seeds: Iterable[int]) -> Counter[str]:
    """Run cases; the first that deviates is an error that says how to run it again."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        case = draw(seed)
        try:
            worst, margin, _ = judge(case)
        except Exception as error:
            raise AssertionError(f"{case}\nraised {error!r}") from error
        open_question = undecided(case, margin, worst)
        assert open_question or is_right(case, worst), f"{case}\ndeviates by {worst:.3g}"
        seen.update({"cases": 1, "undecided": open_question, "alone": case.batch == 1})
    return seen


# --- tests ------------------------------------------------------------------------------------------------------------

FIXED = (
    *(0, 5, 7, 10, 11, 12, 23, 27, 29, 31),
    *(10007, 10016, 10019, 10026, 10033, 10039, 10053, 10059, 10087, 10093, 10094, 10100),
    *(10102, 10106, 10109, 10113, 10131, 10137, 10138, 10142, 10147, 10153, 10155),
    *(24022, 24043, 24054, 24063, 24077),
    *(50, 64, 100, 131, 143),
)
"""The last five are the only ones that notice a gate that never shuts, halts that outlive a crop, a router that is not
damped, a loop whose mixers do not read earlier trips, and a budget whose last trip does not get what is left."""


@pytest.mark.parametrize("seed", FIXED)
def test_a_random_use_of_a_random_model(seed: int):
    check([seed])


@pytest.mark.parametrize(("moves", "open_question"), [(6e-6, True), (1e-6, False)])
def test_no_more_than_amplified_rounding_leaves_a_case_open(
    moves: float, open_question: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys.modules[__name__], "rounding", lambda case: moves)
    case = draw(0)
    assert undecided(case, math.inf, 2e-6) is open_question and not is_right(case, 2e-6)
    assert not undecided(case, math.inf, math.inf), "a wrong number of iterations, or no number"


@pytest.mark.slow
def test_a_case_that_amplifies_rounding_is_not_judged():
    """Over 14 tokens, thoughts that are fed back make 1e-6 of the last bit, in the model as in the oracle: computed in
    80 bits, the logit lies between theirs."""
    assert check([738560965])["undecided"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_random_uses_that_were_never_seen(part: int, capfd: pytest.CaptureFixture[str]):
    start = random.SystemRandom().randrange(OTHERS, 10**9)
    with capfd.disabled():
        print(f"\noracle: seeds {start} to {start + 99}", file=sys.stderr, flush=True)
    assert check(range(start, start + 100))["undecided"] <= 5


def test_draws_reach_everything():
    """The fixed cases every name on every axis, every kind of call and of backbone; a thousand, whatever can be
    chosen."""
    fixed, many = [draw(seed) for seed in FIXED], [draw(seed) for seed in range(1000)]
    later = {draw(seed).config["residual"] for seed in range(NEIGHBOURS, NEIGHBOURS + 100)}
    sharing = [draw(seed).config for seed in range(SHARING, SHARING + 100)]
    assert {"first", None} == {config["recurrence_options"].get("kv") for config in sharing}
    assert {True, None} == {config["residual_options"].get("per_visit") for config in sharing}
    assert "first" in {config["mixer_options"].get("across_trips") for config in sharing}
    arms = [draw(seed).config for seed in range(PAPERS, PAPERS + 100)]
    assert {"value", "key", "both"} == {config["mixer_options"].get("mixes", "value") for config in arms}
    recurrences = [config["recurrence_options"] for config in arms]
    assert {"hidden", "projected", "pause"} == {options["feed"] for options in recurrences if "feed" in options}
    assert {"shared", "uniform", "geometric"} == {options["halting"] for options in recurrences if "halting" in options}
    for axis, names in NAMES.items():
        assert {case.config[axis] for case in fixed} | (later if axis == "residual" else set()) == set(names), axis
    assert {case.kind for case in fixed} == {*KINDS, *MORE} and {case.precision for case in fixed} == set(TOLERANCE)
    assert {case.backbone for case in fixed} == {"qwen3", *BACKBONES}
    others = [draw(seed).config for seed in range(NEIGHBOURS, NEIGHBOURS + 1000)]
    for key, values in {name: CHOICES[name] for name in CHOICES if name != "output_init"}.items():
        assert {config.get(key, values[0]) for config in others} == set(values)
    assert {config["recurrence_options"].get("gradient_passes", 0) for config in others} == {0, 1, 2, 3}
    assert sum(case.batch == 1 for case in fixed) >= 10
    assert len({tuple(case.config[axis] for axis in NAMES) for case in many}) == len(COMPOSITIONS) == 112

    def drawn(place: str, key: str, **only: Any) -> set[Any]:
        configs = [case.config for case in many if only.items() <= case.config.items()]
        found = configs if place == "config" else [config[f"{place}_options"] for config in configs]
        return {options[key] for options in found if key in options}

    assert drawn("residual", "sinkhorn_iterations") == {0, 1, 5, 20}
    assert drawn("residual", "variant") == {"block_sum", "snapshot"}
    assert drawn("mixer", "across_trips") == {None, "none", "same_layer", "grid"}
    assert drawn("recurrence", "view") == {"same", "duo", "all"} and drawn("recurrence", "feed") == {
        "mixture",
        "hidden",
    }
    assert drawn("recurrence", "prefill", recurrence="ponder2") == {"jacobi", "exact"}
    assert drawn("recurrence", "prelude") == drawn("recurrence", "coda") == {0, 1, 2}
    assert drawn("recurrence", "injection") == {"none", "add", "diagonal"}
    assert drawn("recurrence", "norm_between") == {"none", "final", "own"}
    assert drawn("recurrence", "entry_norm") == {False, True}
    assert drawn("residual", "dilation") == drawn("residual", "period") == {1, 2, 3}
    for key in ("attention_bias", "tie_word_embeddings", "k_norm_position"):
        assert len(drawn("config", key)) == 2
    assert any(case.budget and case.budget > trips_of(case.config) for case in many)
    groups = {case.config["num_attention_heads"] // case.config["num_key_value_heads"] for case in many}
    assert groups == {1, 2, 4} and len(drawn("config", "sliding_window")) == 4
    assert {case.cache for case in many} == {"none", "default", "dynamic", "configured", "static"}
    assert {case.padding for case in many} == {"", "ones", "left", "holes"} and {case.grad for case in many} == {
        True,
        False,
    }


# --- planted faults: an oracle that cannot see them is worthless ------------------------------------------------------


def lone_survivor_sees_all(patch: pytest.MonkeyPatch) -> None:
    """One token that goes on is taken for one token that is decoded."""
    masks = walk.Stored._masks

    def faulty(self: walk.Stored, query: Any, placement: Any, trip: int) -> dict[str, Any]:
        alone = query.token.shape[1] == 1 and placement.slot is None and trip >= self.store.table.deepest
        return dict.fromkeys(self.model.reach) if alone else masks(self, query, placement, trip)

    patch.setattr(walk.Stored, "_masks", faulty)


def raw_values_cached(patch: pytest.MonkeyPatch) -> None:
    """As in the published code: later calls read the past as it was before mixing."""
    mix, update, raw = DepthAttention.forward, DynamicLayer.update, []

    def forward(self: DepthAttention, query: Any, key: Any, value: Any, sources: Any) -> Any:
        raw[:] = [value]
        return mix(self, query, key, value, sources)

    def store(self: DynamicLayer, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = update(self, key, raw[0], *args, **kwargs)
        return keys, torch.cat([values[:, :, : -value.shape[2]], value], 2)

    patch.setattr(DepthAttention, "forward", forward)
    patch.setattr(DynamicLayer, "update", store)


def trips_take_positions(patch: pytest.MonkeyPatch) -> None:
    """A later trip is rotated as if it were a later token."""
    through = walk.TripMaker.through

    def faulty(self: walk.TripMaker, x: Any, found: walk.Pass) -> walk.Passed:
        found.rotation = signed(self.model.rotary_emb(x, found.position_ids + found.visits[0].trip))
        return through(self, x, found)

    patch.setattr(walk.TripMaker, "through", faulty)


def halts_of_the_next_column(patch: pytest.MonkeyPatch) -> None:
    """The last trip of a token is looked up one column too far, where slots are read under a mask."""
    tags = SlotTable.tags

    def faulty(self: SlotTable, placement: Any) -> Any:
        found = tags(self, placement)
        halt = self.halt if placement.batch is None else self.halt[placement.batch]
        found.halt = halt.gather(1, (found.token + 1).clamp(0, halt.shape[1] - 1).expand(len(halt), -1))
        return found

    patch.setattr(SlotTable, "tags", faulty)
    patch.setattr(slot_table, "gathering_pays", lambda *sizes: False)


def slots_of_the_trip_before(patch: pytest.MonkeyPatch) -> None:
    """Gathered are the slots that an earlier trip reads."""
    narrow = SlotTable.narrow

    def faulty(self: SlotTable, placement: Any, query: Any, trip: int, alone: bool) -> Any:
        return narrow(self, placement, query, max(trip - 1, 0), alone)

    patch.setattr(SlotTable, "narrow", faulty)


def fixed_places_left_empty(patch: pytest.MonkeyPatch) -> None:
    """Trips that a token did not make have nothing in their fixed places."""
    patch.setattr(walk, "repeat_last", lambda *where: None)


def one_round_more(patch: pytest.MonkeyPatch) -> None:
    """The solver makes another round than was asked for."""
    rounds = Solved.rounds
    patch.setattr(Solved, "rounds", lambda *args: rounds(*args) + 1)


def windows_one_wider(patch: pytest.MonkeyPatch) -> None:
    """A sliding window of slots reaches one token too far back."""
    mask = reading.read_mask

    def faulty(view: Any, query: Any, key: Any, reach: int | None, dtype: Any) -> Any:
        return mask(view, query, key, None if reach is None else reach + 1, dtype)

    patch.setattr(walk, "read_mask", faulty)


def fused_in_thirds(patch: pytest.MonkeyPatch) -> None:
    """GPT-NeoX's fused tensor is read as all queries, all keys, all values."""
    thirds = [replace(r, split=lambda x, config: x.chunk(3)) if len(r.ours) == 3 else r for r in gpt_neox.RULES]
    patch.setattr(gpt_neox, "RULES", tuple(thirds))


def last_channels_turned(patch: pytest.MonkeyPatch) -> None:
    """The last channels of a head are turned, not the first."""
    right = modeling.rotate

    def faulty(query: Any, key: Any, cos: Any, sin: Any) -> Any:
        rest = query.shape[-1] - cos.shape[-1]
        moved = right(query.roll(-rest, -1), key.roll(-rest, -1), cos, sin)
        return tuple(x.roll(rest, -1) for x in moved)

    patch.setattr(modeling, "rotate", faulty)


def one_norm_for_two(patch: pytest.MonkeyPatch) -> None:
    """The MLP of a parallel layer reads what attention's norm made."""

    def faulty(self: modeling.DecoderLayer, x: Any) -> Any:
        return self.multiplier * self.mlp(self.input_layernorm(x))

    patch.setattr(modeling.DecoderLayer, "mix_channels", faulty)


def positions_in_every_trip(patch: pytest.MonkeyPatch) -> None:
    """Learned positions are added to the input of later trips as well."""
    through = walk.TripMaker.through

    def faulty(self: walk.TripMaker, x: Any, one: walk.Pass) -> walk.Passed:
        later = one.visits[0].trip > 0
        return through(self, self.model._with_learned_positions(x, one.position_ids) if later else x, one)

    patch.setattr(walk.TripMaker, "through", faulty)


def biases_under_the_cap(patch: pytest.MonkeyPatch) -> None:
    """What `ponder3` adds to a key's logit is capped with it."""

    def faulty(self: walk.Interleaved, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.capped, self.causal = False, set(self.model.reach.values()) == {None}

    start = walk.Interleaved.__init__
    patch.setattr(walk.Interleaved, "__init__", faulty)


def gradients_of_one_pass_more(patch: pytest.MonkeyPatch) -> None:
    """Gradients flow through one pass more than `gradient_passes` says."""
    solve = walk.jacobi
    patch.setattr(walk, "jacobi", lambda *args, kept=0, **rest: solve(*args, kept=kept and kept + 1, **rest))


def keys_of_every_trip(patch: pytest.MonkeyPatch) -> None:
    """Later trips make keys and values of their own where they should read the first one's."""
    patch.setattr(Loop, "shares", classmethod(lambda cls, config: False))


def sources_at_every_visit(patch: pytest.MonkeyPatch) -> None:
    """Sources that are to be taken once are taken in every trip, as in Nanbeige's public code."""
    rule = slots.across_trips
    patch.setattr(slots, "across_trips", lambda config: "grid" if rule(config) == "first" else rule(config))


def residuals_of_the_first_trip(patch: pytest.MonkeyPatch) -> None:
    """All trips read and write by the first one's hyper-connections."""
    patch.setattr(sublayers, "residuals", lambda layer, trip: (layer.attn_residual, layer.mlp_residual))


def padding_attended_to(patch: pytest.MonkeyPatch) -> None:
    """The padding mask does not reach the trips, as in recurrent-pretraining's public code."""
    make = walk.TripMaker.causal_masks
    patch.setattr(walk.TripMaker, "causal_masks", lambda self, x, padding, packed: make(self, x, None, packed))


def padding_counted(patch: pytest.MonkeyPatch) -> None:
    """A mask alone moves no position."""
    count = modeling.FathomModel._positions
    patch.setattr(modeling.FathomModel, "_positions", lambda self, seen, x, mask: count(self, seen, x, None))


def rotated_keys_scored(patch: pytest.MonkeyPatch) -> None:
    """Mixers score rotated queries and keys, also where layers rotate differently."""
    patch.setattr(FathomConfig, "mixes_unrotated", False)


def trips_drawn_in_evaluation(patch: pytest.MonkeyPatch) -> None:
    """Evaluation draws a number of trips, as Parcae's public code does."""
    rng = random.Random(0)
    patch.setattr(modeling.FathomModel, "trips_asked", lambda self, most: rng.randint(1, self.recurrence.trips))


def raw_keys_stored(patch: pytest.MonkeyPatch) -> None:
    """Keys are mixed for nobody: attention and the cache get the layer's own."""
    mix = DepthAttention.with_keys
    patch.setattr(DepthAttention, "with_keys", lambda self, query, key, *rest: (key, mix(self, query, key, *rest)[1]))


def pause_unscaled(patch: pytest.MonkeyPatch) -> None:
    """The pause is no word: it is fed at the scale of the table."""
    start = Ponder.__init__

    def faulty(self: Ponder, config: Any) -> None:
        start(self, config)
        self.embedding_scale = 1.0

    patch.setattr(Ponder, "__init__", faulty)


def pauses_under_the_solver(patch: pytest.MonkeyPatch) -> None:
    """Pauses are told from the pass before, as hidden states are, and no round is left out."""
    feed = Ponder.feed
    patch.setattr(Ponder, "feed", lambda self, x, out, state: feed(self, x, out, state) + 0.1 * out.hidden)


def projector_transposed(patch: pytest.MonkeyPatch) -> None:
    """The hidden state is multiplied from the other side."""
    patch.setattr(Ponder, "feed", lambda self, x, out, state: self.blended(x, out.hidden @ self.projector.weight))


def share_of_the_trip_before(patch: pytest.MonkeyPatch) -> None:
    """A fixed schedule lags by a trip."""
    share = AdaponderOptions.share
    patch.setattr(AdaponderOptions, "share", lambda self, trip: share(self, trip - 1))


def shared_gate_asked_once(patch: pytest.MonkeyPatch) -> None:
    """A token's first answer stands for all trips."""
    gate = Adaponder.gate

    def faulty(self: Adaponder, out: Any, state: Any) -> Any:
        made = gate(self, out, state)
        return made | {key: state[key] for key in ("sigma", "alive") if out.trip and key in made}

    patch.setattr(Adaponder, "gate", faulty)


def gates_without_gelu(patch: pytest.MonkeyPatch) -> None:
    """A gate's two layers are one."""
    patch.setattr(GateMLP, "forward", lambda self, hidden: self.down(self.up(hidden)))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    padding_attended_to: 22000,
    trips_drawn_in_evaluation: 22011,
    lone_survivor_sees_all: 79,
    raw_values_cached: 47,
    trips_take_positions: 5,
    halts_of_the_next_column: 57,
    slots_of_the_trip_before: 57,
    fixed_places_left_empty: 877,
    one_round_more: 13,
    windows_one_wider: 10,
    fused_in_thirds: 10042,
    last_channels_turned: 10010,
    one_norm_for_two: 10037,
    positions_in_every_trip: 10014,
    biases_under_the_cap: 10075,
    gradients_of_one_pass_more: 10172,
    keys_of_every_trip: 22013,
    sources_at_every_visit: 22003,
    residuals_of_the_first_trip: 22007,
    padding_counted: 10019,
    rotated_keys_scored: 10039,
}
"""Each with a seed that sees it."""
ARM_FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "mixes=key": (raw_keys_stored, 24029),
    "mixes=both": (raw_keys_stored, 24011),
    "feed=projected": (projector_transposed, 24077),
    "feed=pause": (pause_unscaled, 24118),
    "feed=pause, solved": (pauses_under_the_solver, 24079),
    "halting=shared": (shared_gate_asked_once, 24082),
    "halting=uniform": (share_of_the_trip_before, 24020),
    "halting=geometric": (share_of_the_trip_before, 24084),
    "router=mlp": (gates_without_gelu, 24043),
}
"""A fault of every arm by which papers argue, and a seed that sees it."""


@pytest.mark.parametrize(
    ("fault", "seed"),
    [
        *(pytest.param(fault, seed, id=fault.__name__) for fault, seed in FAULTS.items()),
        *(pytest.param(*planted, id=arm, marks=pytest.mark.slow) for arm, planted in ARM_FAULTS.items()),
    ],
)
def test_planted_faults_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
):
    check([seed])
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=rf"seed {seed}:[\s\S]*deviates by"):
        check([seed])


def main() -> None:
    """Replay a seed, or as many as a second number says from there on."""
    first, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    worst: Counter[str] = Counter()
    failed, doubtful = [], 0
    for seed in range(first, first + count):
        case = draw(seed)
        try:
            found, margin, _ = judge(case)
        except Exception:
            print(case)
            raise
        if undecided(case, margin, found):
            doubtful += 1
        elif not is_right(case, found):
            failed.append(seed)
        else:
            worst[case.precision] = max(worst[case.precision], found)
        if count == 1:
            print(f"{case}\ndeviates by {found:.3g}; nearest decision {margin:.3g}")
    print(f"{count} cases: {len(failed)} deviate {failed}, {doubtful} undecided, worst of the others {dict(worst)}")


if __name__ == "__main__":
    main()
