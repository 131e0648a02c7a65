"""The prefix cache: keeps the keys and values of earlier prompts for later prompts with the same beginning.

A prompt takes over what another's first tokens left in the cache, but only up to a place where the other's reading was
cut into chunks: the kernels of a matrix product depend on how many tokens it has, so anything else would differ in the
last bits from reading the same chunks anew. If two prompts diverge within a chunk, the second is split at that
position, and a third can use it. The logits after a prompt are kept too, so a repeated prompt is not read at all.

`engine.py` decides which prompts use the cache: none with `echo` and `logprobs`, or with `return_trips`, or in a batch
without `keeps_prefixes` (`batches.py`), as with `--kvcache`. Prompts share entries only if their `cache_salt` and their
maximum number of iterations are the same (`Job.kind`). `launch.py` sets the cache's size (`--prefix-memory`).
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
    """A prefix-cache entry: the keys and values of a sequence's first tokens."""

    tokens: np.ndarray
    cuts: list[int]
    """Tokens read at the end of each chunk, ascending."""
    scores: dict[int, Tensor]
    """The logits `[1, V]` for the next token, by the number of tokens read."""
    state: object
    """The state in the batch's own format."""
    kind: object
    """Only a prompt of an equal kind may reuse it."""
    bytes: int

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Found:
    """The part of a prompt that can be reused from the prefix cache."""

    kept: Kept | None = None
    count: int = 0
    """Number of tokens."""
    cut: int = 0
    """Where reading should be split for later prompts; 0 for nowhere."""


NOTHING = Found()


@dataclass
class Prefixes:
    """The prefix cache: the stored sequences, the most recently used last.

    Args:
        budget: Maximum bytes.
    """

    budget: int
    bytes: int = 0
    _all: OrderedDict[int, Kept] = field(default_factory=OrderedDict)

    def find(self, prompt: Sequence[int], kind: object, in_parts: bool = True) -> Found:
        """Find the part of a prompt that can be reused; without `in_parts`, only a cached whole prompt counts."""
        if len(prompt) < LEAST or not self._all:
            return NOTHING
        tokens, best, longest = np.asarray(prompt), NOTHING, 0
        for kept in self._all.values():
            shared = _shared(kept.tokens, tokens) if kept.kind == kind else 0
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
        kind: object,
        cuts: Sequence[int],
        scores: Mapping[int, Tensor],
        state: tuple[object, int],
        instead: Kept | None = None,
    ) -> Kept:
        """Store a sequence in the prefix cache, in place of a shorter one that it continues; the least recently used
        sequences make room.

        A sequence larger than the budget is not kept, and evicts nothing.

        Args:
            tokens: What it holds.
            kind: As `Kept` has it.
            cuts: As `Kept` has them.
            scores: As `Kept` has them.
            state: What a batch kept, and its bytes.
            instead: A row that this one begins with.
        """
        size = state[1] + sum(one.nbytes for one in scores.values())
        kept = Kept(np.asarray(tokens), list(cuts), dict(scores), state[0], kind, size)
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
    """The number of equal tokens at the beginning of two sequences."""
    size = min(len(one), len(other))
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if len(apart) else size
