"""`fathom compare`: the paired experiment. Arms differ in their mechanism; seeds, tokens and initial values are shared.

    out/plan.json               what is compared: recipe, arms, seeds
    out/arms/ARM/seed-0/        an ordinary training run; failed.json in it says why it cannot go on
    out/measured/ARM.json       step time, memory and cache beside the control's
    out/claims/                 who works on what, see claims.py
    out/report.json, .html      written from the above alone

Initial values are shared because each module draws from a generator seeded with its name (`training.build.initialize`);
`timing.measure` counts the tensors for which that holds, and the report prints the count.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fathom.comparison.arms import Arm, Equal, arm_recipes, parse_arms
from fathom.comparison.leases import Claim, Claims
from fathom.comparison.timing import measure
from fathom.errors import FathomError
from fathom.recipe import Recipe, RecipeError, differences, load_recipe, parse_recipe
from fathom.report.provenance import hardware, provenance

PLAN, ARMS, MEASURED, CLAIMS = "plan.json", "arms", "measured", "claims"
RESULT, MACHINE, FAILED = "result.json", "machine.json", "failed.json"
NOT_TIMED = (
    *("track", "data.directory"),
    *(f"train.{key}" for key in ("checkpoint_every", "keep_last", "async_save", "export", "log_every")),
)
"""Keys that a measurement does not depend on."""
POLL_SECONDS = 1.0
STOPPED = 3
"""Exit code of a worker that a signal ended in good order."""


class CompareError(FathomError):
    """A comparison that could not be finished; the message is one line."""


@dataclass(frozen=True)
class Plan:
    """Everything that defines a comparison."""

    recipe: Recipe
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    equal: Equal = "tokens"
    pairs: int = 12
    """A B B A rounds per arm when timing; 0 times nothing."""

    @property
    def control(self) -> Arm:
        """What the others are measured against."""
        return self.arms[0]

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """Each arm's recipe, steps scaled to the equal budget."""
        return arm_recipes(self.recipe, self.arms, self.equal)

    def run_recipe(self, arm: str, seed: int) -> Recipe:
        """The recipe of one run."""
        return self.recipes[arm].override(f"train.seed={seed}", "track.display=none")

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = {"arms": [asdict(arm) for arm in self.arms], "seeds": list(self.seeds)}
        return {**values, "equal": self.equal, "pairs": self.pairs, "recipe": self.recipe.to_dict()}

    @classmethod
    def read(cls, out: Path) -> Plan:
        """The plan of an existing comparison."""
        path = out / PLAN
        if not path.exists():
            raise RecipeError(f"{out}: holds no comparison ({PLAN} is missing)")
        values = json.loads(path.read_text(encoding="utf-8"))
        arms = tuple(Arm(arm["name"], arm["mechanism"], tuple(arm["overrides"])) for arm in values["arms"])
        recipe = parse_recipe(values["recipe"])
        return cls(recipe, arms, tuple(values["seeds"]), values["equal"], values["pairs"])


@dataclass(frozen=True)
class Task:
    """One piece of work that one process does: a training run, or a measurement (without a seed)."""

    plan: Plan
    out: Path
    arm: str
    seed: int | None

    @property
    def name(self) -> str:
        """Names the claim."""
        return f"{self.arm}-measured" if self.seed is None else f"{self.arm}-seed-{self.seed}"

    @property
    def run_dir(self) -> Path:
        """Where a training run lives."""
        return self.out / ARMS / self.arm / f"seed-{self.seed}"

    @property
    def failure(self) -> dict[str, Any] | None:
        """Why training cannot go on (`error`, `step`), if it cannot."""
        path = self.run_dir / FAILED
        if self.seed is None or self.done or not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do: it is done, it failed, or the control that it is held against did."""
        control = Task(self.plan, self.out, self.plan.control.name, self.seed)
        return self.done or self.failure is not None or control.failure is not None

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        if self.seed is not None:
            return (self.run_dir / RESULT).exists()
        return read_measured(self.plan, self.out, self.arm) is not None

    def run(self, claim: Claim) -> bool:
        """Do it, or go on with it; False if a signal ended it early."""
        from fathom.training import TrainingError, read_metrics, train
        from fathom.training.checkpoint import write_atomically

        if self.seed is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(self.run_dir / MACHINE, json.dumps(hardware()))
            recipe = self.plan.run_recipe(self.arm, self.seed)
            try:
                return train(recipe, self.run_dir, callbacks=[Watch(claim)]).finished
            except TrainingError as error:
                last = next((line for line in reversed(read_metrics(self.run_dir)) if "skipped" in line), None)
                if last is None or not last["skipped"]:
                    raise  # not the arm's fault, as a full disk is not
                claim.require()
                failure = {"error": " ".join(str(error).split()), "step": last["step"]}
                write_atomically(self.run_dir / FAILED, json.dumps(failure))
                return True
        arm, control = (self.plan.run_recipe(name, self.plan.seeds[0]) for name in (self.arm, self.plan.control.name))
        with one_thread():
            measured = measure(arm, control, self.plan.pairs)
        claim.require()
        path = self.out / MEASURED / f"{self.arm}.json"
        path.parent.mkdir(exist_ok=True)
        recipes = [recipe.to_dict() for recipe in (arm, control)]
        write_atomically(path, json.dumps({**measured.to_dict(), "recipes": recipes, "hardware": hardware()}))
        return True


class Watch:
    """Stops a run whose claim was taken over: two writers in one directory would ruin it."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Look once per logged step."""
        self.claim.require()

    def close(self) -> None:
        """Nothing is held open."""


