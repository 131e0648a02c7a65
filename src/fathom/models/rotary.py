"""Rotary position embedding: Qwen3's, to the last bit, without its negations.

(x₁, x₂) → (x₁, x₂) ⊙ cos + (x₂, x₁) ⊙ (−sin, sin)      over the two halves of a head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding


class RotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's angles."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and (−sin, sin), `[B, T, D]` each, of positions `[B, T]` and in the dtype of `x`."""
        cos, sin = super().forward(x, position_ids)
        half = sin.shape[-1] // 2
        return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `[B, H, T, D]` queries and keys by what `RotaryEmbedding` makes, `[B, T, D]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
    if query.shape[2] > 1:
        return _swapped(query, cos, sin), _swapped(key, cos, sin)
    both = _swapped(torch.cat((query, key), 1), cos, sin)  # of one token the number of steps counts, not their size
    heads = query.shape[1]
    return both[:, :heads], both[:, heads:]


def _swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    half = x.shape[-1] // 2
    low, high = slice(None, half), slice(half, None)
    of_low, of_high = (high, low) if back else (low, high)  # back, the transpose: the sines change places
    out = x * cos
    out[..., low] += x[..., high] * sin[..., of_low]
    out[..., high] += x[..., low] * sin[..., of_high]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, back=True), None, None
