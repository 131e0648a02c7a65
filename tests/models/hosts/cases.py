"""A small shape of every hosted family, its weights stirred so that norms, gates and steering biases are not what they
begin as."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from fathom import FathomForCausalLM
from fathom.checkpoints.families import hosted
from fathom.checkpoints.families.layouts import SINCE
from fathom.models import FathomConfig
from tests.tiny import seeded

VOCABULARY = 97
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
CHOSEN: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2)
EXPERTS: dict[str, Any] = dict(**CHOSEN, moe_intermediate_size=24)
SHARED: dict[str, Any] = dict(**EXPERTS, shared_expert_intermediate_size=24)
ROUTED: dict[str, Any] = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1)
ROUTED |= dict(topk_group=1, first_k_dense_replace=1)
LATENT: dict[str, Any] = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_rope_head_dim=4)
LATENT |= dict(qk_nope_head_dim=8, v_head_dim=8)
DELTA: dict[str, Any] = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8)
DELTA |= dict(linear_value_head_dim=8, linear_conv_kernel_dim=3, num_hidden_layers=8, head_dim=16)
MAMBA: dict[str, Any] = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=3)
MAMBA |= dict(mamba_chunk_size=8)
GRANITE: dict[str, Any] = dict(num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.5)
GRANITE |= dict(embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.3)
CONV = dict(layer_types=["conv", "full_attention", "conv", "full_attention"])
DELTAS = ["linear_attention", "full_attention"] * 2
HEAD = dict(head_dim=8)
WINDOW = dict(sliding_window=5, head_dim=8)

SHAPES: dict[str, dict[str, Any]] = {
    # dense
    **{
        name: HEAD
        for name in ("ministral3", "cwm", "iquestcoder", "seed_oss", "glm", "ernie4_5", "helium", "internlm3")
    },
    **{name: {} for name in ("arcee", "starcoder2", "jais2", "olmo", "stablelm", "apertus", "phi")},
    "hunyuan_v1_dense": HEAD,
    "glm4": HEAD,
    "ministral": WINDOW,
    "olmo3": dict(sliding_window=5),
    "exaone4": dict(sliding_window=5, sliding_window_pattern=2),
    "vaultgemma": WINDOW,
    "nemotron": {},
    "nanochat": dict(head_dim=8, final_logit_softcapping=5.0),
    "gemma4_text": dict(
        **WINDOW,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "bitnet": {},
    "persimmon": {},
    "hyperclovax": dict(head_dim=8, embedding_multiplier=3.0, logits_scaling=0.5),
    "cohere": dict(logit_scale=0.3),
    "cohere2": dict(logit_scale=0.3, **WINDOW),
    # experts
    "qwen3_moe": dict(head_dim=12, **EXPERTS),
    "qwen2_moe": SHARED,
    "olmoe": CHOSEN,
    "flex_olmo": CHOSEN,
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "phimoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "minimax_m2": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8, rotary_dim=4),
    "glm4_moe": dict(**ROUTED, n_shared_experts=1, head_dim=8),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, **WINDOW),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1),
    "hunyuan_v1_moe": dict(num_experts=4, moe_topk=2, head_dim=8),
    "exaone_moe": dict(**EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1, **WINDOW),
    "afmoe": dict(**EXPERTS, num_dense_layers=1, mup_enabled=True, global_attn_every_n_layers=2, **WINDOW),
    "granitemoe": GRANITE,
    "granitemoeshared": dict(**GRANITE, shared_intermediate_size=24),
    "aria_text": dict(moe_num_experts=4, moe_topk=2),
    "dots1": dict(**ROUTED, n_shared_experts=1, head_dim=8),
    "hy_v3": dict(**EXPERTS, num_shared_experts=1, head_dim=8),
    "solar_open": dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1, head_dim=8
    ),
    "flint": dict(**EXPERTS, **WINDOW),
    "mellum": dict(**EXPERTS, **WINDOW),
    "kolibri1": dict(**EXPERTS, **WINDOW),
    "llama4_text": dict(num_local_experts=4, head_dim=8, intermediate_size_mlp=32, attention_chunk_size=8),
    "cohere2_moe": dict(
        **CHOSEN, first_k_dense_replace=1, prefix_dense_intermediate_size=40, logit_scale=0.3, **WINDOW
    ),
    # latent attention
    "minicpm3": LATENT,
    "axk1": dict(**LATENT, **ROUTED),
    "kimi_linear": dict(
        **LATENT,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        linear_num_heads=3,
        linear_head_dim=6,
        layer_types=DELTAS,
    ),
    "bailing_hybrid": dict(
        **{key: value for key, value in LATENT.items() if key != "q_lora_rank"},
        **EXPERTS,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        linear_num_heads=3,
        linear_head_dim=6,
        layer_types=DELTAS,
    ),
    "deepseek_v2": dict(**LATENT, **ROUTED),
    "deepseek_v3": dict(**LATENT, **ROUTED),
    "glm4_moe_lite": dict(**LATENT, **{key: value for key, value in ROUTED.items() if key != "first_k_dense_replace"}),
    "youtu": LATENT,
    # states
    "qwen3_next": dict(**SHARED, **DELTA),
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": dict(**SHARED, **DELTA),
    "olmo_hybrid": {name: value for name, value in DELTA.items() if name != "head_dim"},
    "lfm2_moe": dict(**EXPERTS, **CONV, num_dense_layers=1),
    "lfm3": CONV,
    "bamba": dict(**MAMBA, attn_layer_indices=[1, 3]),
    "lfm2": dict(**CONV, block_auto_adjust_ff_dim=False),
    "granitemoehybrid": dict(
        **GRANITE, **MAMBA, shared_intermediate_size=24, layer_types=["mamba", "attention", "mamba", "attention"]
    ),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "full_attention"],
        num_hidden_layers=5,
        head_dim=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        conv_kernel=3,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_group=1,
        topk_group=1,
    ),
    "jamba": dict(
        **CHOSEN,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        mamba_d_conv=3,
    ),
}
UNKNOWN = {"persimmon": ("num_key_value_heads",)}
"""Keys of `SHAPE` that a family's class does not know."""
EAGER = ("gpt_oss", "vaultgemma", "flint")
"""Families whose own class has no SDPA."""