def make_plan(
    recipe: Recipe, arms: str, seeds: int = 3, equal: Equal = "tokens", pairs: int = 12, out: Path | None = None
) -> Plan:
    """A checked plan: whatever is wrong with it, its data, or the directory it would go on with, is said here."""
    if seeds < 1:
        raise RecipeError(f"--seeds {seeds}: allowed: 1 or more")
    if pairs < 0:
        raise RecipeError(f"--pairs {pairs}: allowed: 0 or more")
    first = recipe.train.seed
    plan = Plan(recipe, tuple(parse_arms(arms)), tuple(range(first, first + seeds)), equal, pairs)
    check(plan, out)
    return plan


def check(plan: Plan, out: Path | None = None) -> None:
    """Open the data as every arm will, and hold existing runs against the plan."""
    from fathom.data.batches import BatchPlan
    from fathom.data.shards import TokenDataset
    from fathom.training.parallel import device_of

    for name, recipe in plan.recipes.items():
        device_of(recipe.train.device)
        data = TokenDataset.open(recipe.data.directory, verify=False)
        TokenDataset.open(recipe.data.directory, split="val", verify=False)
        data.require_vocabulary(recipe.config().vocab_size)
        BatchPlan(data, recipe.data.sequence_length, recipe.rows_per_step, recipe.data_seed, recipe.data.packing)
        rows = recipe.rows_per_step
        if rows % min(recipe.train.micro_batch, rows):
            raise RecipeError(f"arm {name}: train.micro_batch={recipe.train.micro_batch}: allowed: a divisor of {rows}")
    for task in tasks(plan, out) if out is not None else ():
        path = task.run_dir / "recipe.yaml"
        if task.seed is not None and path.exists():
            differing = differences(load_recipe(path), plan.run_recipe(task.arm, task.seed))
            if differing:
                raise RecipeError(f"{task.run_dir} holds a run of another recipe; different: {', '.join(differing)}")


def tasks(plan: Plan, out: Path) -> list[Task]:
    """All work, in the order in which a lone process does it: whole seeds first, so that a partial report is paired."""
    runs = [Task(plan, out, arm.name, seed) for seed in plan.seeds for arm in plan.arms]
    timed = [Task(plan, out, arm.name, None) for arm in plan.arms[1:]] if plan.pairs else []
    return [*runs, *timed]


def compare(
    plan: Plan,
    out: str | Path,
    workers: int = 1,
    threads: int | None = None,
    quiet: bool = False,
    retry_failed: bool = False,
) -> dict[str, Any]:
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
    from fathom.comparison.findings import summarize
    from fathom.comparison.page import write_report
    from fathom.comparison.progress import Progress
    from fathom.training.checkpoint import write_atomically

    out = Path(out)
    refuse_torchrun()
    if workers < 1:
        raise RecipeError(f"--workers {workers}: allowed: 1 or more")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / PLAN, json.dumps(plan.to_dict(), indent=2))
    for task in tasks(plan, out) if retry_failed else ():
        if task.failure is not None:
            (task.run_dir / FAILED).unlink(missing_ok=True)
    with Progress(plan, out, quiet):
        finished = work(plan, out, threads) if workers == 1 else _work_together(out, workers, threads or 1)
    if not finished:
        raise CompareError("stopped; the same command continues")
    report = summarize(plan, out, provenance())
    write_report(report, out)
    return report


def refuse_torchrun() -> None:
    """Ranks would wait for each other in runs that are not shared."""
    if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise RecipeError("compare runs one process per arm: use --workers, not torchrun")


def work(plan: Plan, out: Path, threads: int | None = None) -> bool:
    """Take one task after another until none is left; False if a signal came."""
    if threads is not None:
        torch.set_num_threads(threads)
    claims = Claims(out / CLAIMS)
    while pending := [task for task in tasks(plan, out) if not task.settled]:
        claimed = next(((task, claim) for task in _ready(pending) if (claim := claims.take(task.name))), None)
        if claimed is None:  # others are at all of them; should one die, its claim goes stale and is ours
            time.sleep(POLL_SECONDS)
            continue
        task, claim = claimed
        with claim:
            if not task.settled and not task.run(claim):
                return False
        _tidy()
    return True


def _ready(pending: Sequence[Task]) -> Sequence[Task]:
    """What may be begun: an accelerator is timed by the wall clock, so nothing else of ours may run on it."""
    runs = [task for task in pending if task.seed is not None]
    shared = torch.cuda.is_available() and pending[0].plan.recipe.train.device != "cpu"
    return (runs or pending[:1]) if shared else pending


def _work_together(out: Path, workers: int, threads: int) -> bool:
    """Start workers and wait; the first that fails ends the others, which save what they have."""
    context = multiprocessing.get_context("spawn")
    with _environment(OMP_NUM_THREADS=str(threads)):
        team = [context.Process(target=_worker, args=(out, threads, os.getpid())) for _ in range(workers)]
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


def _worker(out: Path, threads: int, parent: int) -> None:
    """A worker's life: never longer than its parent's."""
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    try:
        finished = work(Plan.read(out), out, threads)
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


def read_measured(plan: Plan, out: Path, arm: str) -> dict[str, Any] | None:
    """A measurement, if it was made for this plan's recipes."""
    path = out / MEASURED / f"{arm}.json"
    if not path.exists():
        return None
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = (arm, plan.control.name)
    expected = [plan.run_recipe(name, plan.seeds[0]) for name in names]
    same = all(
        not differences(parse_recipe(r), e, ignore=NOT_TIMED) for r, e in zip(values["recipes"], expected, strict=True)
    )
    return values if same and values["time"]["pairs"] >= plan.pairs else None


def _tidy() -> None:
    """Leave nothing of a finished task for the next one to trip over."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one CPU thread: its CPU time then counts everything."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
