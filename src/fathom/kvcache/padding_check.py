"""Checks the batches that compression accepts: unbroken sequences, padded on the left in a cache, or on the right in
training."""

from __future__ import annotations

import torch
from torch import Tensor

PAD_TOKEN = "where the prompt itself contains pad_token_id, pass attention_mask=torch.ones_like(input_ids)"


def real_tokens(attention_mask: object) -> Tensor:
    """A mask `[B, T]` of the tokens that are no padding; attention masks of another kind are refused."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        raise ValueError("compression makes its own causal mask: pass no attention_mask, or a padding mask [batch, T]")
    return attention_mask.bool()


def whole_mask(attention_mask: object, shape: tuple[int, int], padded: bool) -> None:
    """Refuse a padding mask that does not cover all tokens, those in the cache included, i.e. has another shape than
    `[B, seen + q]`. Without any padding, a mask of another shape is allowed."""
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2 or tuple(attention_mask.shape) == shape:
        return
    if padded or not attention_mask.all():
        raise ValueError(
            f"attention_mask has the shape {list(attention_mask.shape)}; expected {list(shape)}: ones and zeros for "
            "all tokens, those in the cache included"
        )


def left_padding(real: Tensor) -> tuple[int, ...]:
    """The number of padding tokens to the left of each sequence; empty if there is none, or if there is padding
    elsewhere too."""
    left = (real.cummax(1).values == real) & real[:, -1:]
    return tuple((~real).sum(1).tolist()) if left.all() and not real.all() else ()


def padded_left(real: Tensor, pads: tuple[int, ...]) -> None:
    """Refuse padding other than `pads` tokens to the left of each sequence: compression would mix the padding into the
    memory."""
    first = torch.tensor(pads or (0,), device=real.device).unsqueeze(1)
    if not ((torch.arange(real.shape[1], device=real.device) >= first) == real).all():
        raise ValueError(
            "attention_mask has zeros after the first token of a sequence, and compression would mix padding into the "
            f"cache: pad sequences on the left, in the first forward pass only; {PAD_TOKEN}"
        )


def padded_right(real: Tensor) -> None:
    """Refuse padding before or within a sequence; padding behind it is allowed, because no token attends to it."""
    if not (real.cummin(1).values == real).all():
        raise ValueError(
            "attention_mask has zeros before the last token of a sequence, and compression would mix padding into the "
            "compressed entries: in training, pad sequences on the right"
        )


def unbroken(positions: Tensor, real: Tensor | None = None) -> None:
    """Refuse sequences that are packed together, and gaps among the real tokens `[B, T]`."""
    steps = positions.diff(dim=-1) == 1
    if not (steps if real is None else steps | ~real[:, :-1]).all():
        raise ValueError(
            "position_ids restart or jump within a sequence: compression takes one unbroken text per sequence, so do "
            "not pack documents (join them with EOS and let position_ids run on instead)"
        )
