"""Measures the bytes of a cache from its tensors, in the same way for every transformers cache."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from fathom.models.trips.slot_cache import SlotLayer


def cache_bytes(cache: Cache) -> int:
    """Current bytes of all layers, without tensors that layers share (a method's matrix, the slot table) and without
    unused capacity of a slot cache."""
    return sum(
        _bytes((layer.keys, layer.values) if isinstance(layer, SlotLayer) else vars(layer)) for layer in cache.layers
    )


def _bytes(held: object) -> int:
    if isinstance(held, Tensor):
        if hasattr(held, "__tensor_flatten__"):  # a quantised tensor consists of plain ones
            return sum(_bytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
        return held.numel() * held.element_size()
    if isinstance(held, dict):
        return sum(map(_bytes, held.values()))
    if isinstance(held, (list, tuple)):
        return sum(map(_bytes, held))
    if (
        isinstance(held, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin))
        or type(held).__module__ == "transformers.cache_utils"
    ):
        return _bytes(vars(held))
    return 0
