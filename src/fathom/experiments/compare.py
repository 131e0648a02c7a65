"""`fathom compare`: the paired experiment. Arms differ in their mechanism; seeds, tokens and initial values are shared.

    out/plan.json               what is compared: recipe, arms, seeds
    out/arms/ARM/seed-0/        an ordinary training run; failed.json in it says why it cannot resume
    out/measured/ARM.json       step time, memory and cache of the arm and the control
    out/claims/                 which process works on what, see task_claims.py
    out/report.json, .html      written from the above alone

Initial values are shared because each module draws from a generator seeded with its name (`training.build.initialize`);
`timing.measure` counts the tensors for which that holds, and the report prints the count.

`plan.py` makes a run of each arm with each seed, and refuses a directory with runs of another recipe. `arms.py` decides
each arm's steps and what it may override. `scheduler.py` runs the tasks and writes `failed.json`; `task_claims.py`
decides when a worker takes over. `training/heldout.py` scores all models on the same tokens. `differences.py` computes
the report and its verdict, and decides whether the report is exploratory (`plan_changed`); `report/statistics.py`
decides what is significant.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fathom.checkpoints.file_names import PLAN, REPORT
from fathom.checkpoints.places import require_folder
from fathom.errors import SettingsError
from fathom.experiments.arms import Equal
from fathom.experiments.compare_page import page
from fathom.experiments.compare_results import ComparisonReport
from fathom.experiments.differences import plan_changed, summarize
from fathom.experiments.plan import Plan, check_machine, make_plan, plan_file
from fathom.experiments.scheduler import (
    Task,
    carry_through,
    check_processes,
    forget_failures,
    launched,
    script,
    tidy,
    work_off,
)
from fathom.experiments.task_claims import Claim
from fathom.experiments.workers import ALONE, Team
from fathom.recipe import Recipe, load_recipe
from fathom.report import html
from fathom.report.files import write_json
from fathom.report.provenance import provenance, recorded
from fathom.training.parallel import Ranks, start


def compare(
    recipe: Recipe | str | Path,
    arms: str,
    out: str | Path,
    *,
    seeds: int = 3,
    equal: Equal = "tokens",
    pairs: int = 12,
    workers: int = 1,
    threads: int | None = None,
) -> ComparisonReport:
    """Compare mechanisms fairly, or resume the comparison in `out`; returns the contents of its `report.json`.

    Args:
        recipe: The recipe that all arms share, or its file or name.
        arms: `MECHANISM` or `NAME=MECHANISM[;key=value...]`, separated by commas; the first is the control.
        out: The output directory. Several calls, also on other machines, may share it at the same time.
        seeds: Number of runs of each arm; seeds start at `train.seed`.
        equal: The budget that arms share: tokens, FLOPs, or tokens times loop iterations.
        pairs: Timing rounds per arm, in the order A B B A; 0 for none.
        workers: Processes on this machine. With more than one, a script needs `if __name__ == "__main__":`.
        threads: CPU threads per worker; one if there are several workers, else torch's choice.
    """
    out = Path(out)
    recipe = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
    return carry_out(make_plan(recipe, arms, seeds, equal, pairs, out), out, Team(workers, threads))


def carry_out(
    plan: Plan,
    out: str | Path,
    team: Team = ALONE,
    quiet: bool = False,
    retry_failed: bool = False,
) -> ComparisonReport:
    """Run the comparison's unfinished runs, then write the report; returns the contents of `report.json`. Any number of
    calls, on any number of machines, may work on one directory; each returns when everything is done. Under torchrun
    all ranks call it, and train one arm after another.

    Args:
        plan: The plan of the comparison.
        out: The directory.
        team: Who trains.
        quiet: Print no line for a finished task; a terminal still shows the progress of each run.
        retry_failed: Resume runs that diverged; otherwise they are excluded.
    """

    workers, threads = team.workers, team.threads
    out = Path(out)
    check_processes("compare", workers, threads)
    require_folder(out, "a comparison")
    plan_changed(plan, out)  # report a damaged file before any work
    check_machine(plan)
    ranks = together(plan)
    if ranks.first:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / PLAN, plan.written())
        if retry_failed:
            forget_failures(plan.runs(out))
    ranks.barrier()
    job = partial(work, quiet=quiet, ranks=ranks if ranks.world_size > 1 else None)
    carry_through(job, out, team, lambda: sum(not task.settled for task in plan.tasks(out)))
    if ranks.first:
        report = summarize(plan, out, provenance())
        html.write(out, report, page(report))
    ranks.barrier()
    return report if ranks.first else summarize(plan, out, recorded(out / REPORT))


def slurm_script(out: Path, team: Team) -> str:
    """The script that a comparison would give to sbatch."""
    return script(partial(work, quiet=True), out, team)


def together(plan: Plan) -> Ranks:
    """The process group: the ranks that torchrun started, or a single process without torchrun."""
    if not launched():
        return Ranks()
    if plan.pairs:
        raise SettingsError("compare under torchrun: set `pairs` to 0, because step times are measured in one process")
    return start(plan.recipe)


def rewrite_report(plan: Plan, out: Path) -> ComparisonReport:
    """Write the report of the finished runs again, with the provenance of the last complete report if there is one."""
    plan_file(out, PLAN, "comparison")  # which must exist
    report = summarize(plan, out, recorded(out / REPORT))
    html.write(out, report, page(report))
    return report


def work(out: Path, quiet: bool, ranks: Ranks | None = None) -> bool:
    """Run the comparison's tasks one after another until none is left; returns False if a signal stopped them.

    Of several ranks the first one claims a task and names it to the others, so that all of them train it.
    """
    plan = Plan.read(out)
    if ranks is not None and not ranks.first:
        tasks = {task.name: task for task in plan.tasks(out)}
        while (name := ranks.share(None)) is not None:
            tasks[name].run(None)
            tidy()
        return bool(ranks.share(None))

    def do(stage: str, task: Task, claim: Claim) -> bool:
        if ranks is not None:
            ranks.share(task.name)
        return task.run(claim)

    finished = work_off(out, lambda: ("", plan.tasks(out)), do, quiet)
    if ranks is not None:
        ranks.share(None)
        ranks.share(finished)
    return finished
