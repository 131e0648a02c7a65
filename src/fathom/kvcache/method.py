"""Compression methods: a rule that turns M entries into L, the same for keys and values. A compression does:

    [k₁ … k_N], [v₁ … v_N]  →  the S sinks unchanged, condense(the other M)  →  S + L entries

Keys are rotated back to position 0 before they are mixed and to their new positions after it, in float32 at least,
and are cast once. Selected entries are rotated once, by the distance that they move.

Methods that select entries score them; `Selection.choose` chooses the entries that stay. `build.py` warns if a method
needs tuned weights (`needs_tuning`) and the model's were not tuned under it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from fathom.models.axes.numerics import widen

from .rope import Rope, Still
from .schedule import RATIO, SINKS, UNTOUCHED, Schedule, share

UNSEEN = (
    "this method needs the queries, which were not seen: the cache was built from another model than the one that is "
    "run, or the model's attention does not use transformers' attention functions (as Falcon's); use a method without "
    "queries, such as key_norm, drop or freqkv"
)


@dataclass(frozen=True)
class Held:
    """The full memory of a layer, as input of a compression method."""

    keys: Tensor
    """Keys `[B, H_kv, N, D]`, rotated as attention sees them."""
    values: Tensor
    """Values `[B, H_kv, N, D]`."""
    queries: Tensor | None = None
    """The result of `Method.note` for the queries since the last compression: by default the last `observed` ones, `[B,
    H, w, D]`, rotated and scaled. None for a method without queries."""
    rotation: Still | None = None
    """How this layer rotates keys; None means like the model's first layer."""
    module: nn.Module | None = None
    """The attention layer, for a method with queries."""
    start: int = 0
    """The position of entry 0, if the last entry has its own."""

    def wide(self) -> Held:
        """In float32 at least."""
        return replace(self, keys=widen(self.keys), values=widen(self.values))

    def attention(self) -> Tensor:
        """The attention weights of the observed queries, `[B, H_kv, G, w, N]`; G query heads share a key head."""
        if self.queries is None:
            raise ValueError(UNSEEN)
        heads, n = self.keys.shape[1:3]
        observed = self.queries.shape[2]
        grouped = self.queries.to(self.keys.dtype).unflatten(1, (heads, -1))
        looks = (grouped.flatten(2, 3) @ self.keys.detach().mT).view(*grouped.shape[:-1], n)
        future = torch.ones(observed, observed, dtype=torch.bool, device=self.keys.device).triu(1)
        looks[..., n - observed :].masked_fill_(future, -torch.inf)
        return looks.softmax(-1)


class Method(ABC):
    """A compression rule with its schedule; all layers share the object and must not change it."""

    name: ClassVar[str]
    by_name: ClassVar[bool] = True
    """Whether it can be selected by name; methods with trained weights are passed as objects."""
    has_ratio: ClassVar[bool] = True
    """Whether `ratio`, the share that a compression leaves, applies to this method."""
    needs_tuning: ClassVar[bool] = False
    """Whether the model's weights must be trained under it."""
    own_ratio: ClassVar[float] = RATIO
    """The share that a compression leaves by default."""
    own_sinks: ClassVar[int] = SINKS
    """The first entries that are never compressed by default."""
    moves: bool = True
    """Whether entries get consecutive positions after a compression; otherwise they keep those of their tokens."""
    memory: ClassVar[type[CacheLayerMixin] | None] = None
    """The class of its memories, if they are special."""
    place: tuple[int, int] = (0, 1)
    """The layer of a method with a budget for each, and the number of such layers."""
    observed: int = 0
    """How many of the last queries `condense` needs; above 0 for every method that uses queries."""

    def __init__(self, schedule: Schedule, rope: Rope) -> None:
        super().__init__()  # a method may be a module too
        self.schedule, self.rope = schedule, rope

    @classmethod
    def schedule_for(cls, window: int, sinks: int, ratio: float, kept: int | None) -> Schedule:
        """The compression schedule that follows from the user's settings."""
        return Schedule.at(window, sinks, ratio, kept)

    @classmethod
    def left(cls, length: int, ratio: float) -> int:
        """The number of entries that `ratio` leaves of a prompt of `length` tokens."""
        return share(length, ratio)

    @classmethod
    def for_prompt(
        cls, kind: type[Schedule], length: int, sinks: int, ratio: float, rope: Rope, **options: object
    ) -> Method:
        """The method with a schedule for a prompt of `length` tokens; it never compresses if `ratio` leaves every
        token, or no more than the sinks."""
        left = cls.left(length, ratio)
        if not sinks < left < length:
            return cls(kind.at(UNTOUCHED, sinks, ratio), rope, **options)
        return cls(kind(length, sinks, left - sinks), rope, **options)

    def for_layer(self, layer: int, layers: int) -> Method:
        """The method for one of the compressed layers; by default all layers have the same."""
        return self

    def moved(self, compressions: int) -> int:
        """The number of positions by which `compressions` compressions move the sinks."""
        return self.schedule.freed * compressions if self.moves else 0

    def rotation(self, held: Held) -> Still:
        """The rotation of the layer's keys."""
        return self.rope.plan[0] if held.rotation is None else held.rotation

    def note(self, known: Tensor | None, queries: Tensor, start: int, rotation: Still) -> Tensor:
        """What to store of the queries for the next compression; by default, the last `observed` queries.

        Args:
            known: The state since the last compression; None at first.
            queries: New ones, `[B, H, q, D]`, rotated and scaled.
            start: The entry that belongs to the first of them.
            rotation: How the layer rotates.
        """
        known = queries if known is None else torch.cat([known, queries], dim=2)
        return known[:, :, -self.observed :]

    @abstractmethod
    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """The L entries that replace the M entries behind the sinks, `[B, H_kv, L, D]`: keys rotated to positions S +
        F, S + F + 1, …, and values."""

    def compress(self, held: Held, first: Tensor, compressions: int) -> tuple[Tensor, Tensor]:
        """Compress a full memory once: returns keys and values of S + L entries, `[B, H_kv, S + L, D]`.

        Args:
            held: The full memory.
            first: The sinks' keys before any compression. They are rotated from there by the sum of all compressions,
                so that rounding errors do not add up.
            compressions: Compressions made before this one.
        """
        keys, values = held.keys, held.values
        with torch.autocast(keys.device.type, enabled=False):  # it would cast the matrix to half precision
            rest, rest_values = self.condense(held.wide())
            moved = self.rotation(held).turn(widen(first), self.moved(compressions + 1), 0)
        sinks = values[:, :, : self.schedule.sinks]
        return torch.cat([moved.to(keys.dtype), rest.to(keys.dtype)], dim=2), torch.cat(
            [sinks, rest_values.to(values.dtype)], dim=2
        )


