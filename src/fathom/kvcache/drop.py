"""Forgetting on FreqKV's schedule: the control for whether compression matters at all.

    C = [0 | I_L]         sinks and the last L, StreamingLLM with hysteresis

The kept entries are at their new positions already, so a compression is a slice, and only the sinks move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .method import Method, Reducer


class Drop(Method):
    """Sinks and the last L entries."""

    name = "drop"

    def reducer(self, keys: Tensor, queries: Tensor | None) -> Reducer:
        """x → the last L entries of x."""
        return lambda x: x[:, :, -self.schedule.kept :]

    def compress(
        self, keys: Tensor, values: Tensor, first: Tensor, compressions: int, queries: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As in the base class, without rotating entries that would be rotated back."""
        last = self.reducer(keys, None)
        return (
            torch.cat([self.move(first, compressions + 1), last(keys)], dim=2),
            torch.cat([values[:, :, : self.schedule.sinks], last(values)], dim=2),
        )
