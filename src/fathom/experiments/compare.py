"""`fathom compare`: the paired experiment. Arms differ in their mechanism; seeds, tokens and initial values are shared.

    out/plan.json               what is compared: recipe, arms, seeds
    out/arms/ARM/seed-0/        an ordinary training run; failed.json in it says why it cannot go on
    out/measured/ARM.json       step time, memory and cache beside the control's
    out/claims/                 who works on what, see leases.py
    out/report.json, .html      written from the above alone

Initial values are shared because each module draws from a generator seeded with its name (`training.build.initialize`);
`timing.measure` counts the tensors for which that holds, and the report prints the count.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from fathom.checkpoints.layout import CLAIMS, FAILED, MACHINE, MEASURED, PLAN, REPORT, RESULT
from fathom.errors import FathomError
from fathom.experiments.arms import Equal
from fathom.experiments.compare_page import write_report
from fathom.experiments.compare_results import ComparisonReport
from fathom.experiments.differences import seeds_changed, summarize
from fathom.experiments.leases import Claim, Claims
from fathom.experiments.plan import Plan, RunTask, check_machine, make_plan, tasks
from fathom.experiments.progress import Progress
from fathom.experiments.timing import measure
from fathom.recipe import Recipe, RecipeError
from fathom.report.files import write_json
from fathom.report.provenance import hardware, provenance, recorded
from fathom.training import Hook, TrainingError, read_metrics, train
from fathom.training.first import ForgottenError
from fathom.training.results import held_out

POLL_SECONDS = 1.0
STOPPED = 3
"""Exit code of a worker that a signal ended in good order."""


class CompareError(FathomError, RuntimeError):
    """A comparison that was not finished; the message is one line."""


def run_task(task: RunTask, claim: Claim) -> bool:
    """Do or continue a task; False if a signal ended it early."""
    if task.seed is not None:
        return run_training(task.plan.run_recipe(task.arm, task.seed), task.run_dir, claim)
    arm, control = (task.plan.run_recipe(name, task.plan.seeds[0]) for name in (task.arm, task.plan.control.name))
    with one_thread():
        measured = measure(arm, control, task.plan.pairs)
    claim.require()
    path = task.out / MEASURED / f"{task.arm}.json"
    path.parent.mkdir(exist_ok=True)
    recipes = [recipe.to_dict() for recipe in (arm, control)]
    write_json(path, {**measured.to_dict(), "recipes": recipes, "hardware": hardware()})
    return True


def run_training(recipe: Recipe, run_dir: Path, claim: Claim, **facts: str) -> bool:
    """Train or continue a run; one that diverges leaves `failed.json`. False if a signal ended it early.

    Args:
        recipe: What to train.
        run_dir: Where.
        claim: The claim on this run, which must not be lost.
        facts: Written to the run's `machine.json` with those about the machine.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / MACHINE, {**hardware(), **facts})
    try:
        finished = train(recipe, run_dir, callbacks=[Watch(claim)]).finished
        if finished and not math.isfinite(held_out(run_dir)["loss"]):
            claim.require()
            (run_dir / RESULT).unlink()  # first: killed here, the run is evaluated again
            write_json(run_dir / FAILED, {"error": "its held-out loss is no number", "step": recipe.train.steps})
        return finished
    except ForgottenError as error:
        claim.require()
        write_json(run_dir / FAILED, {"error": " ".join(str(error).split()), "step": error.step})
        return True
    except TrainingError as error:
        last = next((line for line in reversed(read_metrics(run_dir)) if "skipped" in line), None)
        if last is None or not last["skipped"]:
            raise  # not the arm's fault, such as a full disk
        claim.require()
        write_json(run_dir / FAILED, {"error": " ".join(str(error).split()), "step": last["step"]})
        return True


class Watch(Hook):
    """Stops a run whose claim was taken over: two writers in one directory would ruin it."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Look once per logged step."""
        self.claim.require()


def compare(
    recipe: Recipe,
    arms: str,
    out: str | Path,
    *,
    seeds: int = 3,
    equal: Equal = "tokens",
    pairs: int = 12,
    workers: int = 1,
    threads: int | None = None,
) -> ComparisonReport:
    """Compare mechanisms fairly, or go on with the comparison in `out`; returns what its `report.json` holds.

    Args:
        recipe: What all arms share.
        arms: `MECHANISM` or `NAME=MECHANISM[;key=value...]`, comma between; the first is the control.
        out: The directory; further calls, on other machines too, may work on it at the same time.
        seeds: Runs of each arm, which begin at `train.seed`.
        equal: The budget that arms share: tokens, FLOPs, or tokens times their trips through the stack.
        pairs: How often an arm is timed A B B A; 0 for not at all.
        workers: Processes on this machine. With more than one, a script needs `if __name__ == "__main__":`.
        threads: CPU threads of each; one if there are several workers, else torch's choice.
    """
    out = Path(out)
    return carry_out(make_plan(recipe, arms, seeds, equal, pairs, out), out, workers, threads)


