"""TOVA (arXiv 2401.06104): keep what the last query attends to, averaged over all heads, and the last entry."""

from __future__ import annotations

import torch
from torch import Tensor

from .method import Held, Selection


class Tova(Selection):
    """One choice for all heads of a layer."""

    name = "tova"
    observed = 1

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        scores = held.attention().mean((1, 2))  # [B, 1, N]
        scores[..., -1] = torch.inf
        return scores.expand(-1, held.keys.shape[1], -1)
