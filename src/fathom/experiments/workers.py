"""The worker processes of a comparison or ladder: their number, and the threads of each.

`task_claims.py` decides when a worker takes over the run of another worker that has ended or is silent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fathom.corpus.recipe import Executor


@dataclass(frozen=True)
class Team:
    """The worker processes, each of which claims and runs one task after another."""

    workers: int = 1
    """How many, here or on the executor's machines."""
    threads: int | None = None
    """CPU threads of each; None: one if there are several workers or machines, else torch's choice."""
    executor: Executor = field(default_factory=Executor)
    """local, or the scheduler that starts the workers."""


ALONE = Team()
"""One process here."""
