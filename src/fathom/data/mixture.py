"""Which collection each training sequence comes from: the one with the largest deficit, so that every prefix keeps the
shares.

Row n + 1 goes to the collection for which w (n + 1) - c is largest (the first on a tie), w being its share and c the
rows that it has had. This is computed in integers, without rounding. After any n rows, with k collections, each has had
its share to within -1 < w n - c < k - 1.

`../recipe.py` (`later`) turns the `at` of a phase (a later mixture) into a step. `batches.py` reshuffles each
collection in each of its epochs. `training/branching.py` decides which phases a branch may change. `collections.py`
opens the collections that a mixture names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fathom.errors import DataError

FINENESS = 10_000
MOST = 1 << 16
"""Collections in a mixture."""


def whole_weights(shares: Sequence[float], fineness: int = FINENESS) -> list[int]:
    """Shares as the smallest integers in the same proportion, by default to four digits: 0.8, 0.1, 0.1 as 8, 1, 1."""
    total = math.fsum(shares)
    weights = [max(round(fineness * share / total), 1) for share in shares]
    common = math.gcd(*weights)
    return [weight // common for weight in weights]


def row_order(weights: Sequence[int], rows: int) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """The collection of each of the first `rows` training sequences, in one byte each for up to 256 collections, else
    in two."""
    if len(weights) > MOST:
        raise DataError(f"a mixture of {len(weights):,} collections: allowed: {MOST:,} at most")
    if not weights or min(weights) < 1:
        raise ValueError(f"weights must be positive, got {list(weights)}")
    total, wide = sum(weights), np.uint8 if len(weights) <= 256 else np.uint16
    # After `total` rows every collection has exactly its share, and the sequence repeats.
    order = np.empty(min(rows, total), wide)
    shares, deficits = np.array(weights), np.zeros(len(weights), np.int64)
    for row in range(len(order)):
        deficits += shares
        order[row] = chosen = int(deficits.argmax())  # the first one on a tie
        deficits[chosen] -= total
    return np.resize(order, rows)


@dataclass(frozen=True)
class Phase:
    """The shares of all collections from a given training sequence on."""

    first: int
    """The first row."""
    shares: tuple[float, ...]
    """Share of every collection, 0 if it is not read; the sum need not be 1."""


class Mixture:
    """Decides which collection each training sequence comes from, and which sequence of that collection it is.

    Every phase counts from its own start, so any prefix of a phase keeps its shares. Collections continue where they
    stopped.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = tuple(phases)
        self._cycles = [_Cycle(phase.shares) for phase in self.phases]
        self._firsts = np.array([phase.first for phase in self.phases])
        # Rows that each collection has had when a phase begins.
        self._before: list[NDArray[np.int64]] = [np.zeros(len(self.phases[0].shares), np.int64)]
        for cycle, rows in zip(self._cycles, np.diff(self._firsts).tolist(), strict=False):
            self._before.append(self._before[-1] + cycle.counts(rows))

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The collection of each training sequence, and how many sequences of that collection precede it."""
        collections, numbers = np.empty_like(rows), np.empty_like(rows)
        phases = self._firsts.searchsorted(rows, side="right") - 1
        for phase in np.unique(phases).tolist():
            here = phases == phase
            found, ranks = self._cycles[phase].places(rows[here] - self._firsts[phase])
            collections[here], numbers[here] = found, self._before[phase][found] + ranks
        return collections, numbers

    def counts(self, rows: int) -> list[int]:
        """The number of sequences of each collection among the first `rows` training sequences."""
        if not rows:
            return [0] * len(self._before[0])
        phase = int(self._firsts.searchsorted(rows - 1, side="right")) - 1
        inside = self._cycles[phase].counts(rows - int(self._firsts[phase]))
        return [int(count) for count in self._before[phase] + inside]


class _Cycle:
    """The repeating order of collections in one phase of a mixture."""

    def __init__(self, shares: Sequence[float]) -> None:
        read = [number for number, share in enumerate(shares) if share > 0]
        weights = whole_weights([shares[number] for number in read])
        self._order = np.array(read)[row_order(weights, sum(weights))]
        self._weights = np.zeros(len(shares), np.int64)
        self._weights[read] = weights
        self._ranks = np.empty_like(self._order)
        for number in read:
            self._ranks[self._order == number] = np.arange(self._weights[number])

    def places(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The collection of each sequence of a phase, and the index of the sequence within its collection."""
        cycles, inside = np.divmod(rows, len(self._order))
        found = self._order[inside]
        return found, cycles * self._weights[found] + self._ranks[inside]

    def counts(self, rows: int) -> NDArray[np.int64]:
        """The number of sequences of each collection among the first `rows` sequences of a phase."""
        cycles, rest = divmod(rows, len(self._order))
        return cycles * self._weights + np.bincount(self._order[:rest], minlength=len(self._weights))
