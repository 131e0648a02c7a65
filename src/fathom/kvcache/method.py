"""Compression methods: a rule that turns M entries into L, the same for keys and for values.

    [k₁ … k_N], [v₁ … v_N]  →  the S sinks as they are, reduce(the other M)  →  S + L entries

Keys are rotated back to position 0 before they are reduced and to their new positions after it, in float32 at least,
and are cast once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from fathom.models.numerics import widen

from .rope import Rope
from .schedule import Schedule

Reducer = Callable[[Tensor], Tensor]
"""`[B, H_kv, M, D]` to `[B, H_kv, L, D]`."""


class Method(ABC):
    """One compression rule with its schedule, shared by all layers, which must not change it."""

    name: ClassVar[str]
    by_name: ClassVar[bool] = True
    """Whether it can be selected by name; a method with trained weights is passed as an object."""
    has_ratio: ClassVar[bool] = True
    """Whether `ratio`, the share that a compression leaves, applies to it."""
    observed: int = 0
    """How many of the last queries `reducer` needs."""

    def __init__(self, schedule: Schedule, rope: Rope) -> None:
        super().__init__()  # a method may be a module too
        self.schedule, self.rope = schedule, rope

    @classmethod
    def schedule_for(cls, window: int, sinks: int, ratio: float, kept: int | None) -> Schedule:
        """The method's schedule for the user's settings."""
        return Schedule.at(window, sinks, ratio, kept)

    @abstractmethod
    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """The function that a compression applies to the M entries of keys and of values.

        Args:
            keys: All N, `[B, H_kv, N, D]`, rotated as attention sees them.
            queries: The last `observed` ones, `[B, H, w, D]`, rotated and scaled; None for a method that needs none.
        """

    def compress(
        self, keys: Tensor, values: Tensor, first: Tensor, compressions: int, queries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One compression: `[B, H_kv, N, D]` keys and values, as stored, to `[B, H_kv, S + L, D]`.

        Args:
            keys: Rotated.
            values: As stored.
            first: The sinks' keys before any compression. They are moved from there by all compressions at once, so
                that rounding errors do not add up.
            compressions: Compressions made before this one.
            queries: As `reducer` takes them.
        """
        sinks, freed = self.schedule.sinks, self.schedule.freed
        with torch.autocast(keys.device.type, enabled=False):  # it would cast the matrix to half precision
            reduce = self.reducer(widen(keys), queries)
            bare = self.rope.turn(widen(keys), 0, -1)[:, :, sinks:]
            rest = self.rope.turn(reduce(bare), sinks + freed).to(keys.dtype)
            rest_values = reduce(widen(values[:, :, sinks:])).to(values.dtype)
        moved = self.move(first, compressions + 1)
        return torch.cat([moved, rest], dim=2), torch.cat([values[:, :, :sinks], rest_values], dim=2)

    def move(self, first: Tensor, compressions: int) -> Tensor:
        """The sinks' keys, rotated to their positions after that many compressions."""
        with torch.autocast(first.device.type, enabled=False):
            return self.rope.turn(widen(first), self.schedule.freed * compressions, 0).to(first.dtype)


class Linear(Method):
    """rest = C · rest, one matrix for every head and channel."""

    @abstractmethod
    def matrix(self, like: Tensor) -> Tensor:
        """C, `[L, M]`, in the type and place of `like`."""

    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """x → C x."""
        c = self.matrix(keys)
        return lambda x: torch.einsum("lm,bhmd->bhld", c, x)


# Shared by all methods, since a server makes a cache for every request.
_MATRICES: dict[tuple[Callable[..., Tensor], int, int, torch.dtype, torch.device], Tensor] = {}
BLOCK = 1 << 18
"""Entries of a matrix that are computed at a time."""


class Fixed(Linear):
    """A matrix that depends on the schedule only; computed once for each dtype and device."""

    @staticmethod
    @abstractmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """The rows `i` of C, `[rows, M]`, in float64."""

    @classmethod
    def build(cls, kept: int, compressed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """C, `[L, M]`. A few rows at a time are computed in float64, so that little more memory than C is needed."""
        c = torch.empty(kept, compressed, dtype=dtype)
        for i in torch.arange(kept).split(max(1, BLOCK // compressed)):
            c[i[0] : i[-1] + 1] = cls.rows(i, kept, compressed)
        return c

    def matrix(self, like: Tensor) -> Tensor:
        """C, `[L, M]`."""
        kept, compressed = self.schedule.kept, self.schedule.compressed
        key = (self.build, kept, compressed, like.dtype, like.device)
        if key not in _MATRICES:
            if len(_MATRICES) > 16:
                _MATRICES.clear()
            with torch.inference_mode(False):  # training may use it later
                _MATRICES[key] = self.build(kept, compressed, like.dtype).to(like.device)
        return _MATRICES[key]


class Selection(Method):
    """The L entries with the highest scores, head by head, in their order."""

    @abstractmethod
    def scores(self, keys: Tensor, queries: Tensor | None) -> Tensor:
        """Scores `[B, H_kv, N]`; those of the sinks are ignored."""

    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """x → the chosen entries of x."""
        scores = self.scores(keys.detach(), queries)[..., self.schedule.sinks :]
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.schedule.kept]  # the earliest of equals
        chosen = best.sort(-1).values.unsqueeze(-1)  # [B, H_kv, L, 1]
        return lambda x: x.take_along_dim(chosen, dim=2)
