"""Executors of a stage's tasks: processes of this machine, or datatrove's schedulers.

An executor gets the directory of a corpus, a stage and the numbers of tasks in the plan file there. Tasks write their
results to disk, so nothing is returned, and the results do not depend on the executor.
"""

from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fathom.checkpoints.layout import PLAN
from fathom.corpus.children import ask, started
from fathom.corpus.recipe import Executor
from fathom.corpus.remote import remote, require_scheduler
from fathom.corpus.stage import Task, WorkspaceOf
from fathom.corpus.worker import carry_out
from fathom.errors import DataError
from fathom.report.files import write_json

WORKER = """
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
        carry_out(workspace.directory, stage, number)
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
        for number in range(count):
            self._todo.put(number)
        arguments = directory, stage, tick
        threads = [threading.Thread(target=self._thread, args=arguments, daemon=True) for _ in range(workers)]
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

    def _thread(self, directory: str, stage: str, tick: Tick) -> None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        try:
            while self._failure is None:
                try:
                    number = self._todo.get_nowait()
                except queue.Empty:
                    return
                process = self._do([directory, stage, number], process)
                with self._lock:
                    tick()
        except BaseException as error:
            self._failure = self._failure or error
            process = None
        finally:
            if process is not None:
                with self._lock:
                    self._idle.append(process)

    def _do(self, task: list[str | int], process: subprocess.Popen[str] | None) -> subprocess.Popen[str]:
        """Run a task in a process, and once more in a new process if the first one dies."""
        _, stage, number = task
        for _ in range(ATTEMPTS):
            process = process or self._start()
            answer = ask(process, task)
            if answer is None:
                status = process.wait()
                process = None
                if self._failure is not None:
                    break
                continue
            if "bug" in answer:
                raise RuntimeError(f"task {number} of {stage}:\n{answer['bug']}")
            if "error" in answer:
                raise DataError(answer["error"], int(answer["code"]))
            return process
        raise DataError(
            f"{stage}: the process that did task {number} died twice (exit status {status}); run the same "
            "command to resume",
            1,
        )

    def _start(self) -> subprocess.Popen[str]:
        process = started(WORKER)
        with self._lock:
            self._processes.append(process)
        return process
