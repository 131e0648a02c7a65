"""Read the keys of a `config.json`: each key is implemented, ignored for a known reason, or refused by name.

The rules:

- A key that the forward pass of the family's own class reads is built, or refused where its value means something that
  Fathom's decoder does not have.
- A key that the class does not read is ignored if the class declares it, or if published files carry it.
- Bookkeeping is ignored: who wrote the file, how to generate, what to return.
- `sliding_window` and `layer_types` are refused where the class does not read them but transformers' cache, which reads
  them in every family, would forget tokens: the class then generates other tokens than its forward pass predicts.
- Any other key is refused, since it may name another computation.

The lists stand in the families' files. They are not taken from the installed classes when a checkpoint is opened: a
key that a later transformers declares and reads would then be ignored, and so change what is computed. A test compares
the lists with the installed classes instead: with their declared fields, with the attributes that their modeling files
read, and with their logits when an ignored key changes.

`models/configuration.py` reads and records `ignore_keys`, and checks the keys of Fathom's own `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

from transformers import GenerationConfig

Values: TypeAlias = dict[str, Any]
"""Keys of a configuration, ours or theirs."""

BACKEND = ("_attn_implementation", "attn_implementation")
"""Keys that choose an attention backend, the one that wins first."""
BOOKKEEPING = frozenset(
    (
        *("model_type", "architectures", "auto_map", "custom_pipelines", "_name_or_path", "name_or_path"),
        "_model_name_or_path",
        *("_commit_hash", "transformers_version", "torch_dtype", "dtype", "quantization_config", "tokenizer_class"),
        *("tokenizer_model_max_length", "tokenizer_padding_side", "model_max_length", "max_sequence_length"),
        *("unsloth_version", "unsloth_fixed", "transformers.js_config", "base_model_name_or_path", "finetuning_task"),
        *("task_specific_params", "prefix", "problem_type", "id2label", "label2id", "num_labels", "_num_labels"),
        *("classifier_dropout", "classifier_bias", "torchscript", "use_bfloat16", "tf_legacy_loss", "model_parallel"),
        *("xla_device", "author", "license", "created_date"),
        *("use_cache", "output_past", "output_attentions", "output_hidden_states", "output_cross_attentions"),
        *("return_dict", "use_return_dict", "tie_last_hidden_states", "keys_to_ignore_at_inference"),
        *("gradient_checkpointing", "chunk_size_feed_forward", "is_decoder", "is_encoder_decoder"),
        *("tie_encoder_decoder", "cross_attention_hidden_size", *BACKEND, "_attn_implementation_autoset"),
        *("_attn_implementation_internal", "experts_implementation", "_experts_implementation_internal"),
        *("_flash_attn_2_enabled", "use_flash_attention_2", "use_flash_attention", "use_flash_attn", "flash_attn"),
        *("_use_flash_attention_2", "forced_decoder_ids", "min_new_tokens", "num_beam_groups"),
        *(key for key in GenerationConfig().to_dict() if not key.startswith("_")),
    )
)
"""Keys of any family without a meaning for the logits."""
TOKEN = "_token_id"
"""How the names of further bookkeeping keys end."""
CAUSAL = {
    "use_bidirectional_attention": "Fathom's decoder is causal",
    "add_cross_attention": "Fathom's decoder has no such attention",
    "per_layer_config": "the layers of Fathom's decoder are alike",
    "pruned_heads": "the layers of Fathom's decoder are alike",
}
"""Keys of any family that may only be off (null, false or empty), and why."""

ROPE_READ = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": ("factor", "partial_rotary_factor"),
}
"""The keys that each type of rotary embedding reads in addition to `rope_type`, `rope_theta` and, in some families,
`partial_rotary_factor`."""
ROPE_KNOWN = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "finetuned", "attn_factor"),
    *(key for keys in ROPE_READ.values() for key in keys),
}
"""Keys that may stand in rotary parameters; a type ignores those that it does not read."""
ROPES = ("rope_parameters", "rope_scaling")
"""Where rotary parameters are, in the new spelling and in the old one."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layer types, which may have rotary parameters of their own."""
CONTEXT = ("max_position_embeddings", "n_positions")
"""The longest text of a model, under its two names."""


