"""Gemma 1 to 3, as language models: norms kept as distances from 1, scaled embeddings.

From Gemma 2 on a layer has four norms.

Multimodal checkpoints of Gemma 3 contain a vision tower too, and are refused.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import SHARED, Family, Values, windows
from fathom.models import FathomConfig

KEYS = tuple(key for key in SHARED if key not in ("hidden_act", "mlp_bias"))

WINDOW = 4096
"""The window in the configuration of a model that has no layer with one; the authors' default."""


def gemma_switches(theirs: PreTrainedConfig) -> Values:
    """The switches that all three versions share."""
    act = getattr(theirs, "hidden_activation", None) or getattr(theirs, "hidden_act", None)
    return {
        "norm": "rms_offset",
        "qk_norm": "none",
        "hidden_act": act,
        "embedding_scale": theirs.hidden_size**0.5,
        "round_embedding_scale": True,
    }


def gemma2_switches(theirs: PreTrainedConfig) -> Values:
    """Norms before and after sub-layers, capped logits, windows."""
    return {
        **gemma_switches(theirs),
        "norm_placement": "both",
        "attention_scale": theirs.query_pre_attn_scalar**-0.5,
        "attn_logit_softcapping": theirs.attn_logit_softcapping,
        "final_logit_softcapping": theirs.final_logit_softcapping,
        **windows(theirs),
    }


def gemma3_switches(theirs: PreTrainedConfig) -> Values:
    """Gemma 2 with norms of queries and keys, and separate rotary angles for layers with a window."""
    if theirs.use_bidirectional_attention:
        raise ValueError("use_bidirectional_attention=true: Fathom's decoder is causal")
    return {**gemma2_switches(theirs), "qk_norm": "head"}


def gemma_back(config: FathomConfig) -> Values:
    """The activation under Gemma's name."""
    return {"hidden_act": config.hidden_act}


def gemma2_back(config: FathomConfig) -> Values:
    """Scales, caps and windows under Gemma's names."""
    scale = config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5
    scalar = scale**-2
    window = config.sliding_window or config.native.get("sliding_window") or WINDOW  # the class asks for one
    return {
        "hidden_activation": config.hidden_act,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "sliding_window": window,
        "layer_types": config.layer_types,
    }


GEMMA = Family("gemma", gemma_switches, gemma_back, shared=KEYS)
GEMMA2 = Family("gemma2", gemma2_switches, gemma2_back, shared=KEYS)
GEMMA3 = Family("gemma3_text", gemma3_switches, gemma2_back, shared=KEYS)
