"""What a slot may read: the views of a recurrence as masks.

SAME    t' <= t  and  k' = min(k, halt of t')
DUO     t' <= t  and  k' <= k
ALL     t' <  t,  or  t' = t and k' <= k
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .roles import View
from .slot_cache import Tags

MASKED = ("sdpa", "eager")
"""Attention backends that take a mask of any shape."""


def read_mask(view: View, query: Tags, key: Tags, reach: int | None, dtype: torch.dtype | None) -> Tensor:
    """Who reads whom, `[B, 1, M, N]`: bool, or with a dtype the number to add to the logit."""
    t, k = query.token.unsqueeze(2), query.trip.unsqueeze(2)  # [B, M, 1]
    of, at = key.token.unsqueeze(1), key.trip.unsqueeze(1)  # [B, 1, N]
    if view is View.ALL:
        seen = (of < t) | ((of == t) & (at <= k))
    elif view is View.DUO:
        seen = (of <= t) & (at <= k)
    else:
        assert key.halt is not None
        last = key.trip.eq(key.halt).unsqueeze(1)
        seen = (of <= t) & ((at == k) | (last & (at < k)))  # at = min(k, halt), without numbers of [M, N]
    if reach is not None:
        seen = seen & (t - of < reach)
    if query.document is not None and key.document is not None:
        seen = seen & (query.document.unsqueeze(2) == key.document.unsqueeze(1))
    if key.live is not None:
        seen = seen & key.live.unsqueeze(1)
        # Padding sees anything: a softmax over nothing would be no number.
        seen = seen | ~seen.any(-1, keepdim=True)
    seen = seen.unsqueeze(1)
    if dtype is None:
        return seen
    bias = torch.zeros((), dtype=dtype, device=seen.device) if key.bias is None else key.bias.to(dtype)[:, None, None]
    return torch.where(seen, bias, torch.finfo(dtype).min)


def side_by_side(parts: Sequence[Tags], interleave: bool = False) -> Tags:
    """The slots of several trips of the same tokens on one axis."""
    batch = max(len(x) for part in parts for x in (part.token, part.live, part.bias, part.document) if x is not None)

    def join(name: str, fill: Any) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        if all(x is None for x in found):
            return None
        shape = (batch, parts[0].token.shape[1])
        like = next(x for x in found if x is not None)
        full = [like.new_full(shape, fill) if x is None else x.expand(shape) for x in found]
        return torch.stack(full, 2).flatten(1, 2) if interleave else torch.cat(full, 1)

    token, trip = join("token", 0), join("trip", 0)
    assert token is not None and trip is not None
    return Tags(token, trip, join("live", True), join("bias", 0.0), join("document", 0))
