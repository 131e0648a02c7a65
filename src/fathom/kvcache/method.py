"""What a compression method is: a rule that turns M entries into L, the same for keys and for values.

    [k₁ … k_N], [v₁ … v_N]  →  the S sinks as they are, reduce(the other M)  →  S + L entries

Keys are turned back to position 0 before they are reduced and to their new places after it, in float32 at least, and
are cast once.
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
    """One compression rule with its schedule, shared by all layers and never changed by one."""

    name: ClassVar[str]
    by_name: ClassVar[bool] = True
    """Whether a name selects it; a method with trained weights of its own is passed as an object."""
    has_ratio: ClassVar[bool] = True
    """Whether the share that a compression leaves may be chosen."""
    observed: int = 0
    """How many of the last queries `reducer` wants to see."""

    def __init__(self, schedule: Schedule, rope: Rope) -> None:
        super().__init__()  # a method may be a module too
        self.schedule, self.rope = schedule, rope

    @classmethod
    def plan(cls, window: int, sinks: int, ratio: float, kept: int | None) -> Schedule:
        """The method's schedule for what the user asked."""
        return Schedule.at(window, sinks, ratio, kept)

    @abstractmethod
    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """What this compression does to the M entries.

        Args:
            keys: All N, `[B, H_kv, N, D]`, turned as attention sees them.
            queries: The last `observed` ones, `[B, H, w, D]`, turned and scaled; None for a method that wants none.
        """

    def compress(
        self, keys: Tensor, values: Tensor, first: Tensor, compressions: int, queries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One compression: `[B, H_kv, N, D]` keys and values, as stored, to `[B, H_kv, S + L, D]`.

        Args:
            keys: Turned.
            values: As they are.
            first: The sinks' keys as they were before any compression. Moving them from there, by all compressions at
                once, keeps half precision from wearing them down.
            compressions: Compressions made before this one.
            queries: As `reducer` wants them.
        """
        sinks, freed = self.schedule.sinks, self.schedule.freed
        with torch.autocast(keys.device.type, enabled=False):  # it would send the matrix to half precision
            reduce = self.reducer(widen(keys), queries)
            bare = self.rope.turn(widen(keys), 0, -1)[:, :, sinks:]
            rest = self.rope.turn(reduce(bare), sinks + freed).to(keys.dtype)
            rest_values = reduce(widen(values[:, :, sinks:])).to(values.dtype)
        moved = self.move(first, compressions + 1)
        return torch.cat([moved, rest], dim=2), torch.cat([values[:, :, :sinks], rest_values], dim=2)

    def move(self, first: Tensor, compressions: int) -> Tensor:
        """The sinks' keys where that many compressions put them."""
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


# Of all methods: a server makes a cache for every request.
_MATRICES: dict[tuple[Callable[..., Tensor], int, int, torch.dtype, torch.device], Tensor] = {}
BLOCK = 1 << 18
"""Entries of a matrix that are worked out at once."""


class Fixed(Linear):
    """A matrix that follows from the schedule alone; made once for each type and device."""

    @staticmethod
    @abstractmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """The rows `i` of C, `[rows, M]`, in float64."""

    @classmethod
    def build(cls, kept: int, compressed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """C, `[L, M]`. A few rows at a time are made in float64, so that hardly more is held than C itself."""
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
        """`[B, H_kv, N]`; what the sinks get does not matter."""

    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """x → the chosen entries of x."""
        scores = self.scores(keys.detach(), queries)[..., self.schedule.sinks :]
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., : self.schedule.kept]  # the earliest of equals
        chosen = best.sort(-1).values.unsqueeze(-1)  # [B, H_kv, L, 1]
        return lambda x: x.take_along_dim(chosen, dim=2)
