"""Whether the prompts of one batch may end, and stand, at different places: a model's positions say."""

from __future__ import annotations

from transformers import PreTrainedModel

FIXED = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Kinds of rotary angles that depend on a token's position alone."""


def rotary_kinds(model: PreTrainedModel) -> set[str]:
    """Kinds of its rotary angles, one of each sort of layer; none where positions are learned, or there are none."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # a part for each kind of layer, or one
    return {str(part["rope_type"]) for part in parts if "rope_type" in part}


def passes_the_context(model: PreTrainedModel) -> bool:
    """Whether a row may go on past the context until others of its batch end: it changes nothing in them.

    Learned positions have none there, and dynamic angles then change for all rows.
    """
    kinds = rotary_kinds(model)
    return bool(kinds) and kinds <= FIXED


def depends_on_company(model: PreTrainedModel) -> bool:
    """Whether angles depend on the longest row of a call, within the context too."""
    return "longrope" in rotary_kinds(model)
