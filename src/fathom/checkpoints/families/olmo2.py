"""OLMo 2: norms after sub-layers, and over whole projections of queries and keys; rotation in float32."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import SHARED, Family, Values


def switches(theirs: PreTrainedConfig) -> Values:
    """The placement of norms."""
    return {"norm": "rms_wide", "norm_placement": "after", "qk_norm": "full", "rope_float32": True}


OLMO2 = Family(
    "olmo2",
    switches,
    shared=tuple(key for key in SHARED if key != "mlp_bias"),
    opens="OLMo 2",
    off={"clip_qkv": "Fathom's decoder does not clip queries, keys and values"},
)
