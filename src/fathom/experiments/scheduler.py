"""One scheduler for all experiments: tasks are claimed, run and reported, by any number of processes and machines. A
task is a training run or a measurement; the next tasks are a function of the directory. Claims are in `claims/` of the
task's directory (task_claims.py), so that a ladder and a comparison see the same claims.

`Task.run` writes `failed.json` if a run diverges; `differences.py` leaves such runs out of a comparison's report, and
`stages.py` (`finite_losses`) out of a ladder's losses. `corpus/remote.py` starts workers on Slurm or Ray. `compare.py`
makes all ranks of torchrun take the same tasks.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import ClassVar

import torch

from fathom.checkpoints.file_names import ARMS, CLAIMS, FAILED, MACHINE, RESULT
from fathom.corpus.recipe import Executor
from fathom.corpus.remote import require_scheduler, schedule, slurm_script
from fathom.errors import FathomError, SettingsError, TrainingError
from fathom.experiments.compare_results import Failure
from fathom.experiments.task_claims import Claim, Claims
from fathom.experiments.workers import Team
from fathom.recipe import Recipe
from fathom.report.files import write_json
from fathom.report.progress import ProgressBar
from fathom.report.provenance import hardware
from fathom.report.results import read_result
from fathom.training import Hook, train
from fathom.training.results import held_out

POLL_SECONDS = 1.0
STOPPED = 3
"""Exit code of a worker that a signal stopped cleanly."""
LOGS = "logs"
"""In a directory whose workers a scheduler starts: its logs."""

Job = Callable[[Path], bool]
"""The work of a process in a directory until no task is left, importable by name; False if a signal came."""


@dataclass(frozen=True)
class Task:
    """A task for one process: a training run. `plan.Measuring` is the other kind."""

    out: Path
    """The directory that holds its claim."""
    run_dir: Path
    arm: str
    seed: int
    make: Callable[[], Recipe]
    """Makes its recipe, which takes time."""
    control: Path | None = None
    """The control's run of this seed, without which it does not count; None if it counts alone."""

    timed: ClassVar = False
    """Whether it measures time, and so runs alone on an accelerator."""

    @property
    def name(self) -> str:
        """The name of its claim."""
        return "-".join(self.run_dir.relative_to(self.out).parts).removeprefix(f"{ARMS}-")

    @cached_property
    def recipe(self) -> Recipe:
        """Its recipe."""
        return self.make()

    @property
    def done(self) -> bool:
        """Whether its result exists."""
        return (self.run_dir / RESULT).exists()

    @property
    def failure(self) -> Failure | None:
        """The reason why training failed; None if it has not failed."""
        return read_failure(self.run_dir)

    @property
    def settled(self) -> bool:
        """Whether the task needs no more work: it is done, it failed, or the control failed for its seed."""
        without_control = self.control is not None and read_failure(self.control) is not None
        return self.done or self.failure is not None or without_control

    def loss(self, domains: Sequence[str] = ()) -> float:
        """The run's held-out loss, or its mean over some domains; infinite for a run that diverged."""
        if not self.done:
            return math.inf
        found = held_out(self.run_dir)
        losses = [found.domains[name].loss for name in domains] or [found.loss]
        mean = math.fsum(losses) / len(losses)
        return mean if math.isfinite(mean) else math.inf

    def run(self, claim: Claim | None, **facts: str) -> bool:
        """Train the run or resume it; a run that diverges leaves `failed.json`. False if a signal stopped it.

        Args:
            claim: The claim on this run, which must not be lost; None for a rank that follows the first one.
            facts: Written to the run's `machine.json` with those about the machine.
        """
        if claim is None:
            return self._follow()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        write_json(self.run_dir / MACHINE, {**hardware(), **facts})
        try:
            with ProgressBar(self.run_dir.name, self.recipe.train.steps) as bar:
                finished = train(self.recipe, self.run_dir, callbacks=[Watch(claim, bar)]).finished
            if finished and not math.isfinite(held_out(self.run_dir).loss):
                claim.require()
                (self.run_dir / RESULT).unlink()  # first, so that a run that is killed here is evaluated again
                write_json(self.run_dir / FAILED, Failure("its held-out loss is not finite", self.recipe.train.steps))
            return finished
        except TrainingError as error:
            if error.step is None:
                raise  # not caused by the arm, such as a full disk
            claim.require()
            write_json(self.run_dir / FAILED, Failure(" ".join(str(error).split()), error.step))
            return True

    def _follow(self) -> bool:
        """Train as one of several ranks, of which only the first writes files."""
        try:
            return train(self.recipe, self.run_dir).finished
        except TrainingError as error:
            if error.step is None:
                raise
            return True


