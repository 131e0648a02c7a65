"""The order in which layers with a recurrent state (Mamba, linear attention) read padded or packed tokens.

Attention hides padding and other documents by its mask. A state has no mask: padding between two tokens lets it decay,
and the next document of a packed row finds what the last one left. So such a layer reads packed documents as rows of
their own, and a row's padding before its tokens, where every state is still zero. What it returns is put back.

Padding inside a text that is longer than a layer's window is refused (`check_windows`). With layers that have a state,
`modeling.py` returns no cache from a packed forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..axes.host import to_host


@dataclass
class Arrangement:
    """Where each token is read by layers with a recurrent state."""

    index: Tensor
    """`[N, L]`: which token of the batch, counted row by row, is read at each place."""
    back: Tensor
    """`[B, T]`: at which of these places, counted row by row, each token is read."""
    mask: Tensor | None = None
    """`[N, L]`: which places hold no padding; None if padding comes last, where nothing reads it."""

    def read(self, x: Tensor) -> Tensor:
        """Rearrange a batch `[B, T, D]` into the order that layers with a recurrent state read, `[N, L, D]`."""
        return x.flatten(0, 1)[self.index]

    def put_back(self, y: Tensor) -> Tensor:
        """Rearrange outputs `[N, L, D]` back into the batch's order, `[B, T, D]`."""
        return y.flatten(0, 1)[self.back]


def of_documents(position_ids: Tensor, batch: int) -> Arrangement | None:
    """The order that puts each packed document in a sequence of its own, from positions `[1 or B, T]`; None if none are
    packed."""
    if position_ids.is_meta:
        return None
    position_ids = position_ids.expand(batch, -1)
    column = torch.arange(position_ids.shape[1], device=position_ids.device).expand_as(position_ids)
    starts = torch.nn.functional.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0), value=True)
    offset = column - torch.where(starts, column, 0).cummax(1).values
    document = starts.flatten().cumsum(0).view_as(column) - 1
    count, longest = to_host(torch.stack((document[-1, -1], offset.max())))
    if count + 1 == batch:
        return None
    back = document * (longest + 1) + offset
    index = back.new_zeros((count + 1) * (longest + 1))
    index[back.flatten()] = torch.arange(back.numel(), device=back.device)
    return Arrangement(index.view(count + 1, longest + 1), back)


def of_padding(mask: Tensor, length: int, stores: bool) -> Arrangement | None:
    """The order that puts each sequence's padding before its tokens, from a mask `[B, past + T]`; None without padding
    among the new tokens.

    Args:
        mask: Which tokens are none of padding.
        length: The number of new tokens, T.
        stores: Whether states are stored, so that a token of padding alone would change one.

    Raises:
        ValueError: If padding follows tokens whose state is stored.
    """
    tracing = torch.compiler.is_compiling() or mask.is_meta
    live = mask[:, -length:].bool()
    if (length == 1 and (tracing or not stores)) or (not tracing and to_host(live.all())):
        return None
    if length == 1:
        raise ValueError(
            "a padding token read alone would change the recurrent state: read it with the tokens after it"
        )
    stored = mask[:, :-length].bool().any(1) & ~live.all(1)
    if mask.shape[1] > length and not tracing and to_host(stored.any()):
        raise ValueError("padding after cached tokens would change the recurrent state: pad on the left")
    order = live.to(torch.int8).argsort(dim=1, stable=True)
    first = torch.arange(len(mask), device=mask.device).unsqueeze(1) * length
    back = torch.empty_like(order).scatter_(1, order, torch.arange(length, device=mask.device).expand_as(order))
    return Arrangement(order + first, back + first, live.gather(1, order))


def check_windows(mask: object, window: int) -> None:
    """Refuse padding between the tokens of a text that is longer than a layer's window, which would count padding as
    tokens.

    Raises:
        ValueError: If a row of the mask, `[B, past + T]`, has such padding.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] <= window:
        return
    if torch.compiler.is_compiling() or mask.is_meta:
        return
    live = mask.bool()
    padded = ((live.cumsum(1) > 0) & ~live).cumsum(1) > 0  # after a token
    if to_host((padded & live).any()):
        raise ValueError("padding between tokens would use up a layer's sliding window: pad on the left")
