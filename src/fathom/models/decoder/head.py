"""The language-modelling head: a plain linear layer, or one whose logits are scaled or capped.

z = h Wᵀ / scaling,  then  c · tanh(z / c)  with a cap c
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


class ScaledHead(nn.Linear):
    """A head whose logits are scaled or capped, wherever they are computed."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=False)
        self.scaling, self.cap = config.logits_scaling, config.final_logit_softcapping

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., hidden_size]` to logits, `[..., vocab_size]`."""
        logits = super().forward(hidden_states)
        if self.scaling != 1.0:
            logits = logits / self.scaling
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def is_scaled(config: DecoderConfig) -> bool:
    """Whether logits are scaled or capped."""
    return config.logits_scaling != 1.0 or config.final_logit_softcapping is not None


def build_head(config: DecoderConfig) -> nn.Linear:
    """The head of a configuration."""
    return ScaledHead(config) if is_scaled(config) else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
