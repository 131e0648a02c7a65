"""Random draws that rounding seldom changes: Gumbel-max with noise from a counter-based generator.

Token t with weight w wins where w / E is largest, and E is exponential noise that belongs to (seed, choice, position,
t). Its probability is w over the sum of all weights. Rounding of the weights then changes a draw only where the two
best tokens nearly tie. A lookup in the running sum of the weights moves every boundary behind a weight that is rounded.

The noise is NumPy's Philox, which is a pure function of its key and counter. A draw takes two steps, so that the noise
for a vocabulary of 150,000 tokens costs little: a block of tokens by its summed weight, then a token of that block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

BLOCK = 512
"""Tokens of a block."""
MODULUS = 1 << 64


@dataclass(frozen=True)
class Source:
    """The noise of one text."""

    seed: int
    index: int = 0
    """Which of several texts for one prompt."""

    def uniforms(self, position: int, count: int) -> np.ndarray:
        """`[count]` numbers in (0, 1) for one draw; a larger `count` begins with the same numbers."""
        key = np.array([self.seed % MODULUS, self.index % MODULUS], np.uint64)
        counter = np.array([0, position, 0, 0], np.uint64)
        raw = Philox(key=key, counter=counter).random_raw(count)
        return ((raw >> np.uint64(12)) + 0.5) * 2.0**-52  # the upper 52 bits, so neither 0 nor 1

    def draw(self, weights: Tensor, position: int) -> int:
        """An index of `weights` `[V]` (non-negative), with probability proportional to its weight."""
        whole = len(weights) // BLOCK * BLOCK
        sums = weights[:whole].view(-1, BLOCK).sum(1)
        if whole < len(weights):
            sums = torch.cat((sums, weights[whole:].sum()[None]))
        noise = -np.log(self.uniforms(position, len(sums) + BLOCK))
        first = BLOCK * _best(sums, noise[BLOCK:])
        return first + _best(weights[first : first + BLOCK], noise[:BLOCK])


def _best(weights: Tensor, noise: np.ndarray) -> int:
    there = weights.double().cpu().numpy()
    return int((there / noise[: len(there)]).argmax())
