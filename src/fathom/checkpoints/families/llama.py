"""Llama and close relatives: SmolLM, SmolLM2, TinyLlama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import Family, Values, windows
from fathom.models import FathomConfig


def llama_switches(theirs: PreTrainedConfig) -> Values:
    """Qwen3 without norms of queries and keys."""
    return {"qk_norm": "none", **windows(theirs)}


def qwen2_switches(theirs: PreTrainedConfig) -> Values:
    """Llama with biases on queries, keys and values only."""
    return {"qk_norm": "none", "attention_bias": True, "output_bias": False, **windows(theirs)}


def qwen3_switches(theirs: PreTrainedConfig) -> Values:
    """No differences: Qwen3 is the default of every switch."""
    return windows(theirs)


def with_window(config: FathomConfig) -> Values:
    """One window for all layers."""
    return {"sliding_window": config.sliding_window}


def with_windows(config: FathomConfig) -> Values:
    """A window, and which layers have it."""
    return {
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.use_sliding_window,
        "layer_types": config.layer_types,
    }


LLAMA = Family("llama", llama_switches)
MISTRAL = Family("mistral", llama_switches, with_window)
QWEN2 = Family("qwen2", qwen2_switches, with_windows)
QWEN3 = Family("qwen3", qwen3_switches, with_windows)
