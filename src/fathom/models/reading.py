"""What the tokens of a trip may read: the view of a recurrence, without a cache and with one.

    SAME    t' <= t  and  k' = min(k, halt of t')
    DUO     t' <= t  and  k' <= k
    ALL     t' <  t,  or  t' = t and k' <= k

Where no trip reads another one (SAME, nobody halts) every trip is an ordinary forward pass with a bank of its own, and
any Hugging Face cache serves (`Banked`). Otherwise: without a cache, which is training, keys and values of earlier
trips enter each layer as tensors (`Dense`), or, under ALL, all slots go through the stack side by side
(`Interleaved`); with one, which is inference, they are found in the slot cache (`Stored`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .roles import View
from .slot_cache import Placement, SlotTable, Tags
from .slots import Out, Rows, Turn, Visit

Pair = tuple[Tensor, Tensor]
MASKED = ("sdpa", "eager")
"""Attention backends that take a mask of any shape."""


@dataclass
class Reading:
    """Everything that one pass through the stack needs beside its input."""

    visits: Sequence[Visit]
    masks: dict[str, Any]
    position_embeddings: Pair
    position_ids: Tensor
    cache: Any = None
    """Whatever has `update(key, value, layer)`."""
    by_bank: bool = False
    """Whether the cache has a layer for every visit, or one for every layer."""
    earlier: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """By layer: keys and values of earlier trips of the same tokens."""
    alive: Tensor | None = None
    """`[B, 1, M, 1]`; the others keep the keys and values that they had."""
    sources: dict[int, Pair] = field(default_factory=dict)
    """By visit: what earlier trips kept for mixers."""
    keep: bool = False
    """Whether every layer's keys and values are wanted afterwards, not only what mixers read."""


@dataclass
class Passed:
    """What a pass left."""

    residual: Tensor
    pairs: dict[int, Pair]
    """By visit: key and mixed value."""
    hidden: list[Tensor]
    """Every visit's input, if asked for."""


class Stack(Protocol):
    """One pass through the decoder."""

    def __call__(self, x: Tensor, reading: Reading) -> Passed:
        """From an input to what the pass left."""


@dataclass
class Call:
    """The facts of one forward call that every way of reading needs."""

    view: View
    depth: int
    plan: Sequence[Sequence[Visit]]
    stack: Stack
    out: Callable[[Tensor, int], Out]
    """(residual, trip)"""
    rotary: Callable[[Tensor], Pair]
    """Position ids to cosines and sines."""
    plain_masks: Callable[[Tensor, Tensor | None, Tensor | None], dict[str, Any]]
    """(input, padding `[B, N]`, positions where documents are packed): transformers' own causal masks."""
    positions: Tensor
    """`[1 or B, T]`"""
    packed: Tensor | None
    """The positions, where they were given and may restart."""
    padding: Tensor | None
    """`[B, past + T]`, or nothing is padded."""
    windows: dict[str, int | None]
    """By layer type: how far back it reads."""
    backend: str
    dtype: torch.dtype
    hidden: list[Tensor] | None = None
    """Filled with every visit's input, in the plan's order."""

    @property
    def live(self) -> Tensor | None:
        """`[B, T]`: which of the new tokens are not padding."""
        return None if self.padding is None else self.padding[:, -self.positions.shape[1] :].bool()

    def columns(self, start: int, stop: int) -> Call:
        """The same call for some of its new tokens."""
        padding = None
        if self.padding is not None:
            padding = self.padding[:, : self.padding.shape[1] - self.positions.shape[1] + stop]
        return replace(self, positions=self.positions[:, start:stop], padding=padding)

    def documents(self) -> Tensor | None:
        """`[1 or B, T]`: which document each token belongs to, where positions restart."""
        if self.packed is None:
            return None
        starts = self.packed[:, 1:] != self.packed[:, :-1] + 1
        return torch.nn.functional.pad(starts.long().cumsum(1), (1, 0))

    def check_backend(self) -> None:
        """Refuse, before anything is computed, a backend that knows causal masks only."""
        if self.depth and self.backend not in MASKED:
            raise ValueError(
                f"trips that read one another need attn_implementation {' or '.join(MASKED)}, not {self.backend}"
            )

    def masks(self, view: View, query: Tags, key: Tags) -> dict[str, Tensor]:
        """By layer type."""
        self.check_backend()
        as_bool = self.backend == "sdpa" and key.bias is None
        return {
            kind: read_mask(view, query, key, window, None if as_bool else self.dtype)
            for kind, window in self.windows.items()
        }

    def record(self, passed: Passed, stages: int = 1) -> None:
        """Keep a pass' hidden states; interleaved stages come apart into trips."""
        if self.hidden is not None and stages == 1:
            self.hidden.extend(passed.hidden)  # the tensors themselves, so that gradients reach them
        elif self.hidden is not None:
            for j in range(stages):
                self.hidden.extend(h.unflatten(1, (-1, stages))[:, :, j] for h in passed.hidden)


