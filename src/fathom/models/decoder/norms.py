"""The norms of common backbones, by their names in a configuration.

Their formulas, and the families that use them:

rms           x̂ = x · r,  r = 1 / √(mean(x²) + ε);  w ⊙ x̂, the product after the cast     Qwen3, Llama
rms_wide      the same, the product before the cast                                         OLMo 2
rms_offset    (1 + w) ⊙ x̂, the product before the cast                                      Gemma
layer         w ⊙ (x − mean(x)) / √(var(x) + ε) + b                                         GPT-NeoX, GPT-2, OPT
layer_plain   the same without w and b                                                      Galactica

Norms of a float64 model stay in float64 (`widen` in `axes/numerics.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..axes.numerics import widen
from .rms_norm import RMSNorm


class WideRMSNorm(RMSNorm):
    """RMS norm that multiplies by its weight in at least float32, before rounding to the input's dtype."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return (self.weight * unit(hidden_states, self.variance_epsilon)).to(hidden_states.dtype)


class OffsetRMSNorm(RMSNorm):
    """RMS norm that scales by 1 + weight, as in Gemma."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        scale = 1.0 + widen(self.weight)
        return (unit(hidden_states, self.variance_epsilon) * scale).to(hidden_states.dtype)


def unit(x: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last dimension, in at least float32."""
    wide = widen(x)
    return wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "rms": RMSNorm,
    "rms_wide": WideRMSNorm,
    "rms_offset": OffsetRMSNorm,
    "layer": nn.LayerNorm,
    "layer_plain": partial(nn.LayerNorm, elementwise_affine=False),
}
"""Norms of a size, with an ε, by name."""
