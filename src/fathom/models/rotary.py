"""Rotary position embedding: Qwen3's, to the last bit, without its concatenations.

(x₁, x₂) → (x₁ cos − x₂ sin, x₂ cos + x₁ sin)      over the two halves of a head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb, rotate_half


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate `[B, H, T, D]` queries and keys by `[B, T, D]` cosines and sines."""
    if torch.compiler.is_compiling():
        return apply_rotary_pos_emb(query, key, cos, sin)
    if torch.is_grad_enabled():
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
    if query.shape[2] > 1:
        return apply_rotary_pos_emb(query, key, cos, sin)
    both = torch.cat((query, key), 1)  # of a single token the number of steps counts, not their size
    turned = (both * cos.unsqueeze(1)).add_(rotate_half(both) * sin.unsqueeze(1))
    heads = query.shape[1]
    return turned[:, :heads], turned[:, heads:]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    # x - y and x + (-y) are the same number, so no half needs its sign flipped first.
    half = x.shape[-1] // 2
    low, high = slice(None, half), slice(half, None)
    if back:
        low, high = high, low  # the transpose: the halves change places, the sines stay
    out = x * cos
    out[..., low] -= x[..., high] * sin[..., :half]
    out[..., high] += x[..., low] * sin[..., half:]
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
