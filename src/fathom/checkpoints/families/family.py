"""Translate a family of decoders: its configuration to Fathom's keys and back, and its tensors to Fathom's names.

A family's configuration is read by transformers' own class, so that missing keys have the defaults of the family's
authors. Keys that most families share are translated here; a family's file adds the rest. `keys.py` says what is done
with keys that a family does not read, and with types of rotary embedding.

Dropout of hidden states is in no family's `switches`: the decoder has none, and only `attention_dropout` is applied.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from fathom.checkpoints.families.keys import BACKEND, LAYER_TYPES, ROPES, Keys, rotation
from fathom.checkpoints.families.keys import Values as Values
from fathom.checkpoints.families.tensor_names import Rule
from fathom.models import FathomConfig

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "rope_parameters", "attention_bias", "mlp_bias", "attention_dropout", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)
"""Keys with one name and one meaning in Llama's descendants and here."""
ROPE = (*ROPES, "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys of rotary embeddings, where the class has them."""
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Keys of sliding windows."""
RELATIVES = ("attention_bias", "mlp_bias", "pretraining_tp", *WINDOWS)
"""Keys of some of Llama's descendants, which files of others carry and their classes ignore."""


@dataclass(frozen=True)
class Rounding:
    """Why the logits of a family's class and of Fathom differ by rounding, and by how much at most."""

    reason: str
    float32: float = 4e-6
    """The largest difference, relative to the largest logit."""
    bfloat16: float = 0.03


ONE_PRODUCT = Rounding("the class has one product for queries, keys and values")


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
    further: tuple[str, ...] = ()
    """Further keys that its class reads, as its `config.json` spells them."""
    ignored: tuple[str, ...] = RELATIVES
    """Keys that its class does not read; those that it shares or reads do not count."""
    off: Mapping[str, str] = field(default_factory=dict)
    """Keys that may only be off (null, false or empty), and why."""
    rotates: Literal["heads", "parts", "by type"] = "heads"
    """Whole heads by default, any part of a head, or whole heads with parameters for each layer type."""
    opens: str = ""
    """Which models it is, for the table of families in the documentation."""
    note: str = ""
    """The table's exceptions beyond `off` and `rounding`."""

    @property
    def keys(self) -> Keys:
        """How each key of the family's `config.json` is treated."""
        read = {*self.shared, *self.further, *(ROPE if "rope_parameters" in self.shared else ())}
        ignored = [key for key in self.ignored if key not in read]
        cls = CONFIG_MAPPING[self.name]
        defaults = {one.name: one.default for one in dataclasses.fields(cls)}
        return Keys(self.name, read, ignored, self.off, defaults)

    def read(self, theirs: Values) -> Values:
        """Translate a family's `config.json` to Fathom's keys; raises a one-line `ValueError` if that is impossible."""
        meant = copy.deepcopy(self.keys.meaningful(theirs))  # transformers completes rotary parameters in place
        resolved = AutoConfig.for_model(**{**meant, "model_type": self.name})
        shared = {key: getattr(resolved, key) for key in self.shared if hasattr(resolved, key)}
        if shared.get("attention_dropout", 0.0) is None:
            shared["attention_dropout"] = 0.0
        if shared.get("head_dim") is None and "head_dim" in self.shared:
            shared["head_dim"] = resolved.hidden_size // resolved.num_attention_heads
        ours = {**shared, **self.switches(resolved)}
        if "rope_parameters" in self.shared:
            ours["rope_parameters"] = self._rotation(resolved, ours["head_dim"])
        return ours

    def _rotation(self, resolved: PreTrainedConfig, head_dim: int) -> Values:
        rope: Values = resolved.rope_parameters
        partial = self.rotates == "parts"
        nested = [key for key in rope if isinstance(rope[key], dict)]
        if self.rotates != "by type":
            if nested:
                raise ValueError(
                    f"rope_parameters.{nested[0]}: all layers of a {self.name} model share one set of RoPE parameters"
                )
            return rotation(rope, head_dim, partial)
        made = {key: rope[key] for key in nested}
        factor = getattr(resolved, "partial_rotary_factor", None)  # the class completes each type with it
        for kind in dict.fromkeys(resolved.layer_types):
            whole = {**rope[kind]} if factor is None else {"partial_rotary_factor": factor, **rope[kind]}
            made[kind] = rotation(whole, head_dim, partial)
            if made[kind]["rope_type"] == "yarn":  # transformers reads this one key outside
                made[kind]["truncate"] = rope.get("truncate", True)
        return made


def kept(theirs: Values) -> Values:
    """The keys that Fathom's configuration takes over unchanged: dtype, quantisation and the attention backend.

    An `attn_implementation` of `eager` or `sdpa` is followed; any other is left out.
    """
    found: Values = {key: theirs[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in theirs}
    backend = next((theirs[key] for key in BACKEND if theirs.get(key)), None)
    return {**found, "attn_implementation": backend} if backend in ("eager", "sdpa") else found


def known_as(family: Family, theirs: Values, own: Collection[str]) -> tuple[PreTrainedConfig, Values]:
    """A model's `config.json` parsed with a related family's class in transformers, and its common keys in Fathom's
    form.

    Args:
        family: The family.
        theirs: The `config.json` of a model with a mechanism. A key of the family's relatives that the family does not
            read must be off: the model's own class may read it.
        own: Further keys, which the caller reads.
    """
    keys = family.keys
    no = dict.fromkeys(
        (key for key in RELATIVES[:2] + WINDOWS if key not in keys.read),
        "Fathom does not know what this model's class does with it",
    )
    keys = replace(keys, kind=str(theirs.get("model_type")), read={*keys.read, *own}, off={**keys.off, **no})
    meant = copy.deepcopy({key: value for key, value in keys.meaningful(theirs).items() if key in family.keys.read})
    read = AutoConfig.for_model(**{**meant, "model_type": family.name})
    shared = {key: getattr(read, key) for key in SHARED if hasattr(read, key)}
    if shared.get("head_dim") is None:
        shared["head_dim"] = read.hidden_size // read.num_attention_heads
    shared["rope_parameters"] = rotation(read.rope_parameters, shared["head_dim"], partial=False)
    return read, {**shared, **kept(theirs), "model_type": FathomConfig.model_type}


def padding(theirs: PreTrainedConfig) -> Values:
    """The padding token of classes without `padding_idx`; None if its id is outside the vocabulary, which they
    tolerate."""
    token = theirs.pad_token_id
    return {"pad_token_id": token if token is None or token < theirs.vocab_size else None}


def windows(theirs: PreTrainedConfig) -> Values:
    """The sliding-window keys of a configuration that lists its layer types, or has one window for all layers."""
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * theirs.num_hidden_layers
    if strange := sorted(set(types) - set(LAYER_TYPES)):
        raise ValueError(f"layer_types: {strange[0]!r} is none of {', '.join(LAYER_TYPES)}")
    sliding = "sliding_attention" in types
    if sliding and window is None:
        raise ValueError("layer_types has sliding_attention, but there is no sliding_window")
    return {
        "layer_types": list(types),
        "sliding_window": window if sliding else None,
        "use_sliding_window": sliding,
    }
