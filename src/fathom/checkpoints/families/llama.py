"""Llama and close relatives: SmolLM, SmolLM2, TinyLlama, Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from transformers import PreTrainedConfig

from fathom.checkpoints.families.family import RELATIVES, SHARED, WINDOWS, Family, Values, windows
from fathom.models import FathomConfig

NO_BIAS = tuple(key for key in SHARED if key not in ("attention_bias", "mlp_bias"))
"""Llama's keys without biases, which a class then has fixed."""
CARRIED = ("dual_chunk_attention_config", "rotary_emb_base", "seq_length")
"""Keys of some published Qwens, for other engines."""


def llama_switches(theirs: PreTrainedConfig) -> Values:
    """Qwen3 without norms of queries and keys."""
    return {"qk_norm": "none"}


def mistral_switches(theirs: PreTrainedConfig) -> Values:
    """Llama with a sliding window on all layers or none; if `config.json` lists layer types, transformers opens it as
    Ministral, whose windows follow the list."""
    return {"qk_norm": "none", **windows(theirs)}


def qwen2_switches(theirs: PreTrainedConfig) -> Values:
    """Llama with biases on queries, keys and values only."""
    return {"qk_norm": "none", "attention_bias": True, "output_bias": False, **windows(theirs)}


def qwen3_switches(theirs: PreTrainedConfig) -> Values:
    """Only the sliding windows, because Qwen3 is the default of every other switch."""
    return windows(theirs)


def with_window(config: FathomConfig) -> Values:
    """One window for all layers."""
    return {"sliding_window": config.sliding_window}


def with_windows(config: FathomConfig) -> Values:
    """The configuration's sliding window, and which layers have it."""
    return {
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.use_sliding_window,
        "layer_types": config.layer_types,
    }


LLAMA = Family(
    "llama",
    llama_switches,
    ignored=(*RELATIVES, "is_llama_config"),
    off={"rope_interleaved": "Fathom rotates halves of a head, not pairs"},
    opens="Llama 1 to 3, SmolLM, SmolLM2, TinyLlama",
)
MISTRAL = Family(
    "mistral",
    mistral_switches,
    with_window,
    shared=NO_BIAS,
    further=("sliding_window", "layer_types"),
    opens="Mistral, dense",
)
QWEN2 = Family(
    "qwen2",
    qwen2_switches,
    with_windows,
    shared=NO_BIAS,
    further=WINDOWS,
    ignored=(*RELATIVES, *CARRIED),
    off={"use_mrope": "Fathom has one position for each token"},
    opens="Qwen2 and Qwen2.5, dense",
)
QWEN3 = Family(
    "qwen3",
    qwen3_switches,
    with_windows,
    shared=tuple(key for key in SHARED if key != "mlp_bias"),
    further=WINDOWS,
    ignored=(*RELATIVES, *CARRIED),
    opens="Qwen3, dense",
)
