"""TOVA (arXiv 2401.06104): keep the last entry and those that the last query attends to most, averaged over all
heads.

`Selection.choose` in `method.py` chooses the entries that stay, by their scores (`scores`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .method import Held, Selection


class Tova(Selection):
    """Keeps the entries that the last query attends to most; all heads of a layer keep the same entries."""

    name = "tova"
    observed = 1

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        scores = held.attention().mean((1, 2))  # [B, 1, N]
        scores[..., -1] = torch.inf
        return scores.expand(-1, held.keys.shape[1], -1)
