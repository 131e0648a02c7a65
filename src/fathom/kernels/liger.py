"""liger-kernel's functions, wrapped with the names and arguments of Fathom's own functions."""

from __future__ import annotations

import torch
from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction, LigerRMSNormFunction, LigerSiLUMulFunction
from torch import Tensor

from fathom.models.axes.numerics import IGNORE


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """liger-kernel's RMS norm, like `fathom.models.decoder.rms_norm.normalise`; its backward pass does not work in
    place."""
    offset, casting, in_place = 0.0, "llama", False
    return LigerRMSNormFunction.apply(x, weight, eps, offset, casting, in_place)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ⊙ up."""
    return LigerSiLUMulFunction.apply(gate, up)


def linear_cross_entropy(rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """liger-kernel's summed cross-entropy, like `fathom.models.decoder.loss.linear_cross_entropy`; the head weight's
    gradient is accumulated in float32."""
    no_bias, no_weights, squares, smoothing, softcap, with_squares = None, None, 0.0, 0.0, None, False
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(
        *(rows, weight, targets, no_bias, no_weights, IGNORE, squares, smoothing, "sum", softcap, with_squares),
        torch.float32,
    )
    return loss
