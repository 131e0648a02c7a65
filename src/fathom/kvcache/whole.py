"""Uncompressed caches for comparison: transformers' own, and quantised ones.

`full` grows with every token, `full_static` is allocated at the start, `full_fp8` stores 8-bit floats, and `full_int8`
and `full_int4` store whole numbers, which need no backend (kivi.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import transformers.cache_utils as backends
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, QuantizedCache, StaticCache

from fathom.models.axes.roles import View
from fathom.models.registry import recurrence_class

from .kivi import Int4, Int8, Kivi

OWN: dict[str, type[Kivi]] = {"int8": Int8, "int4": Int4}
"""Layers that need no backend."""
BACKENDS = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}
"""Quantising backends, and the name of transformers' cache layer for each."""


def backend_layer(backend: str) -> type[backends.DynamicLayer]:
    """The cache layer class that stores entries through a quantisation backend."""
    if backend in OWN:
        return OWN[backend]
    if backend not in BACKENDS:
        raise ValueError(f"quantized must be one of {', '.join([*OWN, *BACKENDS])}, got {backend!r}")
    layer: type[backends.DynamicLayer] | None = getattr(backends, BACKENDS[backend], None)
    if layer is None:
        raise ValueError(f"the installed transformers has no {backend} cache layer: upgrade it, or use another backend")
    return layer


def growing(config: PreTrainedConfig, room: int | None, quantized: str | None) -> Cache:
    """A growing, uncompressed cache, stored unchanged or through a quantisation backend."""
    if quantized is None:
        return DynamicCache(config=config)
    if config.model_type == "fathom" and _has_slots(config):
        raise ValueError(
            f"quantized={quantized}: recurrence {config.recurrence!r} stores the iterations of a token in a cache of "
            "its own, which cannot quantize its entries; use method 'full'"
        )
    layer = backend_layer(quantized)
    if quantized not in OWN:
        return QuantizedCache(quantized, config)
    cache = DynamicCache(config=config)
    cache.layers = [layer() if type(own) is DynamicLayer else own for own in cache.layers]
    return cache


def _has_slots(config: PreTrainedConfig) -> bool:
    """Whether tokens halt or iterations read one another, so that the model's cache is `trips/slot_cache.py`'s."""
    recurrence = recurrence_class(config)
    return recurrence.sees(config) is not View.SAME or recurrence.stops(config)


def set_aside(config: PreTrainedConfig, room: int | None, quantized: str | None) -> Cache:
    """An uncompressed cache of static size that is allocated in advance."""
    if quantized is not None:
        raise ValueError(f"quantized={quantized}: method 'full_static' cannot quantize its entries")
    if room is None:
        raise ValueError("full_static needs window, the number of tokens to allocate")
    return StaticCache(config=config, max_cache_len=room)


def stored_in(backend: str, config: PreTrainedConfig, room: int | None, quantized: str | None) -> Cache:
    """A growing, uncompressed cache that stores its entries through a quantisation backend."""
    if quantized is not None:
        raise ValueError(f"quantized={quantized}: method 'full_{backend}' names a quantization already; give only one")
    return growing(config, room, backend)


WHOLE: dict[str, Callable[[PreTrainedConfig, int | None, str | None], Cache]] = {
    "full": growing,
    "full_static": set_aside,
    "full_fp8": partial(stored_in, "fp8"),
    "full_int8": partial(stored_in, "int8"),
    "full_int4": partial(stored_in, "int4"),
}
"""By name: a function of a configuration, the tokens to allocate, and a quantising backend."""
