"""The AdamW of torch, fused if torch has a fused step for all parameters.

`optimizer.py` decides which parameters are AdamW's, and which have weight decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fathom.recipe import Optim


class AdamW(torch.optim.AdamW):
    """AdamW of torch; only its fused step reads `found_inf` on the device."""

    only_matrices = False
    reads_found_inf = False

    @classmethod
    def of(cls, groups: Sequence[dict[str, Any]], optim: Optim) -> AdamW:
        """Create the optimizer of some parameter groups, with the recipe's settings."""
        parameters = [p for group in groups for p in group["params"]]
        fused = all(p.device.type in ("cuda", "cpu", "xpu", "mps") and p.is_floating_point() for p in parameters)
        made = cls(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=fused)
        made.reads_found_inf = fused
        return made
