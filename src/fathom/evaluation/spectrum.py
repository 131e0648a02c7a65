"""How much of keys and values survives a compression: the share of their energy in the frequencies that are kept.

    share = Σ_{t<L} |y_t|² / Σ_{t<M} |y_t|²,      y = D_M x,  x the M entries that a first compression reads

Keys are taken before their rotation, values as the cache holds them. White noise has the share L / M.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from fathom.kvcache.freqkv import dct_matrix
from fathom.kvcache.rope import Rope
from fathom.kvcache.schedule import Schedule


@dataclass(frozen=True)
class Spectrum:
    """Shares by layer; a layer that makes several trips counts as several."""

    keys: list[float]
    values: list[float]
    unmixed_values: list[float] | None
    """Values as they were projected, for a model whose mixer then changes them."""
    white: float
    """The share of white noise."""


@torch.no_grad()
def spectrum(model: Any, ids: Tensor, schedule: Schedule) -> Spectrum:
    """Of a window's entries without the sinks.

    Args:
        model: Any causal language model whose caches can be compressed.
        ids: Texts `[B, T]`, T at least the window; more is not read.
        schedule: The compression.
    """
    rope, cache = Rope(model.config), DynamicCache()
    mixes = getattr(model.config, "mixer", "none") != "none"
    with _projected(model) as projected:
        model(input_ids=ids[:, : schedule.window].to(model.device), past_key_values=cache, use_cache=True)
    keys = [share(rope.turn(layer.keys.double(), 0, -1), schedule) for layer in cache.layers]
    values = [share(layer.values, schedule) for layer in cache.layers]
    unmixed = [share(value, schedule) for value in projected] if mixes else None
    return Spectrum(keys, values, unmixed, schedule.kept / schedule.compressed)


def share(x: Tensor, schedule: Schedule) -> float:
    """The share of the energy of entries `[..., N, D]` that lies in the kept frequencies, over all channels."""
    x = x[..., schedule.sinks : schedule.window, :].double()
    y = dct_matrix(schedule.compressed).to(x.device) @ x  # [..., M, D]
    return float(y[..., : schedule.kept, :].square().sum() / y.square().sum())


@contextmanager
def _projected(model: Any) -> Iterator[list[Tensor]]:
    """What every `v_proj` puts out, `[B, T, H_kv · D]`, in the order of the calls."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, given, out: found.append(out))
        for name, module in model.named_modules()
        if name.endswith("v_proj")
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
