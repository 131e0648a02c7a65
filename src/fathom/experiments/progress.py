"""Progress of a comparison, read from its directory, so it includes the work of other processes and machines."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.experiments.arms import training_flops
from fathom.experiments.plan import Plan, tasks
from fathom.report.tables import terminal_table
from fathom.training.results import held_out
from fathom.training.tracking import METRICS, duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

REFRESH_SECONDS = 1.0
TAIL_BYTES = 4096


class Progress:
    """A live table on a terminal, a line per finished run elsewhere; shown on standard error."""

    def __init__(self, plan: Plan, out: Path, quiet: bool = False) -> None:

        self.plan, self.quiet = plan, quiet
        self.tasks = tasks(plan, out)
        self.steps = {arm: recipe.train.steps for arm, recipe in plan.recipes.items()}
        self.flops = {arm: training_flops(recipe) for arm, recipe in plan.recipes.items()}
        self.shares = [0.0] * len(self.tasks)
        self.losses: list[float | None] = [None] * len(self.tasks)
        self.left_out = [""] * len(self.tasks)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        self._look()
        self._began, self._before = time.monotonic(), self._work_done()
        self._live: Live | None = None
        if not self.quiet:
            if sys.stderr.isatty():
                from rich.console import Console
                from rich.live import Live

                self._live = Live(self._table(), console=Console(stderr=True), refresh_per_second=2)
                self._live.start()
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _watch(self) -> None:
        more = True
        while more:
            more = not self._done.wait(REFRESH_SECONDS)
            before = list(self.shares)
            self._look()
            if self._live is not None:
                self._live.update(self._table())
                continue
            for i, task in enumerate(self.tasks):
                if self.shares[i] == 1 and before[i] < 1:
                    done = f"{sum(share == 1 for share in self.shares)} of {len(self.tasks)} done{self._time_left()}"
                    print(f"{task.name}{self._result(i)}  ({done})", file=sys.stderr, flush=True)

    def _look(self) -> None:
        for i, task in enumerate(self.tasks):
            if self.shares[i] == 1:
                continue
            if task.done:
                self.shares[i] = 1.0
                if task.seed is not None:
                    self.losses[i] = held_out(task.run_dir).loss
            elif task.settled:
                failure = task.failure
                self.shares[i] = 1.0
                self.left_out[i] = "its control failed" if failure is None else f"failed at step {failure.step}"
            elif task.seed is not None:
                self.shares[i] = min(_last_step(task.run_dir) / self.steps[task.arm], 0.99)

    def _result(self, i: int) -> str:
        loss = self.losses[i]
        if self.left_out[i]:
            return f": {self.left_out[i]}, excluded"
        return "" if loss is None else f": held-out loss {loss:.4f}"

    def _work_done(self) -> float:
        return sum(
            share * self.flops[task.arm]
            for share, task in zip(self.shares, self.tasks, strict=True)
            if task.seed is not None
        )

    def _time_left(self) -> str:
        done = self._work_done() - self._before
        total = sum(self.flops[task.arm] for task in self.tasks if task.seed is not None)
        if done <= 0 or self._work_done() >= total:
            return ""
        return f", {duration((time.monotonic() - self._began) * (total - self._work_done()) / done)} left"

    def _table(self) -> Table:
        plan = self.plan
        columns = ["arm", *(f"seed {seed}" for seed in plan.seeds), *(["timing"] if plan.pairs else [])]
        rows: list[list[str | Text]] = []
        for arm in plan.arms:
            mine = [i for i, task in enumerate(self.tasks) if task.arm == arm.name]
            rows.append([arm.name, *(self._cell(i) for i in mine)])
        return terminal_table(f"held-out loss{self._time_left()}", columns, rows, left=len(columns))

    def _cell(self, i: int) -> Text:
        from rich.text import Text

        loss, share = self.losses[i], self.shares[i]
        if loss is not None:
            return Text(f"{loss:.4f}", "bold")
        if self.left_out[i]:
            return Text(self.left_out[i], "red")
        if share == 1:
            return Text("done")
        return Text(f"{100 * share:.0f} %", "cyan") if share else Text("waiting", "dim")


def _last_step(run_dir: Path) -> int:
    """The step of the last whole line of a run's metrics."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
