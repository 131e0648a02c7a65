"""Decides whether prompts of one batch may have different lengths, judging by the model's position encoding."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

FIXED = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Kinds of rotary angles that depend on a token's position alone."""


def rotary_kinds(model: PreTrainedModel) -> set[str]:
    """The model's types of rotary embedding, one for each type of layer; empty for learned or no positions."""
    config: Any = model.config
    if getattr(config, "host", ""):  # the family's own layers have the family's own angles
        config = model.base_model.native_config()
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one entry per layer type, or one
    return {str(part["rope_type"]) for part in parts if "rope_type" in part}


def passes_the_context(model: PreTrainedModel) -> bool:
    """Whether a sequence of a batch may exceed the model's context length without changing the other sequences while
    they are generated.

    Learned positions have none there, and dynamic angles then change for all rows.
    """
    kinds = rotary_kinds(model)
    return bool(kinds) and kinds <= FIXED


def depends_on_company(model: PreTrainedModel) -> bool:
    """Whether a sequence's rotary angles depend on the longest sequence of its batch, even within the context
    length; `engine.py` then refuses to serve the model."""
    return "longrope" in rotary_kinds(model)