def carry_out(
    plan: Plan,
    out: str | Path,
    workers: int = 1,
    threads: int | None = None,
    quiet: bool = False,
    retry_failed: bool = False,
) -> ComparisonReport:
    """Run whatever is missing, then write the report; returns what `report.json` holds.

    Any number of calls, on any number of machines, may work on one directory; each returns when all is done.

    Args:
        plan: What to compare.
        out: The directory.
        workers: Local processes.
        threads: CPU threads of each; one if there are several workers, else torch's choice.
        quiet: Show nothing.
        retry_failed: Go on with runs that diverged; without it they stay left out.
    """

    out = Path(out)
    refuse_torchrun()
    if workers < 1:
        raise RecipeError(f"--workers {workers}: allowed: 1 or more")
    if threads is not None and threads < 1:
        raise RecipeError(f"--threads {threads}: allowed: 1 or more")
    seeds_changed(plan, out)  # a damaged report is said before work
    check_machine(plan)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PLAN, plan.to_dict())
    for task in tasks(plan, out) if retry_failed else ():
        if task.failure is not None:
            (task.run_dir / FAILED).unlink(missing_ok=True)
    with Progress(plan, out, quiet):
        finished = work(plan, out, threads) if workers == 1 else work_together(_resume, out, workers, threads or 1)
    if not finished:
        raise CompareError("stopped; the same command continues")
    report = summarize(plan, out, provenance())
    write_report(report, out)
    return report


def rewrite_report(plan: Plan, out: Path) -> ComparisonReport:
    """The report from what is finished, its provenance that of the last whole report where there is one."""
    if not (out / PLAN).exists():
        raise RecipeError(f"{out}: holds no comparison ({PLAN} is missing)")
    source = provenance()
    if (out / REPORT).exists():
        source = recorded(out / REPORT)
    report = summarize(plan, out, source)
    write_report(report, out)
    return report


def refuse_torchrun(command: str = "compare") -> None:
    """Refuse to run under torchrun: its ranks would each take other runs and wait for one another."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise RecipeError(f"{command} runs one process per arm: use --workers, not torchrun")


def work(plan: Plan, out: Path, threads: int | None = None) -> bool:
    """Take one task after another until none is left; False if a signal came."""
    if threads is not None:
        torch.set_num_threads(threads)
    claims = Claims(out / CLAIMS)
    while pending := [task for task in tasks(plan, out) if not task.settled]:
        claimed = next(((task, claim) for task in _ready(pending) if (claim := claims.take(task.name))), None)
        if claimed is None:  # others hold them all; if one dies, its claim goes stale and can be taken
            time.sleep(POLL_SECONDS)
            continue
        task, claim = claimed
        with claim:
            if not task.settled and not run_task(task, claim):
                return False
        tidy()
    return True


def _ready(pending: Sequence[RunTask]) -> Sequence[RunTask]:
    """Tasks that may start now. On an accelerator, which is timed by the wall clock, measurements run alone."""
    runs = [task for task in pending if task.seed is not None]
    shared = torch.cuda.is_available() and pending[0].plan.recipe.train.device != "cpu"
    return (runs or pending[:1]) if shared else pending


def work_together(job: Callable[[Path, int], bool], out: Path, workers: int, threads: int) -> bool:
    """Start workers and wait. If one fails the others are ended, and save checkpoints first.

    Args:
        job: What a worker does in `out` with `threads` threads, importable by name; False if a signal came.
        out: The directory.
        workers: Processes.
        threads: CPU threads of each.
    """
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
        raise CompareError("a worker failed; what it said is above. The same command continues")
    return not any(process.exitcode for process in team)


def _resume(out: Path, threads: int) -> bool:
    return work(Plan.read(out), out, threads)


def _worker(job: Callable[[Path, int], bool], out: Path, threads: int, parent: int) -> None:
    """The main function of a worker process, which ends when its parent does."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    try:
        finished = job(out, threads)
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
    """Free memory and compiled code of a finished task."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one CPU thread, so that the thread's CPU time is all of the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
