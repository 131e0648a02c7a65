"""The table of functions that a faster kernel may replace; no replacements are registered in an export.

`fathom.kernels.use` fills it. A replacement serves one type of device, in half and single precision. Double precision
always runs the reference, so that exactness can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

REPLACEABLE = {
    "depth_mix": "what a layer of depth_attention mixes from its sources",
    "depth_pool": "what a sub-layer of attention_residuals reads",
    "norm_rotate_mix": "depth_mix, and the norms and rotation of queries and keys before it",
    "rms_norm": "every RMS norm",
    "swiglu": "what stands between the projections of the feed-forward sub-layer",
    "linear_cross_entropy": "the loss of a head without adapters",
}
"""The functions that may be replaced, by name."""

Function: TypeAlias = Callable[..., Any]

FASTER: dict[tuple[str, str], Function] = {}
"""The replacements by name and type of device. A caller that a decoded token notices looks whether it is empty before
it calls `faster`."""


def replace(functions: Mapping[str, Function], device: str) -> None:
    """Register these functions by name as replacements for tensors on one device type (`cuda`); drop all earlier
    replacements."""
    assert set(functions) <= set(REPLACEABLE)
    FASTER.clear()
    FASTER.update({(name, device): function for name, function in functions.items()})


def faster(name: str, x: Tensor) -> Function | None:
    """The faster kernel for a function and a tensor like `x`; None if the PyTorch reference is to be used."""
    if not FASTER or x.dtype == torch.float64:
        return None
    return FASTER.get((name, x.device.type))
