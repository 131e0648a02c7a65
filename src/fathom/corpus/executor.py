"""Executors, which run a stage's tasks: in processes on this machine, or through datatrove's schedulers.

An executor gets the directory of a corpus, a stage and the numbers of tasks in the plan file there. Tasks write their
results to disk, so nothing is returned, and the results do not depend on the executor.

`stage.py` writes a task's record, with the SHA-256 of its files. `recipe.py` (`Executor`) has the options. `remote.py`
schedules through datatrove. Inputs are hashed while `ingest.py` lists its tasks, and the stage `duplicates` is one
task, so both run on one machine.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

from fathom.checkpoints.file_names import PLAN
from fathom.corpus.children import ask, started
from fathom.corpus.recipe import Executor
from fathom.corpus.remote import require_scheduler, schedule
from fathom.corpus.stage import Task, WorkspaceOf
from fathom.corpus.worker import carry_out, rank
from fathom.errors import DataError
from fathom.report.files import write_json
from fathom.report.provenance import cores

WORKER = """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
from fathom.corpus.worker import serve
serve()
"""
POOL_BYTES = 1 << 23
"""Less input than this is processed faster than a pool or a scheduler's job can be started."""

Tick = Callable[[], None]
Executing = Callable[[WorkspaceOf[Any], str, Sequence[Task], Tick], None]


def write_plan(workspace: WorkspaceOf[Any], stage: str, tasks: Sequence[Task]) -> None:
    """Write the tasks to the plan file, from which workers read them."""
    place = workspace.stage(stage)
    place.mkdir(parents=True, exist_ok=True)
    write_json(place / PLAN, {"recipe": workspace.recipe, "tasks": tasks})


@contextmanager
def executing(wanted: Executor) -> Iterator[Executing]:
    """The executor that a recipe asks for, as a context manager; its worker processes end with the `with` block."""
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
    """Run a small stage in this process and any other stage on the scheduler, whose jobs take longer to start."""
    if _is_small(tasks):
        _here(workspace, stage, tasks, tick)
        return
    place = workspace.directory.absolute()
    schedule(wanted, partial(rank, str(place), stage), len(tasks), place / "logs" / stage, stage)
    for _ in tasks:
        tick()


class Pool:
    """Processes of this machine. Small stages, or all stages with one worker, run in this process.

    Threads pass the tasks on, each to an idle process or a new one; processes are kept for later stages.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._stopped = False
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
        """Run `count` tasks on `workers` processes."""
        with ThreadPoolExecutor(workers) as threads:
            jobs = [threads.submit(self._do, directory, stage, number) for number in range(count)]
            try:
                for job in as_completed(jobs):
                    job.result()
                    tick()
            except BaseException:
                self.stop()
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def stop(self) -> None:
        """End all worker processes, and start no new ones."""
        with self._lock:
            self._stopped = True
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()

    def _do(self, directory: str, stage: str, number: int) -> None:
        """Run a task in a process, and once more in a new process if the first one dies."""
        for fresh in (False, True):
            process = self._process(fresh)
            answer = ask(process, [directory, stage, number])
            if answer is None:
                status = process.wait()
                continue
            self._idle.append(process)
            if "bug" in answer:
                raise RuntimeError(f"task {number} of {stage}:\n{answer['bug']}")
            if "error" in answer:
                raise DataError(answer["error"], int(answer["code"]))
            return
        raise DataError(
            f"{stage}: the process that did task {number} died twice (exit status {status}); run the same "
            "command to resume",
            1,
        )

    def _process(self, fresh: bool) -> subprocess.Popen[str]:
        """An idle worker process if there is one, else a new worker process."""
        with self._lock:
            if self._stopped:
                raise DataError("stopped", 1)
            if self._idle and not fresh:
                return self._idle.pop()
            self._processes.append(started(WORKER))
            return self._processes[-1]
