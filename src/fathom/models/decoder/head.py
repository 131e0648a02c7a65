"""The language-modelling head: a plain linear layer, or one that also scales or caps its logits.

The logits are

z = (h / hidden scaling) Wᵀ / scaling,  then  c · tanh(z / c)  with a cap c
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from ..axes.fields import DecoderConfig


class ScaledHead(nn.Linear):
    """A language-modelling head that scales or caps its logits in `forward`, so that every caller gets them scaled."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=config.head_bias)
        self.scaling, self.cap = config.logits_scaling, config.final_logit_softcapping
        self.multiplier, self.hidden_scaling = config.logits_multiplier, config.hidden_scaling

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Logits `[..., vocab_size]` of hidden states `[..., hidden_size]`."""
        logits = super().forward(hidden_states if self.hidden_scaling == 1.0 else hidden_states / self.hidden_scaling)
        if self.scaling != 1.0:
            logits = logits / self.scaling
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap


def is_scaled(config: DecoderConfig) -> bool:
    """Whether a configuration scales or caps logits."""
    scales = config.logits_scaling, config.logits_multiplier, config.hidden_scaling
    return any(scale != 1.0 for scale in scales) or config.final_logit_softcapping is not None


def is_called(config: DecoderConfig) -> bool:
    """Whether losses and mixtures call the head as a module, because it is more than one matrix product."""
    return is_scaled(config) or config.head_bias


def build_head(config: DecoderConfig) -> nn.Linear:
    """The head of a configuration."""
    if is_scaled(config):
        return ScaledHead(config)
    return nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)


def check_adapter(head: nn.Module) -> None:
    """Refuse an adapter around a head that scales or caps its logits, since adapters add to its result."""
    if isinstance(head._modules.get("base_layer"), ScaledHead):
        raise ValueError(
            "lm_head scales or caps its logits, and an adapter would be added to them afterwards, unlike merged "
            "weights: leave lm_head out of target_modules, or train it whole (modules_to_save)"
        )
