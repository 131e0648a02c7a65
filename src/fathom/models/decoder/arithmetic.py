"""Formulas for the FLOPs, parameters and cache bytes of one layer, on which `cost.py` and the mechanisms build."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .head import is_called

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


def layer_flops(config: DecoderConfig) -> int:
    """FLOPs per token of one layer's projections and MLP, without attention scores."""
    attention = config.hidden_size * config.head_dim * 2 * (config.num_attention_heads + config.num_key_value_heads)
    matrices = 3 if config.gated_mlp else 2
    return 2 * (attention + config.hidden_size * (matrices * config.intermediate_size + config.experts))


def idle_parameters(config: DecoderConfig) -> int:
    """The number of parameters in those experts of a layer to which a token is not routed."""
    if not config.experts:
        return 0
    matrices, inner = 3 if config.gated_mlp else 2, config.intermediate_size // config.experts_per_token
    biases = config.hidden_size + (matrices - 1) * inner if config.mlp_bias else 0
    return (config.experts - config.experts_per_token) * (matrices * config.hidden_size * inner + biases)


def head_flops(config: DecoderConfig) -> int:
    """FLOPs of one token's logits."""
    return 2 * config.hidden_size * config.vocab_size


def loss_flops(config: DecoderConfig) -> int:
    """FLOPs of one token's loss and the gradients; logits with a bias, a scale or a cap are computed twice."""
    return (4 if is_called(config) else 3) * head_flops(config)


def layer_cache_bytes(config: DecoderConfig, bytes_per_scalar: int = 2) -> int:
    """Bytes of one token's key and value in one layer."""
    return 2 * config.num_key_value_heads * config.head_dim * bytes_per_scalar


def attention_flops(config: DecoderConfig, layer: int, sequence_length: int) -> float:
    """FLOPs per token of one layer's attention scores and weighted sum, averaged over the positions of a causal
    sequence."""
    return 4 * config.num_attention_heads * config.head_dim * keys_read(config, layer, sequence_length)


def keys_read(config: DecoderConfig, layer: int, sequence_length: int) -> float:
    """The number of keys to which a token attends in one layer, averaged over the positions of a causal sequence. A
    layer with a sliding window reads only its window, one with chunks only its chunk."""
    keys, window, chunk = (sequence_length + 1) / 2, config.sliding_window, config.attention_chunk_size
    if config.layer_types[layer] == "chunked_attention" and chunk is not None:
        whole, rest = divmod(sequence_length, chunk)
        keys = (whole * chunk * (chunk + 1) + rest * (rest + 1)) / (2 * sequence_length)
    if config.layer_types[layer] == "sliding_attention" and window is not None and window < sequence_length:
        keys = window - window * (window - 1) / (2 * sequence_length)
    return keys
