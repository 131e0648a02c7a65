"""A progress bar for work longer than two seconds, drawn on a terminal only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress

PATIENCE_SECONDS = 2.0


class ProgressBar:
    """A bar on standard error, silent for the first two seconds and wherever standard error is not a terminal."""

    def __init__(self, description: str, total: int | None) -> None:
        self.description = description
        self.total = total
        self._started = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def update(self, completed: int, note: str = "", description: str | None = None) -> None:
        """Move the bar to `completed` of the total; `note` is shown at its end."""
        self.description = description or self.description
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._started < PATIENCE_SECONDS:
                return
            self._draw()
        assert self._bar is not None and self._task is not None
        self._bar.update(self._task, completed=completed, note=note, description=self.description)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self.description, total=self.total, note="")
        self._bar.start()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
