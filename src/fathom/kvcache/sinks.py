"""StreamingLLM (arXiv 2309.17453): attention sinks and the last tokens, at positions inside the memory.

Beyond the window one entry goes per token, so a prompt is read token by token there; `kept` below N − S − 1 lets
several go at once and reads that many at once.
"""

from __future__ import annotations

from .drop import Drop
from .schedule import RATIO, Schedule, whole_numbers


class Sinks(Drop):
    """S sinks and the last N − S tokens. It has no `ratio`, so one of one's own is refused."""

    name = "sinks"
    has_ratio = False

    @classmethod
    def plan(cls, window: int, sinks: int, ratio: float, kept: int | None) -> Schedule:
        """One token per compression unless `kept` says otherwise."""
        if ratio != RATIO:
            raise ValueError(f"ratio={ratio}: sinks lets one token go at a time; give kept for several at once")
        whole_numbers(window=window, sinks=sinks)
        return Schedule(window, sinks, window - sinks - 1 if kept is None else kept)
