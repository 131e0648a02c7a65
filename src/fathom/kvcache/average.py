"""Area-weighted means: the simplest low-pass filter, and the control that shows whether FreqKV's DCT matters. The
matrix is:

row i of C averages the interval [iM/L, (i+1)M/L), with fractions at its ends
"""

from __future__ import annotations

import torch
from torch import Tensor

from .matrix import Fixed


class Average(Fixed):
    """Compression by averaging: each new entry is the mean of M/L old ones."""

    name = "average"

    @staticmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """Rows `i` of the compression matrix C, `[rows, M]`, in float64."""
        width = compressed / kept
        start = i.double().unsqueeze(1) * width
        m = torch.arange(compressed, dtype=torch.float64)
        overlap = torch.minimum(start + width, m + 1) - torch.maximum(start, m)
        return overlap.clamp(min=0) / width

    def reduce(self, x: Tensor) -> Tensor:
        """The product C x, computed from the few entries that each row of C reads, without building the matrix."""
        kept, compressed = self.schedule.kept, self.schedule.compressed
        # In units of 1/L, where all ends are whole numbers: row i covers [iM, (i + 1)M), entry m covers [mL, (m + 1)L).
        taps = -(-compressed // kept) + 1
        start = torch.arange(kept, device=x.device).unsqueeze(1) * compressed
        m = start // kept + torch.arange(taps, device=x.device)  # [L, taps]
        overlap = torch.minimum(start + compressed, (m + 1) * kept) - torch.maximum(start, m * kept)
        weights = overlap.clamp(min=0).to(x.dtype) / compressed
        found = x[:, :, m.clamp(max=compressed - 1)]  # [B, H_kv, L, taps, D]
        return (found * weights.unsqueeze(-1)).sum(-2)
