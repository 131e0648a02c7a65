"""The logit lens at one token position: what the model would have predicted there after every layer.

`live.py` limits how many tokens a server reads for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from fathom.errors import SettingsError
from fathom.lens.look import Array, Says, record, spell

if TYPE_CHECKING:
    from fathom.models import FathomForCausalLM

TOP = 5
"""Predictions that are kept for each visit."""


def look_at(
    model: FathomForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    said: int,
    max_trips: int | None = None,
    breathe: Callable[[], None] | None = None,
) -> dict[str, object]:
    """The next-token predictions after these tokens at every layer pass, as plain numbers and text for JSON.

    It makes one forward pass and applies the head to the last token alone, which costs much less than `look`.

    Args:
        model: Any `FathomForCausalLM`.
        tokenizer: Its tokenizer.
        tokens: The tokens before the position.
        said: The token that was generated there.
        max_trips: Loop iterations per token at most; None for the model's own number.
        breathe: As `look` takes it.
    """
    size = model.config.vocab_size
    if not tokens or not all(0 <= token < size for token in tokens):
        raise SettingsError(f"tokens: allowed: one or more token ids from 0 to {size - 1}")
    if not 0 <= said < size:
        raise SettingsError(f"said: allowed: a token id from 0 to {size - 1}")
    if len(tokens) > model.config.max_position_embeddings:
        raise SettingsError(f"tokens: allowed: at most {model.config.max_position_embeddings}, this model's context")
    device = model.device
    says = Says(model, torch.tensor([said], device=device), min(TOP, size), True, breathe)
    trips = record(model, torch.tensor(list(tokens), device=device), says, lambda *_: None, max_trips)
    plan = model.model.plan_of(max_trips or model.model.served_trips)
    visits = [{"layer": visit.layer, "trip": visit.trip} for trip in plan for visit in trip]
    found = zip(visits, says.chosen, says.probabilities, says.next_surprisal, strict=True)
    return {
        "trips": int(trips[-1]),
        "visits": [{**visit, **_shown(tokenizer, *one)} for visit, *one in found],
        "final": _shown(tokenizer, says.said, says.said_probabilities, says.surprisal),
    }


def _shown(tokenizer: PreTrainedTokenizerBase, chosen: Array, shares: Array, bits: Array) -> dict[str, object]:
    """The `top` predictions and the surprisal at one position, `[1, top]`, as text and rounded numbers."""
    top = [
        [spell(tokenizer, index), round(share, 5)]
        for index, share in zip(chosen[0].tolist(), shares[0].tolist(), strict=True)
    ]
    return {"top": top, "bits": round(float(bits[0]), 3)}
