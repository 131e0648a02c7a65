"""Configurations of published models, as their `config.json` has them.

SmolLM3, Phi-4-mini, Granite, Pythia and OPT are written from their model cards, the others from public copies of the
file. Keys that say who wrote it are left out. The factors of longrope are a ramp of the published length, not the
published factors.
"""

from __future__ import annotations

from typing import Any

LONG, SHORT = [1 + i / 4 for i in range(48)], [1 + i / 100 for i in range(48)]

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B-Instruct": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000},
        **{"eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu"},
        **{"hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072},
        **{"mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16},
        **{"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05},
        **{
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            }
        },
        **{"rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256},
    },
    "CodeLlama-7b": {
        **{"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096},
        **{"intermediate_size": 11008, "max_position_embeddings": 16384, "model_type": "llama"},
        **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32},
        **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000},
        **{"tie_word_embeddings": False, "vocab_size": 32016},
    },
    "SmolLM2-135M": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        **{"hidden_act": "silu", "hidden_size": 576, "intermediate_size": 1536, "is_llama_config": True},
        **{"max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama"},
        **{"num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2},
        **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None},
        **{"rope_theta": 100000, "tie_word_embeddings": True},
        **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}},
        **{"vocab_size": 49152},
    },
    "Mistral-7B-v0.1": {
        **{"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096},
        **{"intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral"},
        **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8},
        **{"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 32000},
        **{"sliding_window": 4096},
    },
    "Qwen2.5-3B": {
        **{"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu"},
        **{"hidden_size": 2048, "intermediate_size": 11008, "max_position_embeddings": 32768},
        **{"max_window_layers": 70, "model_type": "qwen2", "num_attention_heads": 16},
        **{"num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06},
        **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True},
        **{"use_sliding_window": False, "vocab_size": 151936},
    },
    "Qwen3-0.6B": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643},
        **{"eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024},
        **{"intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28},
        **{"model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False},
        **{"vocab_size": 151936},
    },
    "SmolLM3-3B": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012},
        **{
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": ["full_attention"] * 36,
        },
        **{"max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False},
        **{"model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9},
        **{"num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4},
        **{"pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None},
        **{"rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True},
        **{"use_sliding_window": False, "vocab_size": 128256},
    },
    "Phi-3.5-mini": {
        **{"attention_dropout": 0.0},
        **{
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            }
        },
        **{"bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000, "hidden_act": "silu"},
        **{"hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 131072},
        **{"model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32},
        **{"num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000},
        **{"resid_pdrop": 0.0, "rms_norm_eps": 1e-05},
        **{"rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}},
        **{"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False},
        **{"attention_bias": False, "vocab_size": 32064},
    },
    "Phi-4-mini": {
        **{"attention_bias": False, "attention_dropout": 0.0},
        **{
            "auto_map": {
                "AutoConfig": "configuration_phi3.Phi3Config",
                "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                "AutoTokenizer": "Xenova/gpt-4o",
            }
        },
        **{"bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1},
        **{"hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1},
        **{"lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False},
        **{"model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32},
        **{"num_key_value_heads": 8, "original_max_position_embeddings": 4096, "pad_token_id": 199999},
        **{"partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05},
        **{"rope_scaling": {"long_factor": LONG, "short_factor": SHORT, "type": "longrope"}},
        **{"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True},
        **{"vocab_size": 200064},
    },
    "gemma-2b": {
        **{"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "eos_token_id": 1},
        **{"head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 16384},
        **{"max_position_embeddings": 8192, "model_type": "gemma", "num_attention_heads": 8},
        **{"num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06},
        **{"rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000},
    },
    "gemma-2-2b": {
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0},
        **{"bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 107]},
        **{"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216},
        **{"max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8},
        **{"num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0},
        **{"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0},
        **{"sliding_window": 4096, "vocab_size": 256000},
    },
    "gemma-3-1b-it": {
        **{"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None},
        **{"bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106]},
        **{"final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
        **{"hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768},
        **{"model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26},
        **{"num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06},
        **{"rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000},
        **{"sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144},
    },
    "OLMo-2-7B": {
        **{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008},
        **{"max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32},
        **{"num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06},
        **{"rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 100352},
    },
    "granite-3.1-2b": {
        **{"attention_bias": False, "attention_dropout": 0.1, "attention_multiplier": 0.015625},
        **{"bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu"},
        **{"hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8.0},
        **{"max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite"},
        **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0},
        **{"residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None},
        **{"rope_theta": 5000000.0, "tie_word_embeddings": True, "vocab_size": 49155},
    },
    "pythia-160m": {
        **{"bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 768},
        **{"intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048},
        **{"model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12},
        **{"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False},
        **{"use_parallel_residual": True, "vocab_size": 50304},
    },
    "gpt2": {
        **{"activation_function": "gelu_new", "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1},
        **{"eos_token_id": 50256, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024},
        **{"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1},
        **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
        **{"summary_type": "cls_index", "summary_use_proj": True},
        **{"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}},
        **{"vocab_size": 50257},
    },
    "opt-125m": {
        **{"activation_dropout": 0.0, "activation_function": "relu", "attention_dropout": 0.0},
        **{"bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2},
        **{"ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0},
        **{"max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 12},
        **{"num_hidden_layers": 12, "pad_token_id": 1, "prefix": "</s>", "vocab_size": 50272},
        **{"word_embed_proj_dim": 768},
    },
    "opt-350m": {
        **{"activation_dropout": 0.0, "activation_function": "relu", "attention_dropout": 0.0},
        **{"bos_token_id": 2, "do_layer_norm_before": False, "dropout": 0.1, "eos_token_id": 2},
        **{"ffn_dim": 4096, "hidden_size": 1024, "init_std": 0.02, "layerdrop": 0.0},
        **{"max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16},
        **{"num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>", "vocab_size": 50272},
        **{"word_embed_proj_dim": 512},
    },
}
"""By name."""
