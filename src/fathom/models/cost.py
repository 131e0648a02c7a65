"""What a forward pass costs, by arithmetic: parameters, FLOPs, cache.

FLOPs are per token and count a multiply-add as two. Causal attention is counted once, (T + 1) / 2 positions; the
head is counted, the embedding look-up is not. A training step is three forward passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .registry import AXES, mechanism
from .roles import Cost

if TYPE_CHECKING:
    from .configuration import FathomConfig


def count_parameters(config: FathomConfig) -> int:
    """Exactly, from the shapes of a model without memory."""
    from .modeling import FathomForCausalLM

    with torch.device("meta"):
        model = FathomForCausalLM(config)
    return sum(p.numel() for p in model.parameters())


def layer_flops(config: FathomConfig) -> int:
    """The matrix products of one layer, attention scores left out."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    return 2 * (attention + 3 * config.hidden_size * config.intermediate_size)


def layer_cache_bytes(config: FathomConfig, bytes_per_scalar: int = 2) -> int:
    """One layer's key and value of one token."""
    return 2 * config.num_key_value_heads * config.head_dim * bytes_per_scalar


def attention_flops(config: FathomConfig, sequence_length: int) -> float:
    """Scores and weighted sum of one layer, averaged over the positions of a causal sequence."""
    return 4 * config.num_attention_heads * config.head_dim * (sequence_length + 1) / 2


def mechanism_cost(config: FathomConfig, bytes_per_scalar: int = 2) -> Cost:
    """What the three axes add to the vanilla decoder, attention scores of further trips left out."""
    total = Cost()
    for axis in AXES:
        total = total + mechanism(axis, getattr(config, axis)).cost(config, bytes_per_scalar)
    return total


def flops_per_token(config: FathomConfig, sequence_length: int) -> float:
    """One forward pass, mechanisms included."""
    from .slots import plan

    visits = sum(len(trip) for trip in plan(config))
    head = 2 * config.hidden_size * config.vocab_size
    vanilla = config.num_hidden_layers * layer_flops(config) + head
    return vanilla + visits * attention_flops(config, sequence_length) + mechanism_cost(config).flops


def cache_bytes_per_token(config: FathomConfig, bytes_per_scalar: int = 2) -> int:
    """Keys and values of one token in every layer and trip."""
    vanilla = config.num_hidden_layers * layer_cache_bytes(config, bytes_per_scalar)
    return vanilla + mechanism_cost(config, bytes_per_scalar).cache_bytes