def read_failure(run_dir: Path) -> Failure | None:
    """The reason why a run cannot resume; None if the run can resume or has a result."""
    path = run_dir / FAILED
    if (run_dir / RESULT).exists() or not path.exists():
        return None
    return read_result(Failure, path, "delete it to resume the run")


def forget_failures(tasks: Iterable[Task]) -> None:
    """Let runs that failed resume."""
    for task in tasks:
        if task.failure is not None:
            (task.run_dir / FAILED).unlink(missing_ok=True)


def work_off(
    out: Path,
    upcoming: Callable[[], tuple[str, Sequence[Task]]],
    do: Callable[[str, Task, Claim], bool],
    quiet: bool,
) -> bool:
    """Run one task after another until none is left; returns False if a signal stopped them.

    Args:
        out: The directory of the experiment.
        upcoming: The stage, if there are several, and its tasks, including settled ones.
        do: Run or resume a task of a stage; False if a signal stopped it.
        quiet: Print no line for a finished task.
    """
    claims = dict[Path, Claims]()

    def take(task: Task) -> Claim | None:
        return claims.setdefault(task.out, Claims(task.out / CLAIMS)).take(task.name)

    while True:
        stage, every = upcoming()
        pending = [task for task in every if not task.settled]
        if not pending:
            return True
        claimed = next(((task, claim) for task in _ready(pending) if (claim := take(task))), None)
        if claimed is None:  # other workers hold all tasks; if one dies, its claim expires and can be taken over
            time.sleep(POLL_SECONDS)
            continue
        task, claim = claimed
        with claim:
            if not task.settled and not do(stage, task, claim):
                return False
        if not quiet:
            name = task.name if task.out == out else f"rung {task.out.name}, {task.name}"
            where = f" in {stage}" if stage else ""
            _say(task, name, f"{sum(one.settled for one in every)} of {len(every)}{where}")
        tidy()


def _say(task: Task, name: str, where: str) -> None:
    """Print the result of a task in one line, or nothing if the task was skipped because the control failed."""
    if task.failure is not None:
        result = f"failed at step {task.failure.step}"
    elif not task.done:
        return
    else:
        result = "timed" if task.timed else f"held-out loss {held_out(task.run_dir).loss:.4f}"
    print(f"{name}: {result}  ({where})", file=sys.stderr, flush=True)


def _ready(pending: Sequence[Task]) -> Sequence[Task]:
    """Tasks that may start now. On an accelerator, which is timed by the wall clock, measurements run alone."""
    runs = [task for task in pending if not task.timed]
    shared = torch.cuda.is_available() and pending[0].recipe.train.device != "cpu"
    return (runs or pending[:1]) if shared else pending


class Watch(Hook):
    """Shows the progress of a run, and stops the run if another worker took over its claim: two writers would damage
    its directory."""

    def __init__(self, claim: Claim, bar: ProgressBar) -> None:
        self.claim, self.bar = claim, bar
        self.alone = parent_process() is None
        """Whether no other process draws on the same terminal."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Raise an error if this process has lost its claim on the run; called once per logged step."""
        self.claim.require()
        if self.alone:
            self.bar.update(step)


