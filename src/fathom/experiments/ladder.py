"""`fathom ladder`: stages of ordinary runs and comparisons in one directory, by any number of processes and machines.

The directory holds:

out/ladder.json                     the plan, with a hash of each of its parts
out/tune/1/ARM/lr+1/seed-0/         tuning runs; +1: the centre's learning rate, doubled once
out/rungs/1/                        a comparison, as `fathom compare` knows them
out/seed_control/1/seed-0/          the control with other initial values
out/prediction.json                 the sealed forecast of the last rung
out/check/ARM/lr+1/seed-0/          half and twice the learning rate at the largest size
out/claims/                         which process does which task outside the rungs
out/report.json, .html, runs.jsonl  written from the above alone

`rungs.py` decides the recipes, the seeds and the `as-large-as-` controls. `stages.py` decides the next runs, and makes
and seals the prediction; `tuning.py` finds the best learning rate. `multipliers.py` decides what the report claims,
`acquisition.py` judges puzzles, and `ladder_page.py` writes the report's files. `task_claims.py` decides when a worker
takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fathom.checkpoints.file_names import ARMS, LADDER, REPORT, RESULT
from fathom.checkpoints.places import require_folder
from fathom.errors import SettingsError
from fathom.experiments.compare import rewrite_report
from fathom.experiments.ladder_page import write_report
from fathom.experiments.ladder_results import LadderReport
from fathom.experiments.multipliers import summarize
from fathom.experiments.plan import check_machine
from fathom.experiments.rungs import RUNGS, Ladder
from fathom.experiments.scheduler import Task, carry_through, check_processes, forget_failures, script, work_off
from fathom.experiments.stages import STAGES, State
from fathom.experiments.task_claims import Claim
from fathom.experiments.workers import ALONE, Team
from fathom.report.provenance import Provenance, provenance, recorded


def climb(
    ladder: Ladder,
    out: Path,
    team: Team = ALONE,
    until: str = STAGES[-1],
    quiet: bool = False,
    retry_failed: bool = False,
) -> LadderReport:
    """Run a ladder's unfinished runs up to and including a stage, then write the report; returns the contents of
    `report.json`.

    Args:
        ladder: The plan.
        out: The directory. Several calls, also on other machines, may work on it at the same time.
        team: Who trains.
        until: The last stage to run.
        quiet: Print no line for a finished task; a terminal still shows the progress of each run.
        retry_failed: Resume runs that diverged; otherwise they are excluded.
    """
    check_processes("ladder", team.workers, team.threads)
    ladder = settle(ladder, out)
    if retry_failed:
        _forget_failures(State(ladder, out))
    carry_through(partial(work, until=until, quiet=quiet), out, team, lambda: left(out, until))
    return report(ladder, out, provenance())


def slurm_script(out: Path, team: Team) -> str:
    """The script that a ladder would give to sbatch."""
    return script(partial(work, until=STAGES[-1], quiet=True), out, team)


def left(out: Path, until: str) -> int:
    """The number of tasks that are still to do in the ladder's current stage."""
    return sum(not task.settled for task in upcoming(State(Ladder.read(out), out), until)[1])


def settle(ladder: Ladder, out: Path) -> Ladder:
    """Write the ladder's plan, or check that the directory holds the same plan; returns the plan as written."""
    require_folder(out, "a ladder")
    check_machine(ladder.plan(ladder.sizes[0]))
    if (out / LADDER).exists():
        return _as_written(ladder, out)
    out.mkdir(parents=True, exist_ok=True)
    ladder.write(out)
    return Ladder.read(out)


def _as_written(ladder: Ladder, out: Path) -> Ladder:
    """The plan that a ladder's directory holds; raises an error if it differs from `ladder`."""
    before = Ladder.read(out)
    changed = before.changed(ladder)
    if changed:
        raise SettingsError(f"{out} contains a ladder with another plan; different: {', '.join(changed)}")
    return before


def work(out: Path, until: str, quiet: bool) -> bool:
    """Run the ladder's tasks one after another until a stage is over; returns False if a signal stopped them."""
    state = State(Ladder.read(out), out)

    def begun() -> tuple[str, list[Task]]:
        stage, tasks = upcoming(state, until)
        state.begin(stage)
        return stage, tasks

    def do(stage: str, task: Task, claim: Claim) -> bool:
        if stage != "last":
            return task.run(claim)
        sealed = state.sealed()
        if sealed is None:
            raise SettingsError(f"{out}: the largest size does not start before its prediction is sealed")
        return task.run(claim, prediction=sealed.sha256)

    return work_off(out, begun, do, quiet)


def upcoming(state: State, until: str) -> tuple[str, list[Task]]:
    """The ladder's current stage, and the tasks of that stage."""
    return list(state.stages(until))[-1]


def add_seeds(out: Path, seeds: Sequence[int]) -> Ladder:
    """Add seeds for all arms to the rungs of an existing ladder; finished runs are kept."""
    ladder = Ladder.read(out)
    return ladder.add_seeds(out, seeds, sum(1 for _ in (out / RUNGS).glob(f"*/{ARMS}/*/*/{RESULT}")))


def report(ladder: Ladder, out: Path, source: Provenance) -> LadderReport:
    """Write the reports of the ladder and of its rungs from the finished runs."""
    state = State(ladder, out)
    sizes = ladder.all_sizes if state.finished_tuning is not None else ()  # which is [] where the plan tunes none
    for size in sizes:
        if any(task.done for task in state.rung_tasks(size)):
            rewrite_report(state.plans[size], state.rung_dir(size))
    found = summarize(state, source)
    write_report(found, out)
    return found


def rewrite(ladder: Ladder, out: Path) -> LadderReport:
    """Write the reports of the finished runs again, with the provenance of the last report if there is one."""
    return report(_as_written(ladder, out), out, recorded(out / REPORT))


def _forget_failures(state: State) -> None:
    """Let diverged runs resume, except tuning runs of a size whose optimum later runs use: those tuning runs count as
    infinitely bad, because another optimum would contradict the learning rates of finished runs."""
    forget_failures([task for _, tasks in list(state.stages()) for task in tasks if not state.used(task)])
