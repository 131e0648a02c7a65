"""A clock for work on a device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


class Clock:
    """Time of the thread where it does all the work, so that a busy machine does not count; else of the wall."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        alone = not self.cuda and torch.get_num_threads() == 1
        self.words = "thread CPU time" if alone else "wall time"
        """Which clock it is."""
        self.now: Callable[[], float] = time.thread_time if alone else time.perf_counter

    def seconds(self, work: Callable[[], object]) -> float:
        """How long it takes, the device's part included."""
        self._wait()
        began = self.now()
        work()
        self._wait()
        return self.now() - began

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
