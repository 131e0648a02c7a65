"""Rows of states in a cache: transformers reorders them, and selects and repeats those of keys and values alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache


def let_select(cache: Cache) -> None:
    """Give the layers of a cache that hold states what those of keys and values have."""
    for layer in cache.layers:
        own: Any = layer
        if hasattr(own, "conv_states") and not hasattr(own, "batch_select_indices"):
            own.batch_select_indices = own.reorder_cache
            own.batch_repeat_interleave = partial(_repeat, own)


def _repeat(layer: Any, repeats: int) -> None:
    """Each row so many times, one after the other."""
    state = next((one for one in layer.conv_states.values() if one is not None), None)
    if state is not None:
        layer.reorder_cache(torch.arange(len(state), device=state.device).repeat_interleave(repeats))
