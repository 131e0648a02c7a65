"""A memory in a file: one process reads a prompt, another one continues from it.

    save_cache(cache, "prompt.safetensors")
    cache = open_cache("prompt.safetensors", build_cache(model, "freqkv", window=1024))

The format is safetensors. Its tensors are those of the layers, and its metadata the settings of the cache. Opening a
file runs no code from it.
"""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache

from .memory import Memory, MemoryCache
from .quantized import QuantizedMemory

FORMAT = "fathom-memory-1"
PARTS = ("keys", "values", "first", "queries")
"""What a layer holds; the last two may be missing."""


def save_cache(cache: MemoryCache, file: str | Path) -> None:
    """Write a cache's contents exactly; an existing file is replaced once the new one is complete."""
    tensors = {
        f"{number}.{part}": getattr(layer, part).contiguous()
        for number, layer in enumerate(_memories(cache))
        if layer.seen
        for part in PARTS
        if getattr(layer, part) is not None
    }
    state = {"format": FORMAT, **_built(cache), "seen": cache.seen, "offset": cache.offset}
    file = Path(file)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(tensors, part, {name: json.dumps(value) for name, value in state.items()})
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def open_cache(file: str | Path, into: MemoryCache, device: str | torch.device = "cpu") -> MemoryCache:
    """Fill a cache that `build_cache` made for the same weights. Whether the weights are the same is not checked.

    A file of another method, of other options, or of a model of another shape or dtype is refused.

    Args:
        file: A file written by `save_cache`.
        into: An empty cache, which is filled and returned.
        device: Device of the tensors.
    """
    layers = _memories(into)
    if into.seen:
        raise ValueError(f"the cache that {file} is to be read into holds {into.seen} tokens already: build another")
    try:
        with safe_open(file, "pt", device=str(device)) as saved:
            state = {name: json.loads(value) for name, value in (saved.metadata() or {}).items()}
            tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is not a saved cache: {error}") from None
    if state.get("format") != FORMAT:
        raise ValueError(f"{file} is not a saved cache of format {FORMAT}")
    for name, value in _built(into).items():
        found = state.get(name)
        unsaid = name == "dtype" and None in (found, value)  # for a cache that was built from a configuration
        if found != value and not unsaid:
            raise ValueError(f"{file}: {name} is {found}, and {value} of the cache it is to be read into")
    banks = sum(name.endswith(".keys") for name in tensors)
    into.layers += (Memory(into.method) for _ in range(len(layers), banks))  # as several trips do at first
    for number, layer in enumerate(_memories(into)):
        _fill(layer, {part: tensors.get(f"{number}.{part}") for part in PARTS}, state["seen"], file)
    into.offset = state["offset"]
    return into


def _memories(cache: Cache) -> list[Memory]:
    if not isinstance(cache, MemoryCache):
        raise ValueError(f"a {type(cache).__name__} is not compressed: only a compressed cache has such a file")
    layers = [layer for layer in cache.layers if isinstance(layer, Memory)]
    if len(layers) < len(cache.layers):
        raise ValueError("layers with a window of their own keep transformers' cache, which has no such file")
    if any(isinstance(layer, QuantizedMemory) for layer in layers):
        raise ValueError("a cache that is stored quantised cannot be saved exactly: build it without quantized=")
    return layers


def _built(cache: MemoryCache) -> dict[str, object]:
    """The settings that must be equal for one cache to continue where another stopped."""
    method = cache.method
    options = list(inspect.signature(type(method)).parameters)[2:]  # after schedule and rope
    return {
        "method": method.name,
        **asdict(method.schedule),
        **{name: getattr(method, name) for name in options},
        **cache.shape,
        "angles": method.rope.angles.hex(),
    }


def _fill(layer: Memory, parts: dict[str, Tensor | None], seen: int, file: str | Path) -> None:
    if not seen:
        return
    keys, values = parts["keys"], parts["values"]
    held = layer.schedule.entries(seen)
    if keys is None or values is None or keys.shape[2] != held or values.shape[2] != held:
        raise ValueError(f"{file}: after {seen} tokens a layer holds {held} entries, and these are not in it")
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    layer.first, layer.queries, layer.seen = parts["first"], parts["queries"], seen
