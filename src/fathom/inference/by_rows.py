"""Computes attention for each sequence of a batch separately, so that its result is bitwise independent of the other
sequences.

A kernel that reads a batch takes as many keys for each sequence as the longest has, and masks the rest. The masked ones
weigh nothing, but the order of a sum depends on how many there are, and so does its last bit. A slot cache also keeps
the slots of a sequence in another order in company. Layers in eight bits can enlarge a last bit until a text differs
from the text alone. Here each sequence reads the keys that it sees, in an order that only they decide.
"""

from __future__ import annotations

import threading
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fathom.checkpoints.int8 import Int8Linear
from fathom.models.trips.reading import BY_ROWS
from fathom.models.trips.walk import DEAD

NAME, OF_SLOTS = "sdpa_rows", f"sdpa{BY_ROWS}"
"""Backends for models that keep a sequence's keys in the order of its tokens, and for those with slots."""

Seen = tuple[slice | Tensor, Tensor | None]
"""The keys that a sequence's queries see, and the mask among them, `[1, 1, T, n]`; None if all see all."""


def needs_rows(model: nn.Module) -> bool:
    """Whether a model has linear layers with 8-bit weights."""
    return any(isinstance(module, Int8Linear) for module in model.modules())


def attend_by_rows(model: PreTrainedModel) -> None:
    """Make a model that uses `sdpa` compute attention for each sequence separately; models with another backend are
    unchanged."""
    if model.config._attn_implementation == "sdpa":
        slotted = getattr(model.base_model, "slotted", False)
        name = OF_SLOTS if slotted else NAME
        AttentionInterface.register(name, partial(_attend, sort=slotted))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation(name)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # by its place from kvpress's wrapper
    sort: bool = False,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend in each sequence separately, from queries `[B, H, T, D]` and keys and values `[B, H_kv, N, D]` to outputs
    `[B, T, H, D]`."""
    attend, made = ALL_ATTENTION_FUNCTIONS["sdpa"], []
    sort = sort and not (attention_mask is None and query.shape[2] > 1)  # else the order of the keys is the mask
    for row, (places, mask) in enumerate(_seen(attention_mask, len(query))):
        mine = slice(row, row + 1)
        asked, keys, values = query[mine].contiguous(), key[mine, :, places], value[mine, :, places]
        if sort:
            order = keys[0, 0, :, 0].argsort()
            keys, values, mask = keys[:, :, order], values[:, :, order], None if mask is None else mask[..., order]
        made.append(attend(module, asked, keys, values, mask, dropout=dropout, **kwargs)[0])
    return torch.cat(made), None


_LAST = threading.local()
"""The mask of each thread's last call, which all layers share, and what was found in it."""


def _seen(mask: Tensor | None, rows: int) -> list[Seen]:
    """The keys that each sequence attends to, from a boolean or additive mask `[B or 1, 1, T, N]`."""
    if mask is None:
        return [(slice(None), None)] * rows
    last, found = getattr(_LAST, "found", (None, []))
    if last is not mask or len(found) != rows:
        found = [_seen_by(one[None]) for one in mask.expand(rows, *mask.shape[1:])]
        _LAST.found = mask, found
    return found


def _seen_by(mask: Tensor) -> Seen:
    """The keys that one sequence attends to, from its mask `[1, 1, T, N]`."""
    visible = mask if mask.dtype == torch.bool else mask > DEAD / 2
    seen = visible.flatten(0, 2).any(0).nonzero()[:, 0]
    end = int(seen[-1]) + 1 if len(seen) else 1
    places: slice | Tensor = slice(0, end) if len(seen) in (0, end) else seen
    among = mask[..., places]
    plain = among.dtype == torch.bool and among.shape[2] == 1 and bool(among.all())
    return places, None if plain else among
