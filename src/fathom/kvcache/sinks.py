"""StreamingLLM (arXiv 2309.17453): attention sinks and the last tokens, at positions inside the memory.

Beyond the window one entry goes per token, so a prompt is read token by token there; `kept` below N − S − 1 lets
several go at once and reads that many at once.
"""

from __future__ import annotations

from .drop import Drop
from .schedule import Schedule


class Sinks(Drop):
    """S sinks and the last N − S tokens; `ratio` does not apply to it."""

    name = "sinks"

    @classmethod
    def plan(cls, window: int, sinks: int, ratio: float, kept: int | None) -> Schedule:
        """One token per round unless `kept` says otherwise."""
        return Schedule(window, sinks, window - sinks - 1 if kept is None else kept)
