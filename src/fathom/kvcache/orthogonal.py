"""A random orthogonal basis of the same rank: the control that shows whether FreqKV gains from low frequencies.

    C = √(L/M) · D_Lᵀ · Q,      Q = the mean and L − 1 random directions, all orthogonal

D_L is FreqKV's. As there, constants are fixed points and C Cᵀ = (L/M) I. The directions are a DCT of the other
frequencies in random order and with random signs, so no matrix is needed.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .freqkv import dct, inverse_dct
from .method import Linear
from .rope import Rope
from .schedule import Schedule


class Orthogonal(Linear):
    """Projects entries on an orthonormal basis: the mean, and L − 1 random directions drawn from `seed`."""

    name = "orthogonal"

    def __init__(self, schedule: Schedule, rope: Rope, seed: int = 0) -> None:
        super().__init__(schedule, rope)
        self.seed = seed

    def reduce(self, x: Tensor) -> Tensor:
        """C x."""
        kept, compressed = self.schedule.kept, self.schedule.compressed
        order, signs = (part.to(x.device) for part in drawn(compressed - 1, self.seed))
        spectrum = dct(x)
        others = spectrum[..., 1:, :][..., order, :] * signs.to(x.dtype).unsqueeze(-1)
        mixed = dct(others, kept - 1) if kept > 1 else others[..., :0, :]
        return inverse_dct(torch.cat([spectrum[..., :1, :], mixed], dim=-2)) * math.sqrt(kept / compressed)


@lru_cache(maxsize=8)
def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random order of `count` frequencies, and a random sign for each."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    return order, torch.randint(0, 2, (count,), generator=generator) * 2 - 1
