"""MinHash: documents that share most word runs agree in a group of hashes; others seldom do.

Each hash function keeps the smallest value over a document's runs. Two documents agree in one function with
probability J, the Jaccard similarity of their runs. They agree in a band of r functions with probability J^r, and in at
least one of b bands with probability 1 - (1 - J^r)^b.

`duplicates.py` makes the pairs, verifies them by `deduplicate.jaccard`, and decides which document is removed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.words import Numbers, Words
from fathom.report.mixing import mixed

STEP = 1 << 14
"""Runs that are hashed together; they stay in the processor's cache."""
NOTHING = np.uint64(0)
"""Stands for the bands of a document that has no run."""


def band_numbers(words: Words, shingle: int, bands: int, rows: int, seed: int) -> Numbers:
    """One number for each band of each text, equal for two texts if all their hashes of the band are; 0 for a text
    without runs."""
    runs, bounds = words.runs(shingle)
    least = signatures((runs >> np.uint64(32)).astype(np.uint32), bounds, bands * rows, seed)  # [K, D]
    found = np.zeros((bands, len(bounds) - 1), np.uint64)
    for band in range(bands):
        # The seed includes the band, so that numbers of different bands cannot match.
        found[band] = mixed(np.full(len(bounds) - 1, band + 1, np.uint64))
        for row in least[band * rows : (band + 1) * rows]:
            found[band] = mixed(found[band] ^ row.astype(np.uint64)) + np.uint64(1)
    found[:, np.diff(bounds) == 0] = NOTHING
    return found


def signatures(runs: NDArray[np.uint32], bounds: NDArray[np.int64], count: int, seed: int) -> NDArray[np.uint32]:
    """The smallest value of each of `count` hash functions over each text's runs. [K, D]"""
    texts = len(bounds) - 1
    found = np.full((count, texts), np.iinfo(np.uint32).max, np.uint32)
    masks, factors = _functions(count, seed)
    for begin in range(0, len(runs), STEP):
        end = min(begin + STEP, len(runs))
        first = int(np.searchsorted(bounds, begin, "right")) - 1
        last = int(np.searchsorted(bounds, end, "left"))
        here = np.maximum(bounds[first:last] - begin, 0)
        filled = np.flatnonzero(np.minimum(bounds[first + 1 : last + 1], end) > np.maximum(bounds[first:last], begin))
        piece, starts = runs[begin:end], here[filled]
        for number in range(count):
            values = (piece ^ masks[number]) * factors[number]
            values ^= values >> np.uint32(15)
            values *= FINAL
            least = np.minimum.reduceat(values, starts)
            found[number, first + filled] = np.minimum(found[number, first + filled], least)
    return found


FINAL = np.uint32(0x2C1B3C6D)


def _functions(count: int, seed: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Hash functions as bijections of 32-bit numbers, each defined by a mask and an odd factor."""
    drawn = mixed(np.arange(1, 2 * count + 1, dtype=np.uint64) + mixed(np.array([seed], np.uint64)))
    high = (drawn >> np.uint64(32)).astype(np.uint32)
    return high[:count], high[count:] | np.uint32(1)


def run_set(words: Words, shingle: int) -> Numbers:
    """The distinct runs of a single text, sorted."""
    return np.unique(words.runs(shingle)[0])


def jaccard(one: Numbers, other: Numbers) -> float:
    """Jaccard similarity of two sorted sets: size of the intersection divided by size of the union."""
    if not len(one) or not len(other):
        return 0.0
    if len(one) > len(other):
        one, other = other, one
    places = np.minimum(np.searchsorted(other, one), len(other) - 1)
    common = int((other[places] == one).sum())
    return common / (len(one) + len(other) - common)
