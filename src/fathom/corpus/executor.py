"""Executors of a stage's tasks: processes of this machine, or datatrove's schedulers.

An executor gets the directory of a corpus, a stage and the numbers of tasks in the plan file there. Tasks write their
results to disk, so nothing is returned, and the results do not depend on the executor.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fathom.checkpoints.layout import PLAN
from fathom.corpus.recipe import Executor
from fathom.corpus.remote import remote, require_scheduler
from fathom.corpus.stage import Task, WorkspaceOf
from fathom.corpus.worker import carry_out
from fathom.errors import DataError
from fathom.report.files import write_json

# Python started with -c imports modules from the working directory first, so a user's file could shadow one of ours.
WORKER = """
import sys
sys.path[:] = [path for path in sys.path if path]
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fathom.corpus.worker import serve
serve()
"""
ATTEMPTS = 2
POOL_BYTES = 1 << 23
"""Less input than this is processed faster than a pool or a scheduler's job can be started."""

Tick = Callable[[], None]
Executing = Callable[[WorkspaceOf[Any], str, Sequence[Task], Tick], None]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_plan(workspace: WorkspaceOf[Any], stage: str, tasks: Sequence[Task]) -> None:
    """Write the tasks to the plan file, from which workers read them."""
    place = workspace.stage(stage)
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / PLAN, {"recipe": workspace.recipe, "tasks": tasks})


@contextmanager
def executing(wanted: Executor) -> Iterator[Executing]:
    """The executor that a recipe asks for; its processes end with the block."""
    if wanted.name != "local":
        require_scheduler(wanted.name)
        yield partial(_spread, wanted)
        return
    pool = Pool(wanted.workers or cores())
    try:
        yield pool
    finally:
        pool.stop()


def _is_small(tasks: Sequence[Task]) -> bool:
    return sum(one.bytes for task in tasks for one in task.inputs) < POOL_BYTES


def _here(workspace: WorkspaceOf[Any], stage: str, tasks: Sequence[Task], tick: Tick) -> None:
    """Run all tasks of a stage's plan in this process."""
    for number in range(len(tasks)):
        carry_out(str(workspace.directory), stage, [number])
        tick()


def _spread(wanted: Executor, workspace: WorkspaceOf[Any], stage: str, tasks: Sequence[Task], tick: Tick) -> None:
    """Run small stages in this process and others on the scheduler, whose jobs take longer to start."""
    if _is_small(tasks):
        _here(workspace, stage, tasks, tick)
    else:
        remote(wanted, workspace.directory.absolute(), stage, tasks, tick)


class Pool:
    """Processes of this machine. Small stages, or all stages with one worker, run in this process.

    A thread passes tasks to each process; processes are kept for later stages.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._directory, self._stage, self._tick = "", "", _nothing
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._idle: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()

    def __call__(self, workspace: WorkspaceOf[Any], stage: str, tasks: Sequence[Task], tick: Tick) -> None:
        """Run all tasks of a stage's plan."""
        workers = min(self._workers, len(tasks))
        if workers <= 1 or _is_small(tasks):
            _here(workspace, stage, tasks, tick)
            return
        self.run(str(workspace.directory), stage, len(tasks), workers, tick)

    def run(self, directory: str, stage: str, count: int, workers: int, tick: Tick) -> None:
        """Run tasks on a number of processes."""
        self._directory, self._stage, self._tick = directory, stage, tick
        for number in range(count):
            self._todo.put(number)
        threads = [threading.Thread(target=self._thread, daemon=True) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.1)
        except BaseException as error:
            self._failure = error
        if self._failure is not None:
            self.stop()
            raise self._failure

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def _thread(self) -> None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        try:
            while self._failure is None:
                try:
                    number = self._todo.get_nowait()
                except queue.Empty:
                    return
                process = self._do(number, process)
                with self._lock:
                    self._tick()
        except BaseException as error:
            self._failure = self._failure or error
            process = None
        finally:
            if process is not None:
                with self._lock:
                    self._idle.append(process)

    def _do(self, number: int, process: subprocess.Popen[str] | None) -> subprocess.Popen[str]:
        """Run a task in a process, and once more in a new process if the first one dies."""
        for _ in range(ATTEMPTS):
            process = process or self._start()
            answer = _ask(process, [self._directory, self._stage, number])
            if answer is None:
                status = process.wait()
                process = None
                if self._failure is not None:
                    break
                continue
            if "bug" in answer:
                raise RuntimeError(f"task {number} of {self._stage}:\n{answer['bug']}")
            if "error" in answer:
                raise DataError(answer["error"], int(answer["code"]))
            return process
        raise DataError(
            f"{self._stage}: the process that did task {number} died twice (exit status {status}); run the same "
            "command to resume",
            1,
        )

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        with self._lock:
            self._processes.append(process)
        return process


def _nothing() -> None:
    """The `tick` of a pool that is not running."""


def _ask(process: subprocess.Popen[str], request: list[str | int]) -> dict[str, str] | None:
    """Send one line to a worker and read its reply; None if it died."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except (BrokenPipeError, OSError):
        return None
    answer: dict[str, str] | None = json.loads(line) if line.endswith("\n") else None
    return answer
