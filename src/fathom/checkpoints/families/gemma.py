"""Gemma 1 to 3, text only: the norms' weights are stored minus 1, and embeddings are scaled.

From Gemma 2 on a layer has four norms.

Multimodal checkpoints of Gemma 3 contain a vision tower too, and are refused.

Gemma 4 is a hosted family (`layouts.py`).
"""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import RELATIVES, SHARED, Family, Values, windows
from fathom.models import FathomConfig

KEYS = tuple(key for key in SHARED if key not in ("hidden_act", "mlp_bias"))
FURTHER = (*("hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window", "layer_types"),)
IGNORED = (*RELATIVES, "hidden_act", "sliding_window_size", "_sliding_window_pattern")

WINDOW = 4096
"""The window in the configuration of a model that has no layer with one; the authors' default."""


def gemma_switches(theirs: PreTrainedConfig) -> Values:
    """The switches that all three versions share, and Gemma 1's activation."""
    return {
        "norm": "rms_offset",
        "qk_norm": "none",
        "hidden_act": getattr(theirs, "hidden_act", None),
        "embedding_scale": theirs.hidden_size**0.5,
        "round_embedding_scale": True,
    }


def gemma2_switches(theirs: PreTrainedConfig) -> Values:
    """Gemma 2's switches: norms before and after sub-layers, capped logits, sliding windows."""
    return {
        **gemma_switches(theirs),
        "hidden_act": theirs.hidden_activation,
        "norm_placement": "both",
        "attention_scale": theirs.query_pre_attn_scalar**-0.5,
        "attn_logit_softcapping": theirs.attn_logit_softcapping,
        "final_logit_softcapping": theirs.final_logit_softcapping,
        **windows(theirs),
    }


def gemma3_switches(theirs: PreTrainedConfig) -> Values:
    """Gemma 2's switches with norms of queries and keys, separate rotary angles for sliding-window layers, and no cap
    on attention logits, since Gemma 3's class reads that key without using it."""
    return {**gemma2_switches(theirs), "qk_norm": "head", "attn_logit_softcapping": None}


def gemma_back(config: FathomConfig) -> Values:
    """The activation under Gemma's name."""
    return {"hidden_act": config.hidden_act}


def gemma2_back(config: FathomConfig) -> Values:
    """The attention scale, logit caps and sliding windows under Gemma's names."""
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


def gemma3_back(config: FathomConfig) -> Values:
    """Gemma 2's keys except `attn_logit_softcapping`, which Gemma 3's class does not use."""
    return {key: value for key, value in gemma2_back(config).items() if key != "attn_logit_softcapping"}


GEMMA = Family(
    "gemma",
    gemma_switches,
    gemma_back,
    shared=KEYS,
    further=("hidden_act",),
    ignored=(*IGNORED, "hidden_activation"),
    opens="Gemma 1",
)
GEMMA2 = Family(
    "gemma2",
    gemma2_switches,
    gemma2_back,
    shared=KEYS,
    further=(*FURTHER, "attn_logit_softcapping"),
    ignored=IGNORED,
    opens="Gemma 2",
    note="needs `attn_implementation=eager`",
)
GEMMA3 = Family(
    "gemma3_text",
    gemma3_switches,
    gemma3_back,
    shared=KEYS,
    further=(*FURTHER, "sliding_window_pattern", "rope_local_base_freq"),
    ignored=(*IGNORED, "attn_logit_softcapping"),
    rotates="by type",
    opens="Gemma 3, text models",
    note="checkpoints with a vision tower are refused",
)
