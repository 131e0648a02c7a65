"""Expected attention (arXiv 2510.00636): keep the entries that future queries will attend to if those resemble past
queries. The score is:

    score = softmax(k · R̄μ + ½ kᵀ R̄ΣR̄ᵀ k) · ‖v‖     mean over the queries that share a key head

μ and Σ are the mean and covariance of the scaled, unrotated queries since the last compression, without those of the
sinks. R̄ is the mean rotation of the next `future` positions. Only the sum of the queries and the sum of their products
are stored: (D + 1)² numbers per head for any number of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fathom.models.axes.numerics import widen

from .method import UNSEEN, Held, Selection
from .rope import Rope, Still
from .schedule import Schedule


class ExpectedAttention(Selection):
    """Keeps the entries with the highest expected attention from queries at the next `future` positions."""

    name = "expected_attention"
    observed = 1

    def __init__(self, schedule: Schedule, rope: Rope, future: int = 512) -> None:
        super().__init__(schedule, rope)
        self.future = future
        if future < 1:
            raise ValueError(f"future must be at least 1, got {future}")

    def note(self, known: Tensor | None, queries: Tensor, start: int, rotation: Still) -> Tensor:
        """The running sum of the queries' outer products Σ [q; 1][q; 1]ᵀ, `[B, H, D + 1, D + 1]`."""
        bare = rotation.turn(widen(queries), -start, -1)[:, :, max(0, self.schedule.sinks - start) :]
        bare = F.pad(bare, (0, 1), value=1.0)
        sums = bare.mT @ bare
        return sums if known is None else known + sums

    def scores(self, held: Held) -> Tensor:
        """`[B, H_kv, N]`."""
        if held.queries is None:
            raise ValueError(UNSEEN)
        sinks, rotation, sums = self.schedule.sinks, self.rotation(held), held.queries
        count = sums[..., -1:, -1:]
        mean = sums[..., -1:, :-1] / count  # [B, H, 1, D]
        spread = sums[..., :-1, :-1] / count - mean.mT @ mean  # [B, H, D, D]
        start = self.schedule.window

        def ahead(x: Tensor) -> Tensor:
            return rotation.turn_mean(x, start, self.future)

        mean, spread = ahead(mean), ahead(ahead(spread).mT)
        keys = held.keys[:, :, sinks:]  # [B, H_kv, M, D]
        mean, spread = (x.to(keys.dtype).unflatten(1, (keys.shape[1], -1)) for x in (mean, spread))  # G heads each
        mixed = (keys @ spread.transpose(2, 3).flatten(3)).unflatten(-1, (-1, keys.shape[-1]))  # [B, H_kv, M, G, D]
        looks = keys @ mean.squeeze(3).mT + (mixed @ keys.unsqueeze(-1)).squeeze(-1) / 2  # [B, H_kv, M, G]
        scores = looks.softmax(-2).mean(-1) * held.values[:, :, sinks:].norm(dim=-1)
        return F.pad(scores, (sinks, 0), value=torch.inf)
