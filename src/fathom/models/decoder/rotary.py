"""Rotary position embedding: the same results as Qwen3's, bit for bit, without negating half of each head.

The rotation:

(x₁, x₂) → (x₁, x₂) ⊙ cos + (x₂, x₁) ⊙ (−sin, sin)      over the two halves of a head, or of its first dimensions

A backbone may rotate a part of each head (`partial_rotary_factor`), rotate in float32, have separate angles for each
layer type, or have no angles because its positions are learned.

`generation.py` reads a text again when its length changes the angles; `rereads` in `configuration.py` says for which
models.

Every iteration of a token has the token's position (`trips/walk.py`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..axes.numerics import widen

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, `[B, T, R]` each, R the dimensions of a head that are turned."""
Rotation: TypeAlias = Angles | dict[str, Angles] | None
"""The angles of all layers, of each type of layer, or none where positions are learned. `rotary_emb` makes them, as
Qwen3's does; layers get them with signed sines."""


def build_rotary(config: DecoderConfig) -> nn.Module:
    """The module that computes rotary cosines and sines from positions."""
    if config.positions == "learned":
        return NoRotary()
    return RotaryByType(config) if config.rope_by_layer_type else RotaryEmbedding(config)


class RotaryEmbedding(Qwen3RotaryEmbedding):
    """Angles of positions."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.wide = config.rope_float32
        self.forgets = "dynamic" in self.rope_type and config.rereads
        """Whether longer texts that were read before must not matter, as they do in transformers."""

    def changes(self, before: int, now: int) -> bool:
        """Whether the rotary angles of a text change when it grows from `before` to `now` tokens."""
        if self.rope_type == "longrope":
            return bool(before <= self.config.rope_parameters["original_max_position_embeddings"] < now)
        return "dynamic" in self.rope_type and now > max(before, self.original_max_seq_len)

    @staticmethod
    def compute_default_rope_parameters(
        config: DecoderConfig, device: torch.device | None = None, **kwargs: object
    ) -> tuple[Tensor, float]:
        """The inverse frequencies for the rotated part of a head, and an attention factor of 1."""
        rope = config.rope_parameters
        size = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        inverse = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
        return inverse.to(device), 1.0

    def forward(self, x: Tensor, position_ids: Tensor) -> Angles:
        """The cosines and sines for positions `[B, T]`, in the dtype of `x`, or at least float32 if `rope_float32` is
        set."""
        if self.forgets:
            self.inv_freq, self.max_seq_len_cached = self.original_inv_freq.to(x.device), self.original_max_seq_len
        return super().forward(widen(x[..., :0]) if self.wide else x, position_ids)


class RotaryByType(nn.ModuleDict):
    """Rotary embeddings with separate parameters for each layer type."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        for kind in dict.fromkeys(config.layer_types):
            one = copy.copy(config)
            one.rope_parameters = config.rope_parameters[kind]
            self[kind] = RotaryEmbedding(one)

    def changes(self, before: int, now: int) -> bool:
        """Whether the rotary angles of any layer type change when a text grows from `before` to `now` tokens."""
        return any(one.changes(before, now) for one in self.values() if isinstance(one, RotaryEmbedding))

    def forward(self, x: Tensor, position_ids: Tensor) -> dict[str, Angles]:
        """The cosines and sines for positions `[B, T]`, by layer type."""
        return {kind: rotary(x, position_ids) for kind, rotary in self.items()}


class NoRotary(nn.Module):
    """Stands in for rotary embeddings in models whose learned positions are added to the embeddings."""

    def changes(self, before: int, now: int) -> bool:
        """False."""
        return False

    def forward(self, x: Tensor, position_ids: Tensor) -> None:
        """None."""


def angles(rotary: nn.Module, x: Tensor, positions: Tensor, furthest: Tensor | None) -> Rotation:
    """The rotary cosines and signed sines for positions `[1 or B, T]`.

    `furthest` is the last position of the whole forward pass, if angles depend on it and `positions` may be a part.
    """
    sign = signed if getattr(rotary, "signs", True) else lambda made: made
    if furthest is None:
        return sign(rotary(x, positions))
    made = sign(rotary(x, torch.cat((positions, furthest.expand(len(positions), 1)), 1)))
    if isinstance(made, dict):
        return {kind: (cos[:, :-1], sin[:, :-1]) for kind, (cos, sin) in made.items()}
    return None if made is None else (made[0][:, :-1], made[1][:, :-1])


def signed(made: Rotation) -> Rotation:
    """Put the rotation's signs into the sines, (−sin, sin) instead of (sin, sin), once for all layers."""
    if made is None:
        return None
    if isinstance(made, dict):
        return {kind: _signed(*angles) for kind, angles in made.items()}
    return _signed(*made)


def _signed(cos: Tensor, sin: Tensor) -> Angles:
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of queries and keys `[B, H, T, D]` by cosines and signed sines, `[B, T, R]` each."""
    turned = cos.shape[-1]
    if turned < query.shape[-1]:
        first = rotate(query[..., :turned], key[..., :turned], cos, sin)
        query, key = (torch.cat((a, x[..., turned:]), -1) for a, x in zip(first, (query, key), strict=True))
        return query, key
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Rotate.apply(query, cos, sin), _Rotate.apply(key, cos, sin)
    if query.shape[2] > 1:
        return _swapped(query, cos, sin), _swapped(key, cos, sin)
    both = _swapped(torch.cat((query, key), 1), cos, sin)  # with one token, fewer operations are faster
    heads = query.shape[1]
    return both[:, :heads], both[:, heads:]


def _swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos + torch.cat((x[..., half:], x[..., :half]), -1) * sin
    return out if out.dtype is x.dtype else out.to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    half = x.shape[-1] // 2
    low, high = slice(None, half), slice(half, None)
    of_low, of_high = (high, low) if back else (low, high)  # transposed: the sines change places
    out = x * cos
    out[..., low] += x[..., high] * sin[..., of_low]
    out[..., high] += x[..., low] * sin[..., of_high]
    return out if out.dtype is x.dtype else out.to(x.dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, back=True), None, None
