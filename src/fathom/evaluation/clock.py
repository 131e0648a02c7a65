"""A clock for work on a device.

It times training steps (`timing.py` and `dry_run.py` in `experiments`) and decoding (`deepened.py` and `caches/`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """A clock of CPU time if one thread does all the work, so that other load does not count; else of wall time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        alone = not self.cuda and torch.get_num_threads() == 1
        self.words = "thread CPU time" if alone else "wall time"
        """Which clock it is."""
        self.now: Callable[[], float] = time.thread_time if alone else time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds that a piece of work takes, the device's part included."""
        self._wait()
        began = self.now()
        work()
        self._wait()
        return self.now() - began

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
