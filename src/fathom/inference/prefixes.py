"""Keys and values of prompts that were read, for prompts that begin alike.

A prompt takes over what another's first tokens left in the cache, but only up to a place where the other's reading was
cut into chunks: the kernels of a matrix product depend on how many tokens it has, so anything else would differ in the
last bits from reading the same chunks anew. Where two prompts part between such places, the second is cut there, and
the third finds a place. The scores behind a prompt are kept too, so the same prompt again is not read at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

LEAST = 32
"""Fewest tokens that are worth keeping, or cutting for."""


@dataclass(eq=False)
class Kept:
    """What a row's first tokens left in the cache."""

    tokens: np.ndarray
    cuts: list[int]
    """How many tokens had been read at the end of each chunk, in ascending order."""
    scores: dict[int, Tensor]
    """By how many tokens had been read: the logits for the next, `[1, V]`."""
    state: object
    """As the batch keeps it."""
    trips: int | None
    bytes: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Found:
    """What a prompt can take over."""

    kept: Kept | None = None
    count: int = 0
    """Tokens."""
    cut: int = 0
    """Where reading should be cut for those that come later; 0 for nowhere."""


NOTHING = Found()


@dataclass
class Prefixes:
    """The rows that are kept, the latest used last.

    Args:
        budget: Most bytes.
    """

    budget: int
    bytes: int = 0
    _all: OrderedDict[int, Kept] = field(default_factory=OrderedDict)

    def find(self, prompt: Sequence[int], trips: int | None, in_parts: bool = True) -> Found:
        """What a prompt can take over; without `in_parts` the whole prompt or nothing."""
        if len(prompt) < LEAST or not self._all:
            return NOTHING
        tokens, best, longest = np.asarray(prompt), NOTHING, 0
        for kept in self._all.values():
            shared = _shared(kept.tokens, tokens) if kept.trips == trips else 0
            if shared == len(tokens) and shared in kept.scores:
                best = Found(kept, shared)
                break
            longest = max(longest, shared)
            cuts = bisect_right(kept.cuts, min(shared, len(tokens) - 1))
            count = kept.cuts[cuts - 1] if cuts else 0
            if in_parts and count >= LEAST and count > best.count:
                best = Found(kept, count)
        if best.kept is not None:
            self._all.move_to_end(id(best.kept))
        apart = in_parts and longest < len(tokens) and longest - best.count >= LEAST
        return Found(best.kept, best.count, longest) if apart and best.count < len(tokens) else best

    def keep(
        self,
        tokens: Sequence[int],
        trips: int | None,
        cuts: Sequence[int],
        scores: Mapping[int, Tensor],
        state: tuple[object, int],
        instead: Kept | None = None,
    ) -> Kept:
        """Keep a row, in place of one that it goes on from; the longest unused ones make room.

        A row that is larger than all room is not kept, and takes no other's room.

        Args:
            tokens: What it holds.
            trips: As a job has them.
            cuts: As `Kept` has them.
            scores: As `Kept` has them.
            state: What a batch kept, and its bytes.
            instead: A row that this one begins with.
        """
        size = state[1] + sum(one.nbytes for one in scores.values())
        kept = Kept(np.asarray(tokens), list(cuts), dict(scores), state[0], trips, size)
        if kept.bytes > self.budget:
            return kept
        if instead is not None:
            self._drop(instead)
        self._all[id(kept)] = kept
        self.bytes += kept.bytes
        while self.bytes > self.budget:
            self._drop(next(iter(self._all.values())))
        return kept

    def __len__(self) -> int:
        return len(self._all)

    def _drop(self, kept: Kept) -> None:
        if self._all.pop(id(kept), None) is not None:
            self.bytes -= kept.bytes


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows begin with alike."""
    size = min(len(one), len(other))
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if len(apart) else size
