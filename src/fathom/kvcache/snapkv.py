"""SnapKV (arXiv 2404.14469) on a rolling memory: keep the last w entries, and those that their queries attend to most.
The votes are:

votes = mean-pool over neighbours of  mean over w of softmax(q · k)      of the N − w entries before the observed ones;
                                                                      mean over the queries that share a key head

`Selection.choose` in `method.py` chooses the entries that stay, by their scores (`scores`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .method import UNSEEN, Held, Selection
from .rope import Rope
from .schedule import Schedule


class SnapKV(Selection):
    """Keeps the entries with the most votes from the last `observed` queries, smoothed over `kernel` neighbours."""

    name = "snapkv"

    def __init__(self, schedule: Schedule, rope: Rope, observed: int | None = None, kernel: int = 5) -> None:
        super().__init__(schedule, rope)
        most = min(schedule.freed, schedule.kept)
        self.observed = max(1, min(64, most // 2)) if observed is None else observed
        self.kernel = kernel
        if not 1 <= self.observed <= most:
            raise ValueError(f"observed must be 1 to {most} with this schedule, got {self.observed}")
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {kernel}")

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        if held.queries is None or held.queries.shape[2] != self.observed:
            raise ValueError(UNSEEN)
        votes = held.attention().mean((2, 3))[..., : -self.observed]  # [B, H_kv, N − w]
        votes = F.avg_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        return F.pad(votes, (0, self.observed), value=torch.inf)
