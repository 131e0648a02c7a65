"""Families whose own layers stand in our walk: their `config.json` in Fathom's keys."""

from __future__ import annotations

from transformers import CONFIG_MAPPING

from fathom.checkpoints.families.family import Values
from fathom.models import FathomConfig
from fathom.models.hosts.layouts import LAYOUTS

SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("max_position_embeddings", "initializer_range", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that mechanisms, caches and tools read, with one meaning there and here."""


def configuration(theirs: Values) -> Values:
    """The values of Fathom's configuration; everything that a layer reads stays in `native`."""
    read = CONFIG_MAPPING[str(theirs["model_type"])].from_dict(dict(theirs))
    window = getattr(read, "sliding_window", None)
    types = (
        getattr(read, "layer_types", None)
        or ["full_attention" if window is None else "sliding_attention"] * read.num_hidden_layers
    )
    return {
        **{key: getattr(read, key) for key in SAME if hasattr(read, key)},
        "intermediate_size": getattr(read, "intermediate_size", None) or read.hidden_size,
        "head_dim": getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads,
        "layer_types": list(types),
        "sliding_window": window,
        "use_sliding_window": window is not None,
        **LAYOUTS[read.model_type][0].switches(read),
        **{key: theirs[key] for key in ("dtype", "torch_dtype") if key in theirs},
        "model_type": FathomConfig.model_type,
        "host": read.model_type,
        "native": dict(theirs),
    }
