"""Lets compression methods see queries: an attention backend that passes the queries to the memory and then attends as
usual.

A cache layer gets no queries. So the keys it returns carry a reference to it, and `sdpa_observed` (or `eager_observed`,
…) follows that reference. The decoder uses it for the forward passes that carry such a cache (watch.py), and no others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attend = Callable[..., tuple[Tensor, Tensor | None]]
SUFFIX = "_observed"


def backend(name: str, module: nn.Module) -> Attend:
    """The attention function of a layer by its name; each model family defines its own `eager`."""
    if name == "eager":
        function: Attend = sys.modules[type(module).__module__].eager_attention_forward
        return function
    return ALL_ATTENTION_FUNCTIONS[name]


def observed_backend(decoder: PreTrainedModel) -> str:
    """The name of an attention backend that shows its queries to memories and then attends as the decoder does."""
    name: str = decoder.config._attn_implementation
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(f"no method can observe queries under attention {name!r}: use sdpa or eager")
    if name + SUFFIX not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name + SUFFIX, partial(_observed, name))
        AttentionMaskInterface.register(name + SUFFIX, ALL_MASK_ATTENTION_FUNCTIONS[name])
    return name + SUFFIX


def fitted(mask: Tensor, key: Tensor) -> Tensor:
    """The attention mask, cut for a layer that holds fewer entries than the first layer, for which masks are made."""
    mask = mask[..., mask.shape[-1] - key.shape[2] :]
    if (lengths := vars(key).get("lengths")) is None:
        return mask
    starts = key.shape[2] - torch.tensor(lengths, device=mask.device)  # [B]: what is before them is padding
    hidden = (torch.arange(key.shape[2], device=mask.device) < starts.unsqueeze(1))[:, None, None]
    return mask & ~hidden if mask.dtype == torch.bool else mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _observed(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # kvpress's wrapper, which its import puts around every function, gives it by its place
    *,
    scaling: float,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        attention_mask = fitted(attention_mask, key)
    memory = vars(key).pop("memory", None)  # once: later layers that share these keys have queries of their own
    if memory is not None:
        memory.observe(query * scaling, module)
    return backend(name, module)(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