def read_mask(view: View, query: Tags, key: Tags, window: int | None, dtype: torch.dtype | None) -> Tensor:
    """Who reads whom, `[B, 1, M, N]`: bool, or with a dtype the number to add to the logit."""
    t, k = query.token.unsqueeze(2), query.trip.unsqueeze(2)  # [B, M, 1]
    of, at = key.token.unsqueeze(1), key.trip.unsqueeze(1)  # [B, 1, N]
    if view is View.ALL:
        seen = (of < t) | ((of == t) & (at <= k))
    elif view is View.DUO:
        seen = (of <= t) & (at <= k)
    else:
        assert key.halt is not None
        last = key.trip.eq(key.halt).unsqueeze(1)
        seen = (of <= t) & ((at == k) | (last & (at < k)))  # at = min(k, halt), without numbers of [M, N]
    if window is not None:
        seen = seen & (t - of < window)
    if query.document is not None and key.document is not None:
        seen = seen & (query.document.unsqueeze(2) == key.document.unsqueeze(1))
    if key.live is not None:
        seen = seen & key.live.unsqueeze(1)
        # Padding sees anything: a softmax over nothing would be no number.
        seen = seen | ~seen.any(-1, keepdim=True)
    seen = seen.unsqueeze(1)
    if dtype is None:
        return seen
    bias = torch.zeros((), dtype=dtype, device=seen.device) if key.bias is None else key.bias.to(dtype)[:, None, None]
    return torch.where(seen, bias, torch.finfo(dtype).min)


class Banked:
    """SAME, and nobody halts: each trip an ordinary pass over a bank of its own."""

    def __init__(self, call: Call, x: Tensor, cache: Cache | None) -> None:
        self.call, self.cache = call, cache
        self.masks = call.plain_masks(x, call.padding, call.packed)
        self.rotary = call.rotary(call.positions)
        self.sources: dict[int, Pair] = {}

    def __call__(self, turn: Turn) -> Out:
        """Make one trip."""
        call = self.call
        passed = call.stack(
            turn.x,
            Reading(
                call.plan[turn.trip],
                self.masks,
                self.rotary,
                call.positions,
                cache=self.cache,
                by_bank=True,
                sources=self.sources,
            ),
        )
        self.sources.update(passed.pairs)
        call.record(passed)
        return call.out(passed.residual, turn.trip)


