"""StreamingLLM (arXiv 2309.17453): keep the attention sinks and the last tokens, with positions counted inside the
memory.

Beyond the window each token evicts one entry, so a prompt is read token by token there. With `kept` below N − S − 1,
several entries are evicted at once, and the same number of tokens is read at once (`freed` in `schedule.py`).
"""

from __future__ import annotations

from .drop import Drop
from .schedule import RATIO, Schedule, whole_numbers


class Sinks(Drop):
    """Keeps the S sinks and the last N − S tokens. `ratio` does not apply, so only its default is accepted."""

    name = "sinks"
    has_ratio = False

    @classmethod
    def schedule_for(cls, window: int, sinks: int, ratio: float, kept: int | None) -> Schedule:
        """A schedule that removes one token per compression, unless `kept` is given."""
        if ratio != RATIO:
            raise ValueError(f"ratio={ratio}: method sinks removes one entry at a time; to remove several, give kept")
        whole_numbers(window=window, sinks=sinks)
        return Schedule(window, sinks, window - sinks - 1 if kept is None else kept)
