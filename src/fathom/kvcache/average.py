"""Area-weighted means: the simplest low-pass, and the control for whether the DCT matters.

row i of C averages the interval [iM/L, (i+1)M/L), with fractions at its ends
"""

from __future__ import annotations

import torch
from torch import Tensor

from .method import Fixed


class Average(Fixed):
    """Each new entry is the mean of M/L old ones."""

    name = "average"

    @staticmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """The rows `i` of C, `[rows, M]`, in float64."""
        width = compressed / kept
        start = i.double().unsqueeze(1) * width
        m = torch.arange(compressed, dtype=torch.float64)
        overlap = torch.minimum(start + width, m + 1) - torch.maximum(start, m)
        return overlap.clamp(min=0) / width
