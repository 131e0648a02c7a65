"""The functions that a faster one may stand in for: one table, empty in an export, which runs what its files say.

`fathom.kernels.use` fills it. A stand-in serves one kind of device, and half and single precision; double precision is
for measuring exactness, and always runs the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

REPLACEABLE = {
    "depth_mix": "what a layer of depth_attention mixes from its sources",
    "depth_pool": "what a sub-layer of attention_residuals reads",
    "rms_norm": "every RMS norm",
    "swiglu": "what stands between the projections of the feed-forward sub-layer",
    "linear_cross_entropy": "the loss of a head without adapters",
}
"""What may be replaced, by name."""

Function: TypeAlias = Callable[..., Any]

_faster: dict[tuple[str, str], Function] = {}  # by name and kind of device


def replace(functions: Mapping[str, Function], device: str) -> None:
    """Let these stand in from now on, by name, for tensors on a kind of device (`cuda`), and nothing else anywhere."""
    assert set(functions) <= set(REPLACEABLE)
    _faster.clear()
    _faster.update({(name, device): function for name, function in functions.items()})


def faster(name: str, x: Tensor) -> Function | None:
    """What stands in for a function when it computes with `x`, or None: the reference."""
    if not _faster or x.dtype == torch.float64:
        return None
    return _faster.get((name, x.device.type))
