"""OLMo 2: norms after sub-layers, and over whole projections of queries and keys; rotation in float32."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import Family, Values
from fathom.checkpoints.families.llama import nothing


def switches(theirs: PreTrainedConfig) -> Values:
    """The placement of norms."""
    head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    return {
        "norm": "rms_wide",
        "norm_placement": "after",
        "qk_norm": "full",
        "rope_float32": True,
        "head_dim": head,
    }


OLMO2 = Family("olmo2", switches, nothing)
