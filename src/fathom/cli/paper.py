"""`fathom compare papers/NAME/TABLE`: reproduce a paper's table next to its published numbers.

`experiments/paper.py` reads the table's file and computes the dry run. `experiments/paper_table.py` trains, scores the
tasks, and finds arms that are one model.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.checkpoints.places import require_folder
from fathom.cli.parser import refuse
from fathom.cli.team import recipe_words, refuse_unless_slurm, team_of
from fathom.report.results import to_json
from fathom.report.tables import print_report

ONLY_HERE = ("--tier", "--task-data", "--gpu")
NOT_HERE = ("--arms", "--contrasts", "--equal", "--pairs", "--report", "--retry-failed")


def refuse_tables_options(options: Namespace) -> None:
    """Refuse options that only a paper's table has if the command runs something else."""
    refuse(options.given, ONLY_HERE, "belongs to a paper's table, as in papers/ponderlm/feedback")


def run(options: Namespace, source: Path) -> int:
    """Train and print a paper's table, or with `--dry-run` print its plan; exit code 1 if two variants turn out to be
    the same model, or if the plan differs from the paper's."""
    from fathom.experiments.compare import slurm_script
    from fathom.experiments.paper import load_table, planned, with_seeds
    from fathom.experiments.paper_table import make_table, plan_rows, table_rows, verdict
    from fathom.experiments.scheduler import is_first

    why = f"has no meaning with {source}: a paper's table has its own arms and budget; name its recipe to plan others"
    refuse(options.given, NOT_HERE, why)
    table, tier = load_table(source), options.tier or "tiny"
    plans = with_seeds(table.plans(tier, tuple(recipe_words(options.overrides))), options.seeds)
    team, out = team_of(options), options.out or Path("runs") / f"{source.parent.name}-{source.stem}"
    require_folder(out, "a paper's table")
    if options.dry_run:
        refuse_unless_slurm(options)
        plan = planned(table, tier, plans, options.gpu or "H100")
        words = [table.says] if table.says else []
        words += [f"Data: {line}" for line in plan.prepare] + [f"Not the paper's: {line}" for line in plan.differs]
        if options.json:
            print(to_json(plan))
        else:
            print_report([plan_rows(plan)], "\n".join(words), None)
            if team.executor.name == "slurm":
                print("\n".join(slurm_script(out / size, team) for size in plans))
        return int(bool(plan.differs))
    made = make_table(table, tier, plans, out, team, options.task_data, options.json)
    if not is_first():
        return 0
    if options.json:
        print(to_json(made))
    else:
        print_report([table_rows(made)], verdict(made), None, f"table: {(out / 'table.json').resolve()}")
    return int(bool(made.same))