@dataclass(frozen=True)
class Keys:
    """How a reader treats the keys of one kind of `config.json`."""

    kind: str
    """Its `model_type`."""
    read: Collection[str]
    """Keys that it builds."""
    ignored: Collection[str] = ()
    """Keys that the kind's own class does not read."""
    off: Mapping[str, str] = field(default_factory=dict)
    """Keys that may only be off (null, false or empty), and why."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """The fields of its configuration class; a key with its default value says nothing."""

    def meaningful(self, theirs: Values) -> Values:
        """The keys that Fathom implements; raises a one-line `ValueError` that names keys it neither implements nor may
        ignore."""
        if not theirs.get("is_causal", True):
            raise self._refusal({"is_causal": theirs["is_causal"]}, "Fathom's decoder is causal")
        causal = {key: why for key, why in CAUSAL.items() if key not in self.ignored}
        for key, why in {**causal, **self.off}.items():
            if theirs.get(key):
                raise self._refusal({key: theirs[key]}, why)
        if strange := self._unknown(theirs):
            these = "this key" if len(strange) == 1 else "these keys"
            raise self._refusal(strange, f"Fathom does not know {these} of {self.kind} models{self._near(strange)}")
        if forgets := self._of_the_cache(theirs):
            why = f"the layers of {self.kind} models have no window, but the cache of transformers follows this key"
            raise self._refusal(forgets, f"{why}: generate would forget tokens that the forward pass reads")
        return {key: value for key, value in theirs.items() if key in self.read}

    def _unknown(self, theirs: Values) -> Values:
        known = {*self.read, *self.ignored, *BOOKKEEPING, *CAUSAL, *self.off, "is_causal"}
        found = {}
        for key, value in theirs.items():
            says_nothing = key.endswith(TOKEN) or (key in self.defaults and value == self.defaults[key])
            if key not in known and not says_nothing:
                found[key] = value
            if key in ROPES and key in self.read:
                found |= {f"{key}.{inner}": one for inner, one in _strange(value).items()}
        return found

    def _near(self, strange: Values) -> str:
        """A suggestion for an error message: the known key most similar to the first unknown key; empty if none is
        similar."""
        section, _, last = next(iter(strange)).rpartition(".")
        near = get_close_matches(last, ROPE_KNOWN if section else [*self.read], n=1, cutoff=0.8)
        return f"; did you mean {near[0]}?" if near else ""

    def _of_the_cache(self, theirs: Values) -> Values:
        """Keys that a class's layers ignore but that make transformers' cache drop tokens that are still in the
        context."""
        given = {key: theirs[key] for key in ("layer_types", "sliding_window") if theirs.get(key) is not None}
        types, window = given.get("layer_types"), given.get("sliding_window")
        ignored = {key: value for key, value in given.items() if key not in self.read}
        kinds = {"sliding_attention"} if types is None else set(types)
        if not ignored or kinds == {"full_attention"}:
            return {}
        if kinds == {"sliding_attention"} and "sliding_window" in self.read:
            return {}  # all layers have the window, as in the cache
        context = next((values[key] for values in (theirs, self.defaults) for key in CONTEXT if key in values), None)
        long = isinstance(window, int) and isinstance(context, int) and window >= context
        return {} if long and kinds <= set(LAYER_TYPES) else ignored

    def _refusal(self, keys: Values, why: str) -> ValueError:
        key, value = next(iter(keys.items()))
        said = json.dumps(value, default=str)[:60] + (f", and {len(keys) - 1} more" if len(keys) > 1 else "")
        them = "it" if len(keys) == 1 else "them"
        ignored = f"`ignore_keys={json.dumps(list(keys))}`"
        sign = "" if why.endswith("?") else ";"
        return ValueError(f"{key}={said}: {why}{sign} {ignored} opens the model as if config.json lacked {them}")


def _strange(rope: object) -> Values:
    """The unknown keys of rotary parameters, which may be nested by layer type."""
    found: Values = {}
    for key, value in rope.items() if isinstance(rope, dict) else ():
        if key in LAYER_TYPES:
            found |= {f"{key}.{inner}": one for inner, one in _strange(value).items()}
        elif key not in ROPE_KNOWN:
            found[key] = value
    return found


def rotation(rope: Values, head_dim: int, partial: bool) -> Values:
    """The rotary parameters that a family's class reads; raises a `ValueError` if the class cannot run them.

    Args:
        rope: The parameters of one type of rotary embedding.
        head_dim: The width of a head.
        partial: Whether the class can rotate a part of each head.
    """
    kind = rope["rope_type"]
    if kind not in ROPE_READ:
        raise ValueError(f"rope_parameters.rope_type must be one of {', '.join(ROPE_READ)}, got {kind!r}")
    read = {"rope_type", "rope_theta", *ROPE_READ[kind], *(("partial_rotary_factor",) if partial else ())}
    factor = rope.get("partial_rotary_factor", 1.0)
    if kind != "default" and "partial_rotary_factor" not in read and int(head_dim * factor) != head_dim:
        raise ValueError(
            f"rope_type {kind} with partial_rotary_factor={factor}: this model family rotates all channels of a head"
        )
    if not isinstance(rope["rope_theta"], int | float):
        raise ValueError(f"rope_theta must be a number, got {rope['rope_theta']!r}")
    return {key: value for key, value in rope.items() if key in read}