class Linear(Method):
    """A linear method: the entries behind the sinks are multiplied by one matrix C, the same for every head and
    channel."""

    needs_tuning = True

    @abstractmethod
    def reduce(self, x: Tensor) -> Tensor:
        """The product C x, from `[B, H_kv, M, D]` to `[B, H_kv, L, D]`."""

    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """Mix keys, rotated back to position 0, and values with the same matrix."""
        sinks, rotation = self.schedule.sinks, self.rotation(held)
        bare = rotation.turn(held.keys, 0, -1)[:, :, sinks:]
        keys = rotation.turn(self.reduce(bare), sinks + self.schedule.freed)
        return keys, self.reduce(held.values[:, :, sinks:])


NEAR = 2e-6
"""Scores that differ from the least chosen one by a smaller share are equal to it: RoPE's own tables are in float32."""


class Selection(Method):
    """Keeps the L entries with the highest scores, for each head separately, in their order; of equal scores, the
    earlier entry.

    A score of inf protects an entry. If more than L are protected, the latest stay.
    """

    @abstractmethod
    def scores(self, held: Held) -> Tensor:
        """The scores `[B, H_kv, N]` by which entries are kept; scores of the sinks are ignored."""

    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """The selected entries, with keys rotated to new positions if the method moves entries."""
        sinks, freed = self.schedule.sinks, self.schedule.freed
        with torch.no_grad():
            chosen = self.choose(self.scores(held)[..., sinks:])  # [B, H_kv, L]
        heads, n = held.keys.shape[:2].numel(), held.keys.shape[2]
        rows = (torch.arange(heads, device=chosen.device).unsqueeze(1) * n + sinks + chosen.flatten(0, 1)).flatten()
        keys, values = (x.flatten(0, 2).index_select(0, rows).view(*chosen.shape, -1) for x in (held.keys, held.values))
        if not self.moves:
            return keys, values
        moves = torch.arange(self.schedule.kept, device=chosen.device) + freed - chosen
        return self.rotation(held).turn_each(keys, moves, 0, freed), values

    def choose(self, scores: Tensor) -> Tensor:
        """The indices of the L highest of M scores `[B, H_kv, M]`, ascending.

        Keys of the same word at different positions have equal norms up to rounding, and rounding must not decide.
        """
        kept, m = self.schedule.kept, torch.arange(scores.shape[-1], device=scores.device)
        least = scores.topk(kept, dim=-1).values[..., -1:]
        near = least.isfinite() & ((scores - least).abs() <= NEAR * least.abs())  # every score is near to infinity
        equal = (scores == least) | near
        rank = 2 * ((scores > least) & ~equal).long() + equal.long()
        order = torch.where(least == torch.inf, m, -m)
        return (rank * 2 * len(m) + order).topk(kept, dim=-1).indices.sort(-1).values
