"""Select and repeat sequences in cache layers with recurrent states, for which transformers can only reorder them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache


def let_select(cache: Cache) -> None:
    """Give cache layers with recurrent states the methods to select and repeat sequences that key-value layers have."""
    for layer in cache.layers:
        own: Any = layer
        if hasattr(own, "conv_states") and not hasattr(own, "batch_select_indices"):
            own.batch_select_indices = own.reorder_cache
            own.batch_repeat_interleave = partial(_repeat, own)


def _repeat(layer: Any, repeats: int) -> None:
    """Repeat each sequence's states `repeats` times in a row."""
    state = next((one for one in layer.conv_states.values() if one is not None), None)
    if state is not None:
        layer.reorder_cache(torch.arange(len(state), device=state.device).repeat_interleave(repeats))