def check_processes(command: str, workers: int, threads: int | None) -> None:
    """Refuse numbers of processes and threads below one, and several workers under torchrun, which starts its own."""
    if launched() and command != "compare":
        raise SettingsError(f"{command} runs one process per arm: use `workers`, not torchrun")
    if launched() and workers > 1:
        raise SettingsError("compare under torchrun: its ranks train one arm after another: leave `workers` at 1")
    for name, count in (("workers", workers), ("threads", threads)):
        if count is not None and count < 1:
            raise SettingsError(f"{name}={count}: allowed: 1 or more")


def launched() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def is_first() -> bool:
    """Whether this process writes and prints for all ranks."""
    return not launched() or os.environ.get("RANK") == "0"


def carry_through(job: Job, out: Path, team: Team, left: Callable[[], int]) -> None:
    """Run all tasks in a directory with a team of workers; raises `TrainingError` if a signal or a lost machine stopped
    them.

    Args:
        job: What a process does in `out`.
        out: The directory.
        team: Who does it.
        left: How many tasks are not settled.
    """
    if team.executor.name != "local":
        _spread(job, out, team, left)
        return
    if team.workers > 1:
        finished = _together(job, out, team.workers, team.threads or 1)
    else:
        if team.threads is not None:
            torch.set_num_threads(team.threads)
        finished = job(out)
    if not finished:
        raise TrainingError("stopped; the same command resumes")


def _spread(job: Job, out: Path, team: Team, left: Callable[[], int]) -> None:
    """Let a scheduler such as Slurm start the workers. One that dies is started again, or its tasks go to others by
    their claims."""
    require_scheduler(team.executor.name)
    if left():
        schedule(*_scheduled(job, out, team))
    if count := left():
        raise TrainingError(f"{count} tasks are not done; see {out / LOGS}; the same command resumes")


def script(job: Job, out: Path, team: Team) -> str:
    """The script that `carry_through` would give to Slurm."""
    return slurm_script(*_scheduled(job, out, team))


def _scheduled(job: Job, out: Path, team: Team) -> tuple[Executor, Callable[[object, int, int], None], int, Path, str]:
    place, threads = out.absolute(), team.threads or 1
    wanted = replace(team.executor, workers=team.workers)
    return wanted, partial(take_part, job, str(place), threads), team.workers, place / LOGS, out.name


def take_part(job: Job, directory: str, threads: int, data: object, number: int, world_size: int) -> None:
    """Run tasks of the directory in a process that a scheduler started, until its parent ends."""
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(threads)
    if not job(Path(directory)):
        raise TrainingError("stopped; the same command resumes")


def _together(job: Callable[[Path], bool], out: Path, workers: int, threads: int) -> bool:
    context = multiprocessing.get_context("spawn")
    with _environment(OMP_NUM_THREADS=str(threads)):
        team = [context.Process(target=_worker, args=(job, out, threads, os.getpid())) for _ in range(workers)]
        for process in team:
            process.start()
    try:
        while any(process.is_alive() for process in team):
            if any(process.exitcode not in (None, 0) for process in team):
                break
            time.sleep(0.2)
    finally:
        for process in team:
            if process.is_alive():
                process.terminate()
        for process in team:
            process.join()
    codes = [process.exitcode for process in team if process.exitcode not in (0, STOPPED)]
    if codes and codes != [-signal.SIGTERM] * len(codes):
        raise TrainingError("a worker failed; its output is above. The same command resumes")
    return not any(process.exitcode for process in team)


def _worker(job: Callable[[Path], bool], out: Path, threads: int, parent: int) -> None:
    """The main function of a worker process, which ends when its parent does."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    try:
        torch.set_num_threads(threads)
        finished = job(out)
    except KeyboardInterrupt:
        finished = False
    except FathomError as error:
        print(f"fathom: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0 if finished else STOPPED)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def tidy() -> None:
    """Release the memory and the compiled code of a finished task."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one CPU thread within the block, so that this thread's CPU time measures all of the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables within the block, for processes that are started there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
