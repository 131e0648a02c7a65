"""The schedule of a memory (a cache of constant size): when it is compressed, and to how many entries, as a function of
the tokens seen. The number of entries is:

    entries(T) = T                          while T ≤ N
               = S + L + 1 + (T − N − 1) mod F   after it,      F = N − S − L

A compression happens when a token arrives and the memory holds N entries: S stay unchanged, the other M = N − S become
L, and F tokens fit until the next compression. `L = γN − S` by default, so that a power of two divides N and F.

`policy.py` chooses N, S, L and γ for a command. In `compressed` without `window`, γ is a share of the prompt
(`Method.for_prompt` in `method.py`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar

SINKS = 4
"""First entries that are kept by default."""
RATIO = 0.5
"""The default share that a compression leaves."""
UNTOUCHED = 1 << 40
"""The window of prompts that are too short to be compressed."""
LARGEST_MASK = 1 << 22
"""Most queries × keys of a mask; beyond that, prompts are read in smaller chunks, and training does without a mask."""


@dataclass(frozen=True)
class Schedule:
    """The schedule of a memory, i.e. when it is compressed and to how many entries; the same for cache, training and
    prefill."""

    window: int
    """N, the maximum entries of a memory: the context length in training."""
    sinks: int
    """S, the first entries, which are never compressed."""
    kept: int
    """L, the number of entries that the others become in a compression."""
    eager: ClassVar[bool] = False
    """Whether N entries are compressed at once, instead of when the next token arrives."""

    @classmethod
    def at(cls, window: int, sinks: int, ratio: float, kept: int | None = None) -> Schedule:
        """The schedule that leaves `ratio · window` entries after a compression, or `kept` in addition to the sinks."""
        if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 < ratio < 1:
            raise ValueError(f"ratio must lie between 0 and 1, got {ratio!r}")
        whole_numbers(window=window, sinks=sinks)
        return cls(window, sinks, share(window, ratio) - sinks if kept is None else kept)

    def __post_init__(self) -> None:
        whole_numbers(window=self.window, sinks=self.sinks, kept=self.kept)
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.sinks < 0:
            raise ValueError(f"sinks must not be negative, got {self.sinks}")
        if self.window < self.sinks + 2:
            least = self.sinks + 2
            raise ValueError(f"a window of {self.window} is too small for {self.sinks} sinks: {least} or more needed")
        if not 1 <= self.kept < self.window - self.sinks:
            raise ValueError(
                f"a window of {self.window} with {self.sinks} sinks can keep 1 to {self.window - self.sinks - 1} other "
                f"entries, not {self.kept}: choose another ratio or number kept, or fewer sinks"
            )

    @property
    def compressed(self) -> int:
        """M, the number of entries that a compression reads in addition to the sinks."""
        return self.window - self.sinks

    @property
    def survivors(self) -> int:
        """S + L, the number of entries after a compression."""
        return self.sinks + self.kept

    @property
    def freed(self) -> int:
        """F, the number of tokens between two compressions."""
        return self.window - self.survivors

    @property
    def most(self) -> int:
        """The maximum number of entries that a memory may hold."""
        return self.window

    @property
    def chunk(self) -> int:
        """The longest fixed chunk that never crosses a compression: `prefill_chunk_size` for `generate`."""
        return math.gcd(self.window, self.freed)

    def entries(self, seen: int) -> int:
        """Stored entries after `seen` tokens."""
        return seen - self.compressions(seen) * self.freed

    def compressions(self, seen: int) -> int:
        """Compressions made after `seen` tokens."""
        beyond = seen - self.window + self.eager
        return 0 if beyond <= 0 else 1 + (beyond - 1) // self.freed

    def ended(self, seen: int) -> bool:
        """Whether no compression will follow once `seen` tokens were seen."""
        return False

    def room(self, seen: int) -> int:
        """The maximum number of tokens in the next forward pass."""
        entries = self.entries(seen)
        return self.freed if entries == self.window else self.window - entries

    def cuts(self, seen: int, length: int) -> list[int]:
        """The lengths of the chunks into which `length` tokens are split."""
        chunks = []
        while length > 0:
            chunks.append(min(length, self.room(seen)))
            seen, length = seen + chunks[-1], length - chunks[-1]
        return chunks

    def fit(self, seen: int, length: int) -> None:
        """Refuse a chunk that crosses a compression, because a forward pass attends to a single state of the memory."""
        room = self.room(seen)
        if length > room:
            raise ValueError(
                f"a chunk of {length} tokens crosses the compression boundary at token {seen + room} ({room} left); "
                f"call prefill(model, input_ids, cache), or from an empty cache use chunks that divide {self.chunk} "
                f"(generate takes prefill_chunk_size={self.chunk})"
            )


@dataclass(frozen=True)
class Eager(Schedule):
    """A schedule that compresses as soon as N entries are held, in the forward pass that brings the last of them."""

    eager = True


@dataclass(frozen=True)
class Once(Eager):
    """A schedule with one compression, at the end of the first N tokens (a prompt), after which the memory grows with
    every token."""

    @property
    def most(self) -> int:
        """No maximum."""
        return sys.maxsize

    @property
    def chunk(self) -> int:
        """The chunk size to read a prompt with; after the prompt, chunks of any length are possible."""
        return self.window

    def compressions(self, seen: int) -> int:
        """Compressions made after `seen` tokens."""
        return int(seen >= self.window)

    def ended(self, seen: int) -> bool:
        """Whether no compression will follow once `seen` tokens were seen."""
        return seen >= self.window

    def room(self, seen: int) -> int:
        """The maximum number of tokens in the next forward pass."""
        return self.window - seen if seen < self.window else sys.maxsize


def share(window: int, ratio: float) -> int:
    """The number of entries that a compression of `window` entries leaves, rounded down."""
    return int(round(ratio * window, 6))  # 0.29 · 100 is a little less than 29


def whole_numbers(**counts: object) -> None:
    """Refuse a count that is not an integer; the error names it."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, Integral):
            raise ValueError(f"{name} must be a whole number, got {count!r}")
