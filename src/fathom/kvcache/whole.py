"""Uncompressed caches for comparison: transformers' own.

`full` grows with every token, `full_static` is allocated at the start, and `full_fp8` stores 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable

import transformers.cache_utils as backends
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache, StaticCache

BACKENDS = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}
"""Quantising backends, and the name of transformers' cache layer for each."""


def backend_layer(backend: str) -> type[backends.DynamicLayer]:
    """The layer that stores entries through a backend."""
    if backend not in BACKENDS:
        raise ValueError(f"quantized must be one of {', '.join(BACKENDS)}, got {backend!r}")
    layer: type[backends.DynamicLayer] | None = getattr(backends, BACKENDS[backend], None)
    if layer is None:
        raise ValueError(f"this transformers has no {backend} cache layer: upgrade it, or take another backend")
    return layer


def growing(config: PreTrainedConfig, room: int | None, quantized: str | None) -> Cache:
    """A growing cache, stored unchanged or through a backend."""
    if quantized is None:
        return DynamicCache(config=config)
    backend_layer(quantized)
    return QuantizedCache(quantized, config)


def set_aside(config: PreTrainedConfig, room: int | None, quantized: str | None) -> Cache:
    """A cache that is allocated in advance."""
    if quantized is not None:
        raise ValueError(f"quantized={quantized}: method 'full_static' stores entries as they are")
    if room is None:
        raise ValueError("full_static needs window: the tokens that it makes room for")
    return StaticCache(config=config, max_cache_len=room)


def in_fp8(config: PreTrainedConfig, room: int | None, quantized: str | None) -> Cache:
    """A growing cache of 8-bit floats."""
    if quantized is not None:
        raise ValueError(f"quantized={quantized}: method 'full_fp8' says that already")
    return growing(config, room, "fp8")


WHOLE: dict[str, Callable[[PreTrainedConfig, int | None, str | None], Cache]] = {
    "full": growing,
    "full_static": set_aside,
    "full_fp8": in_fp8,
}
"""By name: a function of a configuration, the tokens to allocate, and a quantising backend."""
