"""Learned gates: a weight λ on what a mechanism adds, and a separate gain g on the result without the mechanism.

The gated result is

    y = (1 + g) a + λ m        a is the result without the mechanism, m what the mechanism adds, without a

g and λ are signed and start at zero, so a pretrained model starts as itself, to the last bit. Without g, λ would learn
the gain of a: where m contains a, or y is a + λ (m - a), most of λ's gradient is that of a gain.

Which mechanisms may have learned gates is decided by `learns` (`blend.py`), and which can start closed by `closed`
(`roles.py`).

Gates are parameters, so checkpoints and exports keep them; they get no weight decay (`no_weight_decay`). `blend.py` has
the options `blend`, `gates`, `blend_steps` and `shuffled`. `deepen/heal.py` gives gates a larger learning rate
(`optim.groups`), and `deepen/screen.py` scores closed gates without training. The controls are `mixers/value_gain.py`
and `residuals/branch_gain.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .numerics import widen

if TYPE_CHECKING:
    from .fields import DecoderConfig

LEARNED = "learned"
"""The value of the option `blend` that makes λ a parameter."""
Shape = tuple[int, ...]


def gate_shapes(config: DecoderConfig, axis: str) -> Mapping[str, Shape]:
    """The shape of a gate for each value of the option `gates`; it broadcasts to values `[B, H_kv, T, D]` for a mixer,
    to the stream `[B, T, hidden_size]` otherwise."""
    if axis != "mixer":
        return {"layer": (1,), "channel": (config.hidden_size,)}
    heads, width = config.num_key_value_heads, config.head_dim
    return {"layer": (1,), "head": (heads, 1, 1), "channel": (heads, 1, width)}


class Gates(nn.Module):
    """The parameters g and λ of one layer or sub-layer, stored flat.

    Args:
        shape: Their shape, as it broadcasts against the tensors that they multiply.
        mixes: Whether there is a λ; a place that never reads anything has the gain alone.
    """

    no_weight_decay = ("gain", "mix")

    def __init__(self, shape: Shape, mixes: bool = True) -> None:
        super().__init__()
        self.shape = shape
        self.gain = nn.Parameter(torch.empty(math.prod(shape)))
        self.mix = nn.Parameter(torch.empty(math.prod(shape))) if mixes else None

    def close(self) -> None:
        """Close the gates."""
        for parameter in self.parameters():
            init.zeros_(parameter)

    def forward(self, own: Tensor, mix: Tensor | None = None, start: float = 1.0) -> Tensor:
        """The gated result (1 + g) a + λ m, or (1 + g) a if `mix` is None, computed in at least float32.

        Args:
            own: a.
            mix: m.
            start: In place of the 1; 0 for what a pretrained model does not compute.
        """
        shape = self.shape if len(self.shape) == 1 else (-1, *self.shape[1:])  # tensor parallelism splits heads
        gain = widen(self.gain).view(shape)
        if len(shape) > 1 and len(gain) != own.shape[-3]:
            raise ValueError(
                f"gates by head or channel: attention was split into parts of {own.shape[-3]} of {len(gain)} key-value "
                "heads, and its gates were not"
            )
        made = widen(own) * (start + gain)
        if mix is not None:
            assert self.mix is not None
            made = torch.addcmul(made, widen(mix), widen(self.mix).view(shape).to(made.dtype))
        return made.to(own.dtype)