def backend_of(name: str) -> str:
    """The attention backend that a family is tried with."""
    return "eager" if name in EAGER else "sdpa"


def configured(name: str, **changes: Any) -> PreTrainedConfig:
    """The family's configuration of its shape, where the installed transformers has the family."""
    if name not in CONFIG_MAPPING or tuple(map(int, transformers.__version__.split(".")[:2])) < SINCE.get(name, (5,)):
        pytest.skip(f"{name} is not in transformers {transformers.__version__}, or does not run there")
    shape = {key: value for key, value in SHAPE.items() if key not in UNKNOWN.get(name, ())}
    return AutoConfig.for_model(name, **{**shape, **SHAPES[name], **changes})


def theirs_of(name: str, backend: str | None = None, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The family's own model, its weights stirred."""
    torch.manual_seed(seed)
    config = configured(name, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=backend or backend_of(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        saved = model.state_dict()
        for key, buffer in model.named_buffers():  # such as biases by which experts are chosen
            if key in saved and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def ours_of(theirs: PreTrainedModel, **mechanism: Any) -> FathomForCausalLM:
    """The same weights in Fathom's walk; a mechanism's parameters are drawn."""
    values = hosted.configuration(theirs.config.to_dict() | {"model_type": theirs.config.model_type})
    config = FathomConfig(**values, attn_implementation=theirs.config._attn_implementation, **mechanism)
    torch.manual_seed(1)
    model = FathomForCausalLM(config)
    report = model.load_state_dict(theirs.state_dict(), strict=False)
    assert not report.unexpected_keys, report.unexpected_keys[0]
    lost = [key for key in report.missing_keys if not any(part in key for part in ("residual", "mixer", "recurrence"))]
    assert not lost, lost[0]
    return model.eval().to(theirs.dtype)  # type: ignore[return-value]


def tokens(rows: int = 2, length: int = 12, seed: int = 3) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=seeded(seed))


@torch.no_grad()
def stepwise(model: PreTrainedModel, ids: torch.Tensor, first: int = 5, **kwargs: Any) -> torch.Tensor:
    """Logits of a prompt of `first` tokens and then of one token at a time."""
    position = torch.arange(ids.shape[1]).unsqueeze(0)  # some classes count from 0 in each call
    out = model(ids[:, :first], use_cache=True, position_ids=position[:, :first], **kwargs)
    logits, cache = [out.logits], out.past_key_values
    for t in range(first, ids.shape[1]):
        step = ids[:, t : t + 1], position[:, t : t + 1]
        logits.append(model(step[0], position_ids=step[1], past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1)
