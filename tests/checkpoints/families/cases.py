"""Small models of every family, of shapes that are not chosen to be kind, with random weights."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

SMALL = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
WIDE = {**SMALL, "intermediate_size": 74, "max_position_embeddings": 64}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 16,
}
SLIDING = {"rope_type": "default", "rope_theta": 1e4}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama-gqa": ("Llama", {**WIDE, "num_key_value_heads": 2}),
    "llama-mqa-tied": ("Llama", {**WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 10}),
    "llama-biases": ("Llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("Llama", {**WIDE, "rope_parameters": LLAMA3}),
    "llama-linear": (
        "Llama",
        {**WIDE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "mistral-window": ("Mistral", {**WIDE, "num_key_value_heads": 3, "sliding_window": 5}),
    "mistral-whole": ("Mistral", {**WIDE, "num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2", {**WIDE, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {**WIDE, "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**WIDE, "num_key_value_heads": 2, "head_dim": 10}),
    "qwen3-biases": ("Qwen3", {**WIDE, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}),
    "smollm3": ("SmolLM3", {**WIDE, "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "gpt_neox": ("GPTNeoX", {**WIDE, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "gpt_neox-sequential": (
        "GPTNeoX",
        {
            **WIDE,
            "use_parallel_residual": False,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neox-no-bias": ("GPTNeoX", {**WIDE, "attention_bias": False, "hidden_act": "gelu_new"}),
    "gpt2": ("GPT2", {**SMALL, "n_positions": 64, "n_inner": 74}),
    "gpt2-unscaled": ("GPT2", {**SMALL, "n_positions": 64, "scale_attn_weights": False}),
    "opt": ("OPT", {**SMALL, "ffn_dim": 74, "max_position_embeddings": 64, "tie_word_embeddings": False}),
    "galactica": (
        "OPT",
        {
            **SMALL,
            **{"ffn_dim": 74, "max_position_embeddings": 64, "enable_bias": False},
            **{"layer_norm_elementwise_affine": False, "activation_function": "gelu"},
        },
    ),
    "olmo2": ("Olmo2", {**WIDE, "num_key_value_heads": 2}),
    "gemma": ("Gemma", {**WIDE, "num_key_value_heads": 1, "head_dim": 10}),
    "gemma2": (
        "Gemma2",
        {
            **WIDE,
            **{"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            **WIDE,
            **{"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 7},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": SLIDING,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            **WIDE,
            **{"num_key_value_heads": 2, "embedding_multiplier": 3.3, "logits_scaling": 1.7},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.31, "mlp_bias": True},
        },
    ),
    "phi3": ("Phi3", {**WIDE, "intermediate_size": 80, "num_key_value_heads": 2, "pad_token_id": 0}),
    "phi3-odd": ("Phi3", {**WIDE, "num_key_value_heads": 2, "pad_token_id": 0}),
    "phi3-window": (
        "Phi3",
        {
            **{**WIDE, "intermediate_size": 80},
            **{"pad_token_id": 0, "sliding_window": 5, "tie_word_embeddings": True},
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "rope_type": "default"},
        },
    ),
}
"""By name: a prefix of transformers' classes, and its configuration."""
KINDS = {"rms": "llama-gqa", "parallel": "gpt_neox", "learned": "gpt2", "after": "olmo2"}
"""One case for each kind of backbone: RMS norms in sequence, LayerNorms in parallel, learned positions, norms after."""


def stock_config(name: str, **keys: object) -> PreTrainedConfig:
    """A case's own configuration, some keys changed."""
    prefix, values = CASES[name]
    return getattr(transformers, f"{prefix}Config")(**{**values, **keys})


def stock(name: str, seed: int = 0, **keys: object) -> PreTrainedModel:
    """A case's own model, every tensor random, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(stock_config(name, **keys)).eval()
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Weights of a size at which every part of a model matters."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        else:
            parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
