"""A shuffle of any size without an array: a keyed Feistel network, applied until the result lies in the range.

`batches.py` (`_shuffled`) makes one for each seed, collection and epoch.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from fathom.report.mixing import mixed

ROUNDS = 8


class Permutation:
    """A bijection of `range(size)` chosen by `key`; its cost per index does not depend on the size."""

    def __init__(self, size: int, *key: int) -> None:
        self.size = size
        self._half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The image of each index."""
        values = self._scramble(indices.astype(np.uint64))
        # The network permutes the next power of four; results outside the range are permuted again.
        while (outside := values >= self.size).any():
            values[outside] = self._scramble(values[outside])
        return values.astype(np.int64)

    def _scramble(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def scatter(indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each index a number in `range(size)`, by a hash of the index; sizes must be below 2 ** 32."""
    high = mixed(indices.astype(np.uint64) + np.uint64(1)) >> np.uint64(32)
    return ((high * sizes.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
