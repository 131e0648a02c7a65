"""What the kernels share: a tile of rows, how its numbers are read, and softmax-weighted sums of them."""

from __future__ import annotations

from typing import Any, TypeAlias

import triton
import triton.language as tl

Context: TypeAlias = Any
"""What autograd hands from forward to backward; its attributes are made on the way."""


@triton.jit
def tile(number, rows, TALL: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of `[rows, WIDTH]`: its rows and columns, which rows there are, which places there are, and the places."""
    row = number * TALL + tl.arange(0, TALL)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    live = row < rows
    inside = live[:, None] & (column < WIDTH)[None, :]
    return row, column, live, inside, row[:, None] * WIDTH + column[None, :]


@triton.jit
def read(places, inside):
    """Numbers as sums are taken of them: in float32, or float64 for float64; 0 outside."""
    x = tl.load(places, mask=inside, other=0.0)
    return x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)


@triton.jit
def nothing(live, inside, WIDE: tl.constexpr):
    """What `absorb` begins with: the highest score so far, and both sums."""
    return tl.full(live.shape, float("-inf"), WIDE), tl.zeros(live.shape, WIDE), tl.zeros(inside.shape, WIDE)


@triton.jit
def absorb(top, total, sum_, score, term):
    """Take a score `[R]` and its term `[R, D]` into Σ exp(score - top) and Σ exp(score - top) · term."""
    higher = tl.maximum(top, score)
    old, new = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * old + new, sum_ * old[:, None] + new[:, None] * term
