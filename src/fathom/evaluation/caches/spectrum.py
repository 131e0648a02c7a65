"""How much of keys and values survives a compression: the share of their energy in the kept frequencies.

    mean = |y_0|² / Σ_{t<M} |y_t|²,      kept = Σ_{0<t<L} |y_t|² / Σ_{0<t<M} |y_t|²

y = D_M x, where x are the M entries that a first compression reads: keys before their rotation, values as the cache
holds them. Averaging keeps the mean as well, so the value of a low-pass shows in the variation around the mean: of
white noise it keeps (L − 1) / (M − 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.kvcache.freqkv import dct_matrix
from fathom.kvcache.rope import Rope, keeping_all, keeps, refuse
from fathom.kvcache.schedule import Schedule
from fathom.kvcache.watch import decoder_of
from fathom.models.axes.cache_name import passed
from fathom.models.modeling import FathomModel
from fathom.models.trips.slots import banks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Shares:
    """Shares of energy by layer; in a looped model, one share for each time that a layer runs."""

    mean: list[float]
    """Share of the energy in the mean over the entries."""
    kept: list[float]
    """Share of the variation around the mean that lies in the kept frequencies; 1 if nothing varies."""


@dataclass(frozen=True)
class Spectrum:
    """Shares of energy in the keys and values of a cache, or why there are none (`left_out`)."""

    keys: Shares | None = None
    values: Shares | None = None
    unmixed_values: Shares | None = None
    """Values as they were projected, for a model whose mixer then changes them."""
    white: float | None = None
    """The `kept` share of white noise."""
    left_out: str | None = None


@torch.no_grad()
def spectrum(model: PreTrainedModel, ids: Tensor, schedule: Schedule) -> Spectrum:
    """The spectrum of the cache entries of one window, without the sinks.

    Args:
        model: Any causal language model whose caches can be compressed.
        ids: Texts `[B, T]`, T at least the window; more is not read.
        schedule: The compression.

    Raises:
        ValueError: A model whose keys cannot be turned back.
    """
    refuse(model.config, schedule.window)
    rope, cache = Rope(model.config), keeping_all(model.config)
    rope.ask(decoder := decoder_of(model))
    mixes = getattr(model.config, "mixer", "none") != "none"
    with _projected(model) as projected:
        model(input_ids=ids[:, : schedule.window].to(model.device), use_cache=True, **passed(model, cache))
    loops = isinstance(decoder, FathomModel)
    which = banks_of(decoder.plan_of(decoder.served_trips)) if loops else range(len(cache.layers))
    held = [(rope.plan[i], layer) for i, layer in zip(which, cache.layers, strict=True) if keeps(layer)]
    keys = shares((turn.turn(layer.keys.double(), 0, -1) for turn, layer in held), schedule)
    values = shares([layer.values for _, layer in held], schedule)
    unmixed = shares(projected, schedule) if mixes else None
    return Spectrum(keys, values, unmixed, (schedule.kept - 1) / (schedule.compressed - 1))


def shares(layers: Iterable[Tensor], schedule: Schedule) -> Shares:
    """Shares of the energy of each layer's entries `[..., N, D]`, over all channels."""
    found = Shares([], [])
    for x in layers:
        x = x[..., schedule.sinks : schedule.window, :].double()
        y = (dct_matrix(schedule.compressed).to(x.device) @ x).square().movedim(-2, 0).flatten(1).sum(1)  # [M]
        mean, varying, kept = float(y[0]), float(y[1:].sum()), float(y[1 : schedule.kept].sum())
        constant = varying < 1e-24 * mean  # up to rounding
        found.mean.append(mean / (mean + varying))
        found.kept.append(1.0 if constant else kept / varying)
    return found


@contextmanager
def _projected(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """The output of every `v_proj`, `[B, T, H_kv · D]`, in the order of the calls."""
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
