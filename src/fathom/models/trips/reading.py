"""Attention masks between slots (token, iteration) for the three views of a recurrence, and biases on keys' logits.

Slot (t, k) reads (t', k') if

    SAME    t' <= t  and  k' = min(k, halt of t')
    DUO     t' <= t  and  k' <= k
    ALL     t' <  t,  or  t' = t and k' <= k

A mask with a gradient rules out the flash kernels and takes memory for every query, key and head. So a bias on keys
becomes one or two more channels of queries and keys, which every kernel supports.

`walk.py` (`check_backend`) refuses attention backends without masks of any shape. `slot_table.py` (`gathering_pays`)
decides whether the slots that are read are copied, or all are read under a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..axes.numerics import widen
from ..axes.roles import View
from .slot_table import Tags

MASKED = ("sdpa", "eager")
"""Attention backends that take a mask of any shape."""
BY_ROWS = "_by_rows"
"""Ends the name of a backend that attends to each sequence by itself."""


def reads(view: View, t: Tensor, k: Tensor, of: Tensor, at: Tensor, halt: Tensor | None) -> Tensor:
    """Whether slot (token t, iteration k) reads slot (token `of`, iteration `at`); `halt` is the last iteration of
    token `of`."""
    if view is View.ALL:
        return (of < t) | ((of == t) & (at <= k))
    if view is View.DUO:
        return (of <= t) & (at <= k)
    assert halt is not None
    return (of <= t) & ((at == k) | ((at == halt) & (at < k)))  # at = min(k, halt), without a tensor of pairs


def read_mask(view: View, query: Tags, key: Tags, reach: int | None, dtype: torch.dtype | None) -> Tensor:
    """The attention mask between query and key slots, `[B, 1, M, N]`: boolean, or additive if a `dtype` is given.

    Args:
        view: The recurrence's view.
        query: The slots that read, M of them.
        key: The slots that may be read, N of them.
        reach: Number of earlier tokens that a slot reads; None for all.
        dtype: Type of an additive mask; None for a boolean one.
    """
    t, k = query.token.unsqueeze(2), query.trip.unsqueeze(2)  # [B, M, 1]
    of, at = key.token.unsqueeze(1), key.trip.unsqueeze(1)  # [B, 1, N]
    seen = reads(view, t, k, of, at, None if key.halt is None else key.halt.unsqueeze(1))
    if reach is not None:
        seen = seen & (t - of < reach)
    if query.document is not None and key.document is not None:
        seen = seen & (query.document.unsqueeze(2) == key.document.unsqueeze(1))
    if key.live is not None:
        seen = seen & key.live.unsqueeze(1)
        # A row that may read nothing (padding) reads everything, because a softmax over nothing is NaN.
        seen = seen | ~seen.any(-1, keepdim=True)
    seen = seen.unsqueeze(1)
    if dtype is None:
        return seen
    bias = torch.zeros((), dtype=dtype, device=seen.device) if key.bias is None else key.bias.to(dtype)[:, None, None]
    return torch.where(seen, bias, torch.finfo(dtype).min)


def with_key_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend queries, keys and values by channels such that their plain attention equals attention with `bias` on the
    logits.

    A query's new channel is a power of two c near 1 / scaling, so that it is exact; a key's is bias / (scaling c), in
    half precision split into its rounded value and the remainder. The output's new channels are 0.

    Args:
        query: `[B, H, M, D]`
        key: `[B, H_kv, N, D]`
        value: `[B, H_kv, N, D]`
        bias: `[B, N]`
        scaling: The kernel's factor on logits.
    """
    channel = 2.0 ** round(-math.log2(scaling))
    wide = widen(bias) / (scaling * channel)
    parts = [wide.to(key.dtype)]
    if parts[0].dtype != wide.dtype:
        parts.append((wide - parts[0]).to(key.dtype))
    more = torch.stack(parts, -1)[:, None].expand(-1, key.shape[1], -1, -1)  # [B, H_kv, N, 1 or 2]
    ones = query.new_full((), channel).expand(*query.shape[:-1], more.shape[-1])
    nothing = value.new_zeros(()).expand(more.shape)
    return torch.cat((query, ones), -1), torch.cat((key, more), -1), torch.cat((value, nothing), -1)


def attend_beside(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    earlier: tuple[Tensor, ...],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the keys and values of earlier iterations, (key, value, key, value, …), as well as to the new ones.

    The backward pass recomputes the concatenation. Otherwise every iteration would keep a copy of all earlier
    iterations.
    """

    def read(query: Tensor, key: Tensor, value: Tensor, *earlier: Tensor) -> tuple[Tensor, Tensor | None]:
        keys, values = torch.cat((*earlier[::2], key), 2), torch.cat((*earlier[1::2], value), 2)
        return attend(module, query, keys, values, mask, **kwargs)

    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return read(query, key, value, *earlier)
    return checkpoint(read, query, key, value, *earlier, use_reentrant=False)


def side_by_side(parts: Sequence[Tags], interleave: bool = False) -> Tags:
    """Concatenate the slots of several iterations on one axis, or interleave them token by token."""
    batch = max(len(x) for part in parts for x in (part.token, part.live, part.bias, part.document) if x is not None)

    def join(name: str, fill: float) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        if all(x is None for x in found):
            return None
        like = next(x for x in found if x is not None)
        shapes = [(batch, part.token.shape[1]) for part in parts]
        full = [like.new_full(s, fill) if x is None else x.expand(s) for x, s in zip(found, shapes, strict=True)]
        return torch.stack(full, 2).flatten(1, 2) if interleave else torch.cat(full, 1)

    token, trip = join("token", 0), join("trip", 0)
    assert token is not None and trip is not None
    return Tags(token, trip, join("live", True), join("bias", 0.0), join("document", 0))
