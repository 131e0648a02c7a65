"""Attention in plain PyTorch with capped logits, c · tanh(logit / c); the cap is applied before the mask."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import repeat_kv

from ..axes.numerics import widen


def attend_capped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """An attention function with transformers' arguments; returns the output `[B, T, H, D]` and weights `[B, H, T,
    N]`."""
    keys, values = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    logits = torch.matmul(query, keys.transpose(2, 3)) * scaling
    logits = torch.tanh(logits / softcap) * softcap
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = F.softmax(widen(logits), -1).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return torch.matmul(weights, values).transpose(1, 2).contiguous(), weights
