"""`fathom compare`: the paired experiment. Arms differ in their mechanism; seeds, tokens and initial values are shared.

    out/plan.json               what is compared: recipe, arms, seeds
    out/arms/ARM/seed-0/        an ordinary training run; failed.json in it says why it cannot resume
    out/measured/ARM.json       step time, memory and cache of the arm and the control
    out/claims/                 which process works on what, see claims.py
    out/report.json, .html      written from the above alone

Initial values are shared because each module draws from a generator seeded with its name (`training.build.initialize`);
`timing.measure` counts the tensors for which that holds, and the report prints the count.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fathom.checkpoints.layout import PLAN, REPORT
from fathom.experiments.arms import Equal
from fathom.experiments.compare_page import page
from fathom.experiments.compare_results import ComparisonReport
from fathom.experiments.differences import plan_changed, summarize
from fathom.experiments.plan import Plan, check_machine, make_plan, plan_file
from fathom.experiments.schedule import carry_through, check_processes, forget_failures, work_off
from fathom.recipe import Recipe
from fathom.report import html
from fathom.report.files import write_json
from fathom.report.provenance import provenance, recorded


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
    """Compare mechanisms fairly, or resume the comparison in `out`; returns the contents of its `report.json`.

    Args:
        recipe: The recipe that all arms share.
        arms: `MECHANISM` or `NAME=MECHANISM[;key=value...]`, separated by commas; the first is the control.
        out: The output directory. Several calls, also on other machines, may share it at the same time.
        seeds: Number of runs of each arm; seeds start at `train.seed`.
        equal: The budget that arms share: tokens, FLOPs, or tokens times loop iterations.
        pairs: Timing rounds per arm, in the order A B B A; 0 for none.
        workers: Processes on this machine. With more than one, a script needs `if __name__ == "__main__":`.
        threads: CPU threads per worker; one if there are several workers, else torch's choice.
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
    """Run what is missing, then write the report; returns the contents of `report.json`. Any number of calls, on any
    number of machines, may work on one directory; each returns when everything is done.

    Args:
        plan: The plan of the comparison.
        out: The directory.
        workers: Local processes.
        threads: CPU threads per worker; one if there are several workers, else torch's choice.
        quiet: Print no line for a finished task; a terminal still shows the progress of each run.
        retry_failed: Resume runs that diverged; otherwise they are excluded.
    """

    out = Path(out)
    check_processes("compare", workers, threads)
    plan_changed(plan, out)  # report a damaged file before any work
    check_machine(plan)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / PLAN, plan.written())
    if retry_failed:
        forget_failures(plan.runs(out))
    carry_through(partial(work, quiet=quiet), out, workers, threads)
    report = summarize(plan, out, provenance())
    html.write(out, report, page(report))
    return report


def rewrite_report(plan: Plan, out: Path) -> ComparisonReport:
    """The report of the finished runs, with the provenance of the last complete report if there is one."""
    plan_file(out, PLAN, "comparison")  # which must exist
    report = summarize(plan, out, recorded(out / REPORT))
    html.write(out, report, page(report))
    return report


def work(out: Path, quiet: bool) -> bool:
    """Run one task after another until none is left; False after a signal."""
    plan = Plan.read(out)
    return work_off(out, lambda: ("", plan.tasks(out)), lambda stage, task, claim: task.run(claim), quiet)
