"""Granite: Llama with multipliers of embeddings, sub-layers, attention and logits."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import Family, Values
from fathom.models import FathomConfig


def switches(theirs: PreTrainedConfig) -> Values:
    """The multipliers."""
    return {
        "qk_norm": "none",
        "embedding_scale": float(theirs.embedding_multiplier),
        "residual_multiplier": float(theirs.residual_multiplier),
        "attention_scale": float(theirs.attention_multiplier),
        "logits_scaling": float(theirs.logits_scaling),
    }


def back(config: FathomConfig) -> Values:
    """The multipliers under Granite's names."""
    scale = config.attention_scale
    return {
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_multiplier,
        "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
        "logits_scaling": config.logits_scaling,
    }


MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")

GRANITE = Family("granite", switches, back, further=MULTIPLIERS, opens="Granite 3, dense")
