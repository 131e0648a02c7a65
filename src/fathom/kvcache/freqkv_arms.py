"""The ablations of the FreqKV paper: three methods, each of which differs from `freqkv` in one choice. The methods are:

    freqkv_high         D_Lᵀ D_M[M − L:] √(L/M)     keep the highest frequencies
    freqkv_unscaled     D_Lᵀ D_M[:L]                no factor √(L/M): every compression amplifies a constant by √(M/L)
    freqkv_after_rope   C of rotated keys           compress keys as attention sees them, not at position 0

After RoPE, an entry's keys are mixed as they are rotated at the entries' positions 0, 1, …, and the result stays as it
is: it moves only with the frame of the memory, by the F positions that the compression frees.
"""

from __future__ import annotations

import math

from torch import Tensor

from .freqkv import FreqKV, dct, dct_matrix
from .method import Held


class HighBand(FreqKV):
    """Keeps the highest L of M frequencies instead of the lowest."""

    name = "freqkv_high"

    @staticmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """Rows `i` of the compression matrix, `[rows, M]`, in float64."""
        return math.sqrt(kept / compressed) * dct_matrix(kept)[:, i].T @ dct_matrix(compressed)[-kept:]

    def spectrum(self, x: Tensor) -> Tensor:
        """The last L coefficients."""
        return dct(x)[..., -self.schedule.kept :, :]


class Unscaled(FreqKV):
    """`freqkv` without the factor √(L/M), which keeps a constant signal unchanged."""

    name = "freqkv_unscaled"

    @staticmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """Rows `i` of the compression matrix, `[rows, M]`, in float64."""
        return math.sqrt(compressed / kept) * FreqKV.rows(i, kept, compressed)

    @property
    def factor(self) -> float:
        """None."""
        return 1.0


class AfterRope(FreqKV):
    """`freqkv` of rotated keys."""

    name = "freqkv_after_rope"

    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """Mix keys without undoing their rotation, and mix values with the same matrix."""
        sinks, rotation = self.schedule.sinks, self.rotation(held)
        keys = rotation.turn(self.reduce(held.keys[:, :, sinks:]), self.schedule.freed, 0)
        return keys, self.reduce(held.values[:, :, sinks:])
