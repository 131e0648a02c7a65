"""The queue of an experiment's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from fathom.experiments.scheduler import Task, work_off
from fathom.experiments.task_claims import Claim


@dataclass(frozen=True)
class Quick(Task):
    """A task that is done as soon as its file is there."""

    timed: ClassVar = True

    @property
    def done(self) -> bool:
        return self.run_dir.exists()

    @property
    def failure(self) -> None:
        return None


def test_the_count_includes_what_other_workers_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line says that all are done, though another worker took the last task while this one was at work."""
    tasks = [Quick(tmp_path, tmp_path / f"run-{number}", "arm", number, lambda: None) for number in range(4)]

    def do(stage: str, task: Task, claim: Claim) -> bool:
        task.run_dir.touch()
        if task is tasks[2]:
            tasks[3].run_dir.touch()  # by the other one
        return True

    assert work_off(tmp_path, lambda: ("", tasks), do, quiet=False)
    counts = [line.partition("(")[2] for line in capsys.readouterr().err.splitlines()]
    assert counts == ["1 of 4)", "2 of 4)", "4 of 4)"]
