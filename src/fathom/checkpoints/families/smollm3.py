"""SmolLM3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import Family, Values, windows
from fathom.checkpoints.families.llama import with_windows
from fathom.models import FathomConfig


def switches(theirs: PreTrainedConfig) -> Values:
    """Which layers rotate."""
    return {"qk_norm": "none", "no_rope_layers": list(theirs.no_rope_layers), **windows(theirs)}


def back(config: FathomConfig) -> Values:
    """Which layers rotate."""
    return {"no_rope_layers": config.no_rope_layers or [1] * config.num_hidden_layers, **with_windows(config)}


KEYS = ("sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "no_rope_layer_interval")

SMOLLM3 = Family("smollm3", switches, back, further=KEYS, opens="SmolLM3")
