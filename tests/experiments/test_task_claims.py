"""One holder at a time, whoever dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fathom.errors import TrainingError
from fathom.experiments.task_claims import Claims

_context = multiprocessing.get_context("fork")


def test_taken_once_until_released(tmp_path: Path):
    mine, theirs = Claims(tmp_path), Claims(tmp_path)
    with mine.take("run"):
        assert theirs.take("run") is None
        with theirs.take("run.with.dots"):
            assert mine.take("run.with.dots") is None
    assert theirs.take("run") is not None


def _hold(directory: Path) -> None:
    with Claims(directory).take("run"):
        (directory / "held").touch()
        time.sleep(60)


def test_the_dead_are_succeeded_at_once(tmp_path: Path):
    process = _context.Process(target=_hold, args=(tmp_path,), daemon=True)
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.02)
    assert Claims(tmp_path).take("run") is None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with Claims(tmp_path).take("run") as claim:
        claim.require()


def test_silence_is_succeeded_and_noticed(tmp_path: Path):
    silent = Claims(tmp_path).take("run")  # its heart never beats: it was not entered
    patient = Claims(tmp_path, stale_seconds=0.1)
    assert patient.take("run") is None
    time.sleep(0.2)
    assert patient.take("run") is not None
    assert silent.lost
    with pytest.raises(TrainingError, match="took over"):
        silent.require()


@pytest.mark.parametrize("left", ["", '{"pid": 1', "[]"])
def test_a_claim_that_a_power_cut_left_empty_is_succeeded(tmp_path: Path, left: str):
    """It names nobody: free once it was silent for as long as a dead worker on another machine."""
    (tmp_path / "run.0").write_text(left)
    patient = Claims(tmp_path, stale_seconds=0.1)
    assert patient.take("run") is None
    time.sleep(0.2)
    with patient.take("run") as claim:
        claim.require()


def _race(directory: Path, number: int, barrier: Any) -> None:
    claims = Claims(directory)
    barrier.wait()
    for task in range(20):
        if claims.take(f"task-{task}") is not None:
            (directory / f"won-{task}-{number}").touch()
    barrier.wait()  # alive until all have tried, or a claim would be free again


def test_a_race_has_one_winner(tmp_path: Path):
    barrier = _context.Barrier(4)
    team = [_context.Process(target=_race, args=(tmp_path, i, barrier)) for i in range(4)]
    for process in team:
        process.start()
    for process in team:
        process.join(120)
    assert len(list(tmp_path.glob("won-*"))) == 20