class Dense:
    """SAME with halting, or DUO, without a cache: every token makes every trip, and the halted ones are hidden."""

    def __init__(self, call: Call, x: Tensor) -> None:
        self.call = call
        self.plain = call.plain_masks(x, call.padding, call.packed)
        self.rotary = call.rotary(call.positions)
        self.earlier: dict[int, tuple[Tensor, ...]] = {}
        self.sources: dict[int, Pair] = {}
        self.tags: list[Tags] = []

    def __call__(self, turn: Turn) -> Out:
        """Make one trip."""
        call, alive = self.call, turn.rows.alive
        visits = call.plan[turn.trip]
        keep_old = alive if call.view is View.SAME and turn.trip else None
        passed = call.stack(
            turn.x,
            Reading(
                visits,
                self._masks(turn),
                self.rotary,
                call.positions,
                earlier=self.earlier if call.view is View.DUO or keep_old is not None else {},
                alive=None if keep_old is None else keep_old[:, None, :, None],
                sources=self.sources,
                keep=True,
            ),
        )
        for visit in visits:
            before = self.earlier.get(visit.layer, ()) if call.view is View.DUO else ()
            self.earlier[visit.layer] = (*before, *passed.pairs[visit.index])
        self.sources.update(passed.pairs)
        call.record(passed)
        return call.out(passed.residual, turn.trip)

    def _masks(self, turn: Turn) -> dict[str, Any]:
        call = self.call
        if call.view is View.SAME:
            return self.plain
        token = torch.arange(turn.x.shape[1], device=turn.x.device).unsqueeze(0)
        live = _both(call.live, turn.rows.alive)
        query = Tags(token, torch.full_like(token, turn.trip), live, turn.bias, call.documents())
        self.tags.append(query)
        return self.plain if turn.trip == 0 else call.masks(call.view, query, _side_by_side(self.tags))


class Interleaved:
    """ALL, all tokens at once: the slots of all trips go through the stack side by side, token by token."""

    def __init__(self, call: Call, store: Store | None = None) -> None:
        self.call, self.store = call, store

    def __call__(self, turns: Sequence[Turn], final: bool) -> list[Out]:
        """One pass of the Jacobi solver."""
        call, stages = self.call, len(turns)
        x = torch.stack([turn.x for turn in turns], 2).flatten(1, 2)  # [B, T (m+1), hidden_size]
        positions = call.positions.repeat_interleave(stages, 1)
        tags = self._tags(turns)
        reading = Reading(call.plan[0], {}, call.rotary(positions), positions)
        placement = None
        if self.store is not None and (final or self.store.table.end):
            placement = self.store.table.place(tags, None)
            fresh = not self.store.table.end
            reading.cache = Exchange(self.store, placement, own_only=fresh)
        if placement is None or not self.store.table.end:  # type: ignore[union-attr]
            reading.masks, reading.position_ids = self._own_masks(x, turns, tags)
        else:
            reading.masks = call.masks(View.ALL, tags, self.store.table.tags(placement))  # type: ignore[union-attr]
        passed = call.stack(x, reading)
        if final:
            call.record(passed, stages)
            if self.store is not None and placement is not None:
                self.store.table.note(tags, placement, stages - 1)
                self.store.table.commit(tags, placement)
        apart = passed.residual.unflatten(1, (-1, stages))
        return [call.out(apart[:, :, j], j) for j in range(stages)]

    def _tags(self, turns: Sequence[Turn]) -> Tags:
        call = self.call
        first = 0 if self.store is None else self.store.table.columns - call.positions.shape[1]
        column = torch.arange(turns[0].x.shape[1], device=turns[0].x.device).unsqueeze(0) + first
        parts = [
            Tags(column, torch.full_like(column, j), _both(call.live, turn.rows.alive), turn.bias, call.documents())
            for j, turn in enumerate(turns)
        ]
        return _side_by_side(parts, interleave=True)

    def _own_masks(self, x: Tensor, turns: Sequence[Turn], tags: Tags) -> tuple[dict[str, Any], Tensor]:
        """Masks among the slots of this pass, and positions by which nobody may take a token for a document."""
        call, stages = self.call, len(turns)
        first = torch.arange(stages, device=x.device)
        slots = (call.positions.unsqueeze(2) * stages + first).flatten(1, 2)
        plain = tags.bias is None and all(turn.rows.alive is None for turn in turns) and len(call.windows) == 1
        if plain and None in call.windows.values():
            padding = None if call.padding is None else call.padding.repeat_interleave(stages, 1)
            return call.plain_masks(x, padding, None if call.packed is None else slots), slots
        return call.masks(View.ALL, tags, tags), slots


