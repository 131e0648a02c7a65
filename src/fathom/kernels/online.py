"""Parts that the kernels share: tiles of rows, loads, and online softmax-weighted sums."""

from __future__ import annotations

from typing import Any, TypeAlias

import triton
import triton.language as tl

Context: TypeAlias = Any
"""The context that autograd passes from forward to backward."""


@triton.jit
def tile(number, rows, TALL: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of a matrix `[rows, WIDTH]`: row and column indices, masks of valid rows and elements, and offsets in
    memory."""
    row = number * TALL + tl.arange(0, TALL)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    live = row < rows
    inside = live[:, None] & (column < WIDTH)[None, :]
    return row, column, live, inside, row[:, None] * WIDTH + column[None, :]


@triton.jit
def read(places, inside):
    """Load numbers as float32 (float64 if they are stored in float64); masked elements are 0."""
    x = tl.load(places, mask=inside, other=0.0)
    return x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)


@triton.jit
def nothing(live, inside, WIDE: tl.constexpr):
    """The initial state of the online softmax `absorb`: the highest score so far, and both sums."""
    return tl.full(live.shape, float("-inf"), WIDE), tl.zeros(live.shape, WIDE), tl.zeros(inside.shape, WIDE)


@triton.jit
def absorb(top, total, sum_, score, term):
    """A step of online softmax: add a score `[R]` to Σ exp(score - top), and its term `[R, D]` to Σ exp(score - top) ·
    term."""
    higher = tl.maximum(top, score)
    old, new = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * old + new, sum_ * old[:, None] + new[:, None] * term


@triton.jit
def through_values(values, weights, of_values, d, row, live, inside, at, rows):
    """Backward of a mix Σ α_j v_j with gradient `d`, up to its weights: returns Σ α_j g_j and the tuple of all g_j = d
    · v_j. The gradients of the values are stored on the way."""
    mean = tl.zeros(live.shape, d.dtype)
    gains = ()
    for j in tl.static_range(len(values)):
        weight = read(weights + j * rows + row, live)
        gain = tl.sum(d * read(values[j] + at, inside), 1)
        mean += weight * gain
        gains = gains + (gain,)  # noqa: RUF005
        tl.store(of_values[j] + at, (weight[:, None] * d).to(of_values[j].dtype.element_ty), mask=inside)
    return mean, gains
