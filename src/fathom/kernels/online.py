"""Parts that the kernels share: tiles of rows, loads, and online softmax-weighted sums."""

from __future__ import annotations

from typing import Any, TypeAlias

import triton
import triton.language as tl

Context: TypeAlias = Any
"""The context that autograd passes from forward to backward."""


@triton.jit
def tile(number, rows, TALL: tl.constexpr, WIDTH: tl.constexpr):
    """A tile of `[rows, WIDTH]`: its rows and columns, masks of valid rows and of valid places, and the offsets."""
    row = number * TALL + tl.arange(0, TALL)
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    live = row < rows
    inside = live[:, None] & (column < WIDTH)[None, :]
    return row, column, live, inside, row[:, None] * WIDTH + column[None, :]


@triton.jit
def read(places, inside):
    """Load numbers in the accumulators' type: float32, or float64 for float64; 0 outside of the mask."""
    x = tl.load(places, mask=inside, other=0.0)
    return x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)


@triton.jit
def nothing(live, inside, WIDE: tl.constexpr):
    """The initial state of `absorb`: the highest score so far, and both sums."""
    return tl.full(live.shape, float("-inf"), WIDE), tl.zeros(live.shape, WIDE), tl.zeros(inside.shape, WIDE)


@triton.jit
def absorb(top, total, sum_, score, term):
    """Add a score `[R]` and its term `[R, D]` to Σ exp(score - top) and Σ exp(score - top) · term."""
    higher = tl.maximum(top, score)
    old, new = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * old + new, sum_ * old[:, None] + new[:, None] * term


@triton.jit
def through_values(values, weights, of_values, d, row, live, inside, at, rows):
    """Back from a mix, whose gradient is `d`, to its weights: Σ α_j g_j and the tuple of all g_j = d · v_j. The
    gradients of the values are stored on the way."""
    mean = tl.zeros(live.shape, d.dtype)
    gains = ()
    for j in tl.static_range(len(values)):
        weight = read(weights + j * rows + row, live)
        gain = tl.sum(d * read(values[j] + at, inside), 1)
        mean += weight * gain
        gains = gains + (gain,)  # noqa: RUF005
        tl.store(of_values[j] + at, (weight[:, None] * d).to(of_values[j].dtype.element_ty), mask=inside)
    return mean, gains