class Stored:
    """Any view with a slot cache, trip after trip: what halted is neither computed nor stored."""

    def __init__(self, call: Call, x: Tensor, store: Store) -> None:
        self.call, self.store = call, store
        self.fresh = not store.table.end
        self.plain = call.plain_masks(x, call.padding, call.packed) if self.fresh else None
        first = store.table.columns - x.shape[1]
        column = torch.arange(x.shape[1], device=x.device) + first
        self.column = column.expand(x.shape[0], -1)
        self.positions = call.positions.expand(x.shape[0], -1)
        documents = call.documents()
        self.documents = None if documents is None else documents.expand(x.shape[0], -1)
        self.sources: dict[int, Pair] = {}

    def __call__(self, turn: Turn) -> Out:
        """Make one trip."""
        call, rows, table = self.call, turn.rows, self.store.table
        token = rows.take(self.column)
        live = rows.valid if rows.valid is not None else _both(call.live, rows.alive)
        if live is not None and bool(live.all()):
            live = None
        query = Tags(
            token,
            torch.full_like(token, turn.trip),
            live,
            None if turn.bias is None else rows.take(turn.bias),
            None if self.documents is None else rows.take(self.documents),
        )
        placement = table.place(query, rows.batch)
        table.note(query, placement, turn.trip)
        positions = rows.take(self.positions)
        own_only = self.fresh and turn.trip == 0
        passed = call.stack(
            rows.take(turn.x),
            Reading(
                call.plan[turn.trip],
                self.plain if own_only and self.plain is not None else self._masks(query, placement, turn.trip),
                call.rotary(positions),
                positions,
                cache=Exchange(self.store, placement, own_only),
                sources={i: (_take(rows, k), _take(rows, v)) for i, (k, v) in self.sources.items()},
            ),
        )
        table.commit(query, placement)
        later = {i for trip in call.plan[turn.trip + 1 :] for visit in trip for i in visit.sources}
        for visit in call.plan[turn.trip]:
            if visit.index in later:
                self.sources[visit.index] = tuple(_put(rows, x) for x in passed.pairs[visit.index])  # type: ignore
        call.record(passed)
        return call.out(passed.residual, turn.trip)

    def _masks(self, query: Tags, placement: Placement, trip: int) -> dict[str, Any]:
        call, table = self.call, self.store.table
        everything = {View.ALL: True, View.DUO: trip >= table.deepest, View.SAME: trip == table.deepest == 0}
        # By the call's tokens, not by those left in this trip: one survivor of a prompt must not read later tokens.
        alone = self.column.shape[1] == 1 and placement.slot is None and table.bias is None and table.document is None
        if alone and everything[call.view] and set(call.windows.values()) == {None}:
            return dict.fromkeys(call.windows)
        return call.masks(call.view, query, table.tags(placement))


@dataclass
class Store:
    """A cache whose layers hold slots, and their table."""

    cache: Cache
    table: SlotTable


@dataclass
class Exchange:
    """Stands for the cache in one pass."""

    store: Store
    placement: Placement
    own_only: bool
    """Nothing was stored before this pass, so its tokens read one another and nothing else."""

    def update(self, key: Tensor, value: Tensor, layer: int) -> Pair:
        """Store, and return what can be seen."""
        seen = self.store.cache.layers[layer].exchange(self.placement, (key, value))
        return (key, value) if self.own_only else seen


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _side_by_side(parts: Sequence[Tags], interleave: bool = False) -> Tags:
    """The slots of several trips of the same tokens on one axis."""
    batch = max(len(x) for part in parts for x in (part.token, part.live, part.bias, part.document) if x is not None)

    def join(name: str, fill: Any) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        if all(x is None for x in found):
            return None
        shape = (batch, parts[0].token.shape[1])
        like = next(x for x in found if x is not None)
        full = [like.new_full(shape, fill) if x is None else x.expand(shape) for x in found]
        return torch.stack(full, 2).flatten(1, 2) if interleave else torch.cat(full, 1)

    token, trip = join("token", 0), join("trip", 0)
    assert token is not None and trip is not None
    return Tags(token, trip, join("live", True), join("bias", 0.0), join("document", 0))


def _take(rows: Rows, x: Tensor) -> Tensor:
    return rows.take(x.transpose(1, 2)).transpose(1, 2)  # [B, H_kv, T, D]


def _put(rows: Rows, x: Tensor) -> Tensor:
    return x if rows.valid is None else rows.put(None, x.transpose(1, 2)).transpose(1, 2)
