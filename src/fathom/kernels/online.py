"""What the kernels share: one more term of a softmax-weighted sum, and the type in which sums are taken."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

Context: TypeAlias = Any
"""What autograd hands from forward to backward; its attributes are made on the way."""


@triton.jit
def absorb(top, total, sum_, score, term):
    """Take a score `[R]` and its term `[R, D]` into Σ exp(score - top) and Σ exp(score - top) · term."""
    higher = tl.maximum(top, score)
    old, new = tl.exp(top - higher), tl.exp(score - higher)
    return higher, total * old + new, sum_ * old[:, None] + new[:, None] * term


def wide_of(x: Tensor) -> tl.dtype:
    """float32, or float64 for float64."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
