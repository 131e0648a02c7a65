"""The families that are hosted: each a layout, or several if its layers differ."""

from __future__ import annotations

from typing import Any

from .layout import AFTER, SANDWICH, Layout


def granite(theirs: Any) -> dict[str, object]:
    """Scaled embeddings and logits."""
    return {"embedding_scale": float(theirs.embedding_multiplier), "logits_scaling": float(theirs.logits_scaling)}


def cohere(theirs: Any) -> dict[str, object]:
    """Logits times a factor."""
    return {"logits_multiplier": float(theirs.logit_scale)}


def phi(theirs: Any) -> dict[str, object]:
    """A head with a bias."""
    return {"head_bias": bool(getattr(theirs, "lm_head_bias", True))}


def afmoe(theirs: Any) -> dict[str, object]:
    """Embeddings times the root of their width."""
    return {"embedding_scale": theirs.hidden_size**0.5 if theirs.mup_enabled else 1.0}


def capped(theirs: Any) -> dict[str, object]:
    """Capped logits."""
    return {"final_logit_softcapping": theirs.final_logit_softcapping}


SHORT: dict[str, Any] = {
    "token": ("conv", "self_attn"),
    "channel": ("feed_forward",),
    "before": ("operator_norm", "ffn_norm"),
}
MAMBA: dict[str, Any] = {
    "token": ("mamba", "self_attn"),
    "channel": ("feed_forward",),
    "before": ("input_layernorm", "pre_ff_layernorm"),
}
SHARED: dict[str, Any] = {
    "channel": ("block_sparse_moe", "shared_mlp"),
    "multiplier": "residual_multiplier",
    "switches": granite,
}
ONE_NORM = ("input_layernorm", "input_layernorm")


def _families() -> dict[str, tuple[Layout, ...]]:
    found: dict[str, tuple[Layout, ...]] = {}

    def add(names: str, *layouts: Layout) -> None:
        found.update(dict.fromkeys(names.split(), layouts))

    add("qwen3 llama ministral ministral3 cwm seed_oss arcee starcoder2 iquestcoder jais2 glm olmo stablelm", Layout())
    add("ernie4_5 helium internlm3 hunyuan_v1_dense", Layout())
    add("qwen3_moe qwen2_moe olmoe mixtral glm4_moe gpt_oss ernie4_5_moe minimax_m2 hunyuan_v1_moe", Layout())
    add("exaone_moe", Layout(uneven=True))
    add("phimoe", Layout(switches=phi))
    add("nanochat", Layout(switches=capped))
    add("deepseek_v2 deepseek_v3 glm4_moe_lite youtu", Layout(latent=True))
    add("minicpm3", Layout(latent=True, multiplier="residual_scale"))
    add("qwen3_next qwen3_5_text qwen3_5_moe_text", Layout(token=("linear_attn", "self_attn")))
    add("lfm2 lfm2_moe", Layout(**SHORT, norm="embedding_norm"))
    add("jamba bamba", Layout(**MAMBA, norm="final_layernorm"))
    add("granitemoe granitemoeshared", Layout(**SHARED))
    add("granitemoehybrid", Layout(token=("mamba", "self_attn"), **SHARED))
    add("olmo3 exaone4", Layout(**AFTER, uneven=True))
    add("flex_olmo", Layout(**AFTER))
    add("olmo_hybrid", Layout(**AFTER), Layout(token=("linear_attn",)))
    add("gemma2", Layout(**SANDWICH, switches=capped))
    add("vaultgemma", Layout(before=("input_layernorm", "pre_feedforward_layernorm"), switches=capped))
    add("glm4", Layout(after=("post_self_attn_layernorm", "post_mlp_layernorm")))
    add(
        "afmoe",
        Layout(
            before=("input_layernorm", "pre_mlp_layernorm"),
            after=("post_attention_layernorm", "post_mlp_layernorm"),
            uneven=True,
            switches=afmoe,
        ),
    )
    add("apertus", Layout(before=("attention_layernorm", "feedforward_layernorm")))
    add("cohere", Layout(before=ONE_NORM, parallel="steps", switches=cohere))
    add("cohere2", Layout(before=ONE_NORM, parallel="steps", switches=cohere, uneven=True))
    add("phi", Layout(before=ONE_NORM, parallel="sum", switches=phi, norm="final_layernorm"))
    return found


LAYOUTS = _families()
