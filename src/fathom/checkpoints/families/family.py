"""A family of decoders: its configuration in Fathom's keys and back, and its tensors under Fathom's names.

transformers' own class reads a family's configuration, so that missing keys have the defaults of the family's authors.
Keys that most families share are translated here; a family's file adds the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from transformers import AutoConfig, PreTrainedConfig

from fathom.checkpoints.families.tensors import Rule
from fathom.models import FathomConfig

Values: TypeAlias = dict[str, Any]
"""Keys of a configuration, ours or theirs."""

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias", "attention_dropout", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)
"""Keys with one name and one meaning in Llama's descendants and here."""


@dataclass(frozen=True)
class Rounding:
    """Why a family's class and Fathom differ in the last bits of a logit, and by how much at most."""

    reason: str
    float32: float = 4e-6
    """The largest difference, relative to the largest logit."""
    bfloat16: float = 0.03


ONE_PRODUCT = Rounding("the class computes queries, keys and values in one product, Fathom in three")


@dataclass(frozen=True)
class Family:
    """One family of decoders."""

    name: str
    """Its `model_type`."""
    switches: Callable[[PreTrainedConfig], Values]
    """Its configuration in Fathom's keys, beyond those that it shares with Llama."""
    back: Callable[[FathomConfig], Values] = lambda config: {}
    """The inverse: its keys, beyond the shared ones, for a Fathom configuration; by default it has none."""
    rules: tuple[Rule, ...] = ()
    """How its tensors become Fathom's; a tensor without a rule keeps its name."""
    unread: tuple[str, ...] = ()
    """Patterns of unused tensors in its checkpoints."""
    shared: tuple[str, ...] = SHARED
    """The keys that it shares with Llama."""
    rounding: Rounding | None = None
    """Why its logits may differ from Fathom's in their last bits; None if they are equal."""


def known_as(kind: str, config: Values) -> tuple[PreTrainedConfig, Values]:
    """A `config.json` read as if it were of a family that transformers knows, and its shared keys as Fathom's."""
    read = AutoConfig.for_model(**{**config, "model_type": kind})
    kept: Values = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
    shared = {key: getattr(read, key) for key in SHARED if hasattr(read, key)}
    return read, {**shared, **kept, "model_type": FathomConfig.model_type}


def windows(theirs: PreTrainedConfig) -> Values:
    """The sliding windows of a configuration that lists its types of layers, or has one window for all."""
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * theirs.num_hidden_layers
    sliding = "sliding_attention" in types
    return {
        "layer_types": list(types),
        "sliding_window": window if sliding else None,
        "use_sliding_window": sliding,
    }
