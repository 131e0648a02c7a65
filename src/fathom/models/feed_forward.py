"""The feed-forward sub-layer: Qwen3's down(silu(gate(x)) ⊙ up(x)), where a kernel may compute silu(gate) ⊙ up."""

from __future__ import annotations

from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from .replaceable import faster


class FeedForward(Qwen3MLP):
    """Qwen3's MLP: the same parameter names and results."""

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, hidden_size]` to the same."""
        swiglu = faster("swiglu", x)
        if swiglu is None or self.config.hidden_act != "silu":
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
