"""What a checkpoint decides when it is opened, and what transformers would print about it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

SHAPING = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "attention_bias", "output_bias", "mlp_bias", "gated_mlp"),
    *("norm", "norm_placement", "qk_norm", "positions", "tie_word_embeddings"),
)
"""Configuration keys that name the decoder's tensors, give them their shapes, or tie two of them."""
LEARNED = ("max_position_embeddings", "position_offset")
"""Those that do so only where positions are a learned table."""


class ShapeError(ValueError):
    """Keys that contradict a checkpoint's tensors; the message is one line."""


def require_shapes(theirs: PreTrainedConfig, wanted: Mapping[str, object], keys: Collection[str] = SHAPING) -> None:
    """Refuse values of shaping keys other than the checkpoint's.

    Args:
        theirs: The checkpoint's configuration.
        wanted: The caller's values by key; keys that are absent agree.
        keys: The shaping keys to compare.
    """
    if getattr(theirs, "positions", None) == "learned" and keys is SHAPING:
        keys = (*SHAPING, *LEARNED)
    wrong = [key for key in keys if key in wanted and wanted[key] != getattr(theirs, key)]
    if wrong:
        said = ", ".join(f"{key}={_shown(getattr(theirs, key))} (not {_shown(wanted[key])})" for key in wrong)
        these = "this key" if len(wrong) == 1 else "these keys"
        raise ShapeError(f"the checkpoint has {said}; its config.json decides, so leave {these} out")


def differing(
    theirs: PreTrainedConfig, ours: PreTrainedConfig, keys: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Keys whose value differs from the checkpoint's, as (checkpoint's, ours); options and the like one by one.

    Args:
        theirs: The checkpoint's configuration.
        ours: That configuration under `keys`.
        keys: What the caller set.
    """
    found: dict[str, tuple[object, object]] = {}
    for key, value in keys.items():
        before, after = getattr(theirs, key, None), getattr(ours, key, None)
        if not isinstance(value, dict) or not isinstance(before, dict) or not isinstance(after, dict):
            found[key] = before, after
            continue
        for inner in value:
            if inner in before:  # an option of another mechanism has no earlier value
                found[f"{key}.{inner}"] = before[inner], after.get(inner)
    return {key: (before, after) for key, (before, after) in found.items() if before != after}


def described(changes: Mapping[str, tuple[object, object]]) -> str:
    """What `differing` returned, as text."""
    return ", ".join(f"{key} {_shown(before)} → {_shown(after)}" for key, (before, after) in changes.items())


def _shown(value: object) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def require_one_head(model: PreTrainedModel) -> None:
    """Refuse a checkpoint with a head of its own whose config.json says that the head is tied.

    transformers leaves the two untied after a warning; the next call of `tie_weights` would discard the head.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if not model.config.tie_word_embeddings or not isinstance(head, nn.Module) or not isinstance(embedding, nn.Module):
        return
    if head.weight is not embedding.weight and not head.weight.is_meta and not embedding.weight.is_meta:
        raise ShapeError(
            "config.json says tie_word_embeddings=true, but lm_head.weight differs from the embedding; "
            "write tie_word_embeddings=false there to keep the head, or delete lm_head.weight"
        )


@contextmanager
def without_report() -> Iterator[None]:
    """Hide transformers' table of missing, unexpected and misshapen tensors, about which the caller raises errors."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_no_report)


def _no_report(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "LOAD REPORT" not in text and "so we will NOT tie them" not in text
