"""Slots: which (layer, trip) runs when, what it may read, and where its keys and values are kept.

A slot is one pass of one token through the stack. The *plan* lists, trip by trip, the visits that a forward pass
makes; it is a pure function of the configuration, so the model loop, the declared cost and the lens cannot disagree.
Every trip keeps keys and values of its own in a bank of cache layers behind the first: layer ℓ of trip k is one more
layer to a Hugging Face cache, which is why dynamic, static, sliding and quantised caches need no code here. Rotary
positions never depend on the trip.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache

from .registry import mixer_class, recurrence_class

if TYPE_CHECKING:
    from .configuration import FathomConfig
    from .roles import Recurrence


@dataclass(frozen=True)
class Visit:
    """One layer in one trip."""

    index: int
    """Position in the whole plan, the unrolled depth; also the cache layer that holds its keys and values."""
    layer: int
    trip: int
    sources: tuple[int, ...]
    """Indices of earlier visits whose (key, mixed value) the mixer reads, oldest first."""
    kept: bool
    """Whether a later visit reads this one."""


Plan = tuple[tuple[Visit, ...], ...]


def plan(config: FathomConfig) -> Plan:
    """The visits of every trip, in order. Layers before the looped span belong to trip 0, those after, to the last."""
    trips = recurrence_class(config).extra_trips(config) + 1
    start, stop = recurrence_class(config).span(config)
    order = [(layer, 0) for layer in range(start)]
    order += [(layer, trip) for trip in range(trips) for layer in range(start, stop)]
    order += [(layer, trips - 1) for layer in range(stop, config.num_hidden_layers)]

    index = {slot: i for i, slot in enumerate(order)}
    sources = [_sources(config, layer, trip, index) for layer, trip in order]
    read = {i for group in sources for i in group}
    visits = [Visit(i, layer, trip, sources[i], i in read) for i, (layer, trip) in enumerate(order)]
    return tuple(tuple(v for v in visits if v.trip == trip) for trip in range(trips))


def _sources(config: FathomConfig, layer: int, trip: int, index: dict[tuple[int, int], int]) -> tuple[int, ...]:
    mixer = mixer_class(config)
    grid = mixer.source_layers(config, layer)
    rule = mixer.across_trips(config)

    def latest(source: int, until: int) -> int:
        # A layer outside the looped span ran once; its one visit stands for it in every trip.
        return max(i for (other, k), i in index.items() if other == source and k <= until)

    found = {latest(source, trip) for source in grid}
    if rule == "grid":
        whole_trip = mixer.source_layers(config, config.num_hidden_layers)  # as a layer on top would read it
        found |= {latest(s, k) for k in range(trip) for s in whole_trip if (s, 0) in index}
    elif rule == "same_layer":
        found |= {index[layer, k] for k in range(trip) if (layer, k) in index}
    return tuple(sorted(found - {index[layer, trip]}))


def with_banks(cache: Cache, config: FathomConfig) -> Cache:
    """Give a cache that was made for one trip a layer for each visit, in the order of the plan. Idempotent.

    The copies are taken while the cache is empty, so they cost nothing until they are written.
    """
    layers = [visit.layer for trip in plan(config) for visit in trip]
    if len(cache.layers) in (0, len(layers)):  # a cache without layers makes them as they are asked for
        return cache
    if len(cache.layers) != config.num_hidden_layers:
        raise ValueError(
            f"this cache has {len(cache.layers)} layers, the model {len(layers)} in all its trips; "
            "start from an empty cache"
        )
    if any(layer.is_initialized and int(layer.get_seq_length()) > 0 for layer in cache.layers):
        raise ValueError("this cache was filled by a model that makes one trip; start from an empty cache")
    one_trip, used = list(cache.layers), set()
    cache.layers.clear()
    for i in layers:
        cache.layers.append(copy.deepcopy(one_trip[i]) if i in used else one_trip[i])
        used.add(i)
    return cache


class Out:
    """What a trip produced: the un-normed residual stream and, made only when asked for, its normed form and logits."""

    def __init__(
        self, residual: Tensor, norm: Callable[[Tensor], Tensor], head: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.residual = residual
        self._norm, self._head = norm, head
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """`[B, T, hidden_size]` after the final norm."""
        if self._hidden is None:
            self._hidden = self._norm(self.residual)
        return self._hidden

    @property
    def logits(self) -> Tensor:
        """`[B, T, vocab_size]`."""
        if self._head is None:
            raise ValueError("this recurrence feeds on logits: call the model with its head (FathomForCausalLM does)")
        if self._logits is None:
            self._logits = self._head(self.hidden)
        return self._logits


def unroll(recurrence: Recurrence, x: Tensor, trip: Callable[[int, Tensor], Out]) -> dict[str, Any]:
    """Make every trip with all tokens as rows, and return the policy's final state.

    Exact for views in which one trip of all tokens can be computed at once; with one new token and a cache this is
    decoding. `trip(k, x)` runs the stack once.
    """
    state: dict[str, Any] = {}
    for k in range(recurrence.depth + 1):
        out = trip(k, x)
        state = recurrence.gate(k, out, state)
        if k < recurrence.depth:
            x = recurrence.feed(x, out)
    return state
