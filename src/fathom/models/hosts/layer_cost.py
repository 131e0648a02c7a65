"""Estimate the cost of a family's layers from the shapes of their parameters on the meta device.

Every matrix counts twice per token, the experts' by their share that a token visits, a convolution by its kernel. A
state is updated and read as in decoding: training in chunks makes more products, and pads a text to whole chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING

from ..axes.fields import DecoderConfig
from ..axes.roles import Cost
from ..axes.visit import Visit
from ..registry import mechanism
from .build import native_config
from .latent import one_head
from .layout import Layout


@dataclass(frozen=True)
class LayerCost:
    """One layer, per token."""

    flops: float
    """The FLOPs of everything but scores."""
    flops_per_key: int
    """The FLOPs of scores and weighted sum, for each key that is read."""
    stored: int
    """Numbers in the cache. A state, whose size no text changes, has none."""
    idle: int
    """Parameters of experts that a token does not visit."""
    kept: int
    """Numbers that training keeps for the backward pass: what every matrix makes, and what norms, gates and rotations
    make of it; of an expert its input too, since experts read copies. What a state keeps in chunks of a text, up to
    half as much again, is left out."""


def layer_costs(config: DecoderConfig) -> tuple[LayerCost, ...]:
    """The costs of all layers of a hosted decoder."""
    return _costs(_ByShape(config))


class _ByShape:
    """A key for caching costs: configurations of the same family and shape compare equal."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config, self.key = config, (config.host, repr(config.native))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByShape) and self.key == other.key


@cache
def _costs(asked: _ByShape) -> tuple[LayerCost, ...]:
    config, theirs = asked.config, native_config(asked.config)
    with torch.device("meta"):
        decoder = MODEL_MAPPING[type(theirs)](theirs)
    keyed = config.keyed_layers
    return tuple(_cost(layer, config, theirs, i in keyed) for i, layer in enumerate(decoder.layers))


def _cost(layer: nn.Module, config: DecoderConfig, theirs: Any, keyed: bool) -> LayerCost:
    flops, idle, kept = 0.0, 0.0, 4.0 * config.hidden_size
    routers = (cast(Any, m).top_k for m in layer.modules() if isinstance(getattr(m, "top_k", None), int))
    # Gemma 4's router asks its configuration.
    chosen: int | None = next(routers, getattr(theirs, "top_k_experts", None))
    for part in layer.modules():
        for name, weight in part.named_parameters(recurse=False):
            visited = _visited(part, weight, chosen)
            multiplied = weight.ndim > 1 and not name.endswith("bias")
            flops += 2 * visited * weight.numel() if multiplied else 0
            idle += (1 - visited) * weight.numel()
            if multiplied:
                stacked = weight.ndim == 3 and "Experts" in type(part).__name__
                inner = weight.numel() / len(weight) / config.hidden_size
                kept += visited * len(weight) * (sum(weight.shape[1:]) + inner) if stacked else 2 * len(weight)
    beside = round(idle), round(kept)
    if not keyed:
        return LayerCost(flops + _state_flops(layer), 0, 0, *beside)
    heads = config.num_attention_heads
    if _layout(config).latent:
        query, value = theirs.qk_nope_head_dim + theirs.qk_rope_head_dim, theirs.v_head_dim
        return LayerCost(flops, 2 * heads * (query + value), theirs.kv_lora_rank + theirs.qk_rope_head_dim, *beside)
    attention: Any = getattr(layer, next(name for name in _layout(config).token if hasattr(layer, name)))
    head = getattr(attention, "head_dim", config.head_dim)  # Gemma 4's differ by layer
    groups = getattr(attention, "num_key_value_groups", heads // config.num_key_value_heads)
    return LayerCost(flops, 4 * heads * head, 2 * (heads // groups) * head, *beside)


def _visited(part: nn.Module, weight: Tensor, chosen: int | None) -> float:
    """The share of a parameter that one token uses: below 1 only for stacked experts of which `chosen` are visited."""
    experts = getattr(part, "num_experts", 0)
    stacked = weight.ndim > 1 and "Experts" in type(part).__name__ and len(weight) == experts
    return chosen / experts if stacked and chosen is not None else 1.0


def _state_flops(layer: nn.Module) -> int:
    """The FLOPs of updating and reading a recurrent state per token: three products of key and value size for each
    head."""
    for part in cast(Any, layer.modules()):
        if hasattr(part, "head_k_dim") and hasattr(part, "num_v_heads"):
            return 6 * part.num_v_heads * part.head_k_dim * part.head_v_dim
        if hasattr(part, "qkv_dim"):
            return 6 * part.qkv_dim * part.head_dim
        if hasattr(part, "ssm_state_size"):
            return 6 * part.intermediate_size * part.ssm_state_size
    return 0


def mixer_cost(config: DecoderConfig, visits: Sequence[Visit], scalar: int) -> Cost:
    """A mixer's cost in a hosted decoder; with latents (MLA) it is that of one head, plus making that head's query."""
    cost = mechanism("mixer", config.mixer).cost
    if not _layout(config).latent:
        return cost(config, visits, scalar)
    theirs, mixing = native_config(config), [len(visit.sources) + 1 for visit in visits if visit.sources]
    query = 2 * config.num_attention_heads * theirs.qk_nope_head_dim * theirs.kv_lora_rank
    beyond = len(mixing) * query + 2 * theirs.qk_rope_head_dim * sum(mixing)
    return cost(one_head(config, theirs), visits, scalar) + Cost(flops=beyond)


def _layout(config: DecoderConfig) -> Layout:
    return Layout.all_of(config)[0]
