"""Dropping entries on FreqKV's schedule: the control that shows whether compression matters.

    C = [0 | I_L]         sinks and the last L, StreamingLLM with hysteresis

The kept entries already have their new positions, so a compression is a slice, and only the sinks move.
"""

from __future__ import annotations

from torch import Tensor

from .method import Held, Method


class Drop(Method):
    """Keeps the sinks and the last L entries, and drops the others."""

    name = "drop"

    def condense(self, held: Held) -> tuple[Tensor, Tensor]:
        """The last L entries."""
        return held.keys[:, :, -self.schedule.kept :], held.values[:, :, -self.schedule.kept :]
