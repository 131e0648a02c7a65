"""Which collection each training row comes from: shares that every prefix keeps, by largest deficit.

Row n + 1 goes to the collection for which w (n + 1) - c is largest, w being its share and c the rows that it has had;
of several the first. Computed in integers, so that no rounding decides. After any n rows, of k collections each has
its share to within -1 < w n - c < k - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FINENESS = 10_000


def whole_weights(shares: Sequence[float]) -> list[int]:
    """Shares as the smallest integers in the same proportion, to four digits: 0.8, 0.1, 0.1 as 8, 1, 1."""
    total = math.fsum(shares)
    weights = [max(round(FINENESS * share / total), 1) for share in shares]
    common = math.gcd(*weights)
    return [weight // common for weight in weights]


def row_order(weights: Sequence[int], rows: int) -> NDArray[np.uint8]:
    """The collection of each of the first rows."""
    if not 1 <= len(weights) <= 256 or min(weights) < 1:
        raise ValueError(f"1 to 256 positive weights are wanted, not {list(weights)}")
    total, order = sum(weights), bytearray()
    # After `total` rows every collection has exactly its share, and the sequence begins anew.
    period = min(rows, total)
    deficits = [0] * len(weights)
    for _ in range(period):
        deficits = [deficit + weight for deficit, weight in zip(deficits, weights, strict=True)]
        chosen = max(range(len(weights)), key=lambda one: (deficits[one], -one))
        deficits[chosen] -= total
        order.append(chosen)
    return np.resize(np.frombuffer(bytes(order), np.uint8), rows) if rows else np.empty(0, np.uint8)
