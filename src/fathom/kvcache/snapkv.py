"""SnapKV (arXiv 2404.14469) on a rolling memory: keep the entries that the last w queries attend to, and the last w.

votes = max-pool over neighbours of  Σ_w softmax(q · k)      mean over the queries that share a key head
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .method import Selection
from .rope import Rope
from .schedule import Schedule


class SnapKV(Selection):
    """The entries with the most votes from the last `observed` queries, smoothed over `kernel` neighbours."""

    name = "snapkv"

    def __init__(self, schedule: Schedule, rope: Rope, observed: int | None = None, kernel: int = 7) -> None:
        super().__init__(schedule, rope)
        most = min(schedule.freed, schedule.kept)
        self.observed = max(1, min(32, most // 2)) if observed is None else observed
        self.kernel = kernel
        if not 1 <= self.observed <= most:
            raise ValueError(f"observed must be 1 to {most} with this schedule, got {self.observed}")
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {kernel}")

    def scores(self, keys: Tensor, queries: Tensor | None) -> Tensor:
        """`[B, H_kv, N]`."""
        if queries is None or queries.shape[2] != self.observed:
            raise RuntimeError("snapkv has not seen the last queries: build the cache from the model that is run")
        heads, n = keys.shape[1:3]
        grouped = queries.detach().to(keys.dtype).unflatten(1, (heads, -1))  # [B, H_kv, G, w, D]
        looks = grouped @ keys.unsqueeze(2).mT  # [B, H_kv, G, w, N]
        future = torch.ones(self.observed, n, dtype=torch.bool, device=keys.device).triu(n - self.observed + 1)
        votes = looks.masked_fill(future, -torch.inf).softmax(-1).sum(-2).mean(2)  # [B, H_kv, N]
        votes = F.max_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        votes[..., -self.observed :] = torch.inf
        return votes
