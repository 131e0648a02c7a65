"""The feed-forward sub-layer, with or without a gate.

Its two forms:

gated    down(act(gate(x)) ⊙ up(x))        a kernel may compute silu(gate) ⊙ up
plain    down(act(up(x)))

`experts.py` has the mixture of experts, and decides whether a layer has it or one such MLP (`feed_forward`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..axes.replaceable import FASTER, faster

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


class FeedForward(nn.Module):
    """An MLP with `inner` channels and Qwen3's parameter names; the ungated form has no `gate_proj`."""

    def __init__(self, config: DecoderConfig, inner: int) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.silu = config.hidden_act == "silu"

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to hidden states `[B, T, hidden_size]`."""
        parts: Any = self._modules  # an attribute that is a module is found by a slow Python function
        gate, up, down, act = parts.get("gate_proj"), parts["up_proj"], parts["down_proj"], parts["act_fn"]
        if gate is None:
            return down(act(up(x)))
        swiglu = faster("swiglu", x) if FASTER and self.silu else None
        if swiglu is None:
            return down(act(gate(x)) * up(x))
        return down(swiglu(gate(x), up(x)))
