"""Odd shapes of hosted families, drawn by a seed: numbers that no released model has, and that the family's class runs.

Odd numbers of heads, layers and experts; a head's width that is not the model's over its heads; any switch.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from .cases import SHAPE, SHAPES, theirs_of, tokens

FLAGS = (
    *("attention_bias", "mlp_bias", "use_bias", "norm_topk_prob", "use_qk_norm", "qk_layernorm", "tie_word_embeddings"),
    *("add_qkv_bias", "use_qkv_bias", "attention_out_bias", "lm_head_bias", "use_parallel_residual", "qkv_bias"),
    *("conv_bias", "mamba_conv_bias", "mamba_proj_bias", "route_norm", "mup_enabled", "use_expert_bias", "mamba_norm"),
    *("mamba_rms_norm", "mamba_norm_before_gate", "projectors_bias"),
)
CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(FLAGS, (True, False)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (3, 5, 7)),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), (1, 2, 3)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), (8, 24, 40)),  # kernels of experts want eights
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), (6, 14, 22)),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), (0, 1, 2)),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_experts"), (1, 2, 3)),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [0], [1, 2]),
    "sliding_window": (2, 3, 8),  # with 1 transformers' cache keeps everything
    "q_lora_rank": (None, 5, 8),
    "kv_lora_rank": (6, 7, 12),
    "qk_rope_head_dim": (2, 4, 6),
    "qk_nope_head_dim": (3, 4, 6),
    "v_head_dim": (3, 4, 7),
    "linear_key_head_dim": (3, 6, 8),
    "linear_value_head_dim": (5, 8),
    "linear_conv_kernel_dim": (2, 3, 4),
    "conv_L_cache": (2, 3, 4),
    "mamba_d_conv": (2, 3, 4),
    "mamba_d_state": (3, 5, 8),
    "mamba_dt_rank": (3, 5),
    "mamba_chunk_size": (4, 7),
    "attn_layer_offset": (0, 1),
    "attn_layer_indices": ([1], [0, 2], [0, 1, 2]),
    "expert_layer_offset": (0, 1),
    "global_head_dim": (6, 8, 16),
    "top_k_experts": (1, 2, 3),
    "enable_moe_block": (True, False),
    "attention_k_eq_v": (True, False),
    "ssm_state_size": (3, 5, 8),
    "conv_kernel": (2, 3, 4),
    "chunk_size": (4, 7),
    "tie_word_embeddings": (True, False),
    "partial_rotary_factor": (0.5, 1.0),
}
TRIES = 200
REFUSALS = (ValueError, RuntimeError, TypeError, AssertionError, LookupError, AttributeError, StrictDataclassError)
"""With which a family's class refuses a shape that it cannot have."""


def odd_of(name: str, seed: int) -> dict[str, Any]:
    """The first shape of a seed's draws that the family's class runs."""
    drawn = random.Random(f"{name} {seed}")
    for _ in range(TRIES):
        changes = draw(name, drawn)
        try:
            theirs = theirs_of(name, seed=seed, **changes)
            run(theirs), run(theirs.bfloat16())  # whose kernels want more than float32's, and views less
        except REFUSALS:
            continue
        return changes
    raise AssertionError(f"{name}: its class runs none of {TRIES} shapes")


@torch.no_grad()
def run(theirs: PreTrainedModel) -> None:
    """Read a text, then a token."""
    cache = theirs(tokens(), use_cache=True).past_key_values
    assert theirs(tokens(2, 1), past_key_values=cache, use_cache=True).logits.isfinite().all()


@cache
def kinds(name: str) -> tuple[str, ...]:
    """The types of layers that a family mixes."""
    base = {**SHAPE, "num_hidden_layers": len(SHAPES[name].get("layer_types", "8 layers")), **SHAPES[name]}
    return tuple(sorted(set(getattr(AutoConfig.for_model(name, **base), "layer_types", None) or ())))


def draw(name: str, drawn: random.Random) -> dict[str, Any]:
    """A shape that may be possible."""
    config = CONFIG_MAPPING[name]
    known = {*config.__dataclass_fields__, *config.attribute_map, *SHAPES[name]}
    kv, groups, head, layers = (drawn.choice(some) for some in ((1, 3, 5), (1, 2, 3), (4, 6, 8, 10, 12), (3, 5, 7)))
    heads, free = kv * groups, "head_dim" in known and drawn.random() < 0.7
    made: dict[str, Any] = {key: drawn.choice(values) for key, values in CHOICES.items()}
    made |= {"hidden_size": drawn.choice((24, 40, 56)) if free else heads * head, "head_dim": head}
    made |= {"num_attention_heads": heads, "num_hidden_layers": layers, "vocab_size": 97 + drawn.choice((0, 2, 6))}
    made |= {"num_key_value_heads": heads if "kv_lora_rank" in known else kv}
    made |= {"linear_num_key_heads": kv, "linear_num_value_heads": heads}
    made |= {"mamba_d_head": 8, "mamba_expand": 2, "mamba_n_heads": made["hidden_size"] // 4}
    if drawn.random() < 0.5:
        made["rope_parameters"] = rope(drawn)
    if len(kinds(name)) > 1 and "layer_types" in known and "attn_layer_indices" not in known:
        made["layer_types"] = [drawn.choice(kinds(name)) for _ in range(layers)]
    return {key: value for key, value in made.items() if key in known}


def rope(drawn: random.Random) -> dict[str, Any]:
    """Whole heads or half of them, plain or scaled."""
    made: dict[str, Any] = {"rope_type": "default", "rope_theta": drawn.choice((100.0, 1e4))}
    made |= {"partial_rotary_factor": 0.5} if drawn.random() < 0.3 else {}
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return made | (scaled if drawn.random() < 0.4 else {})
