"""A run in which something happens at a step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from fathom.training import Hook


class At(Hook):
    """Calls a function once the loss of a step is logged."""

    def __init__(self, step: int, function: Callable[[], None]) -> None:
        self.step, self.function = step, function

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.step and "loss" in values:
            self.function()


class StopAt(At):
    """Sends this process a signal once a step is logged."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(step, lambda: signal.raise_signal(number))
