"""`fathom compare RECIPE --arms vanilla,depth_attention [key=value ...]`, `fathom compare DIRECTORY`, or a paper's
table: `fathom compare papers/NAME/TABLE`.

`experiments/compare.py` runs the plan, and names the files that do the parts. Next to it, `arms.py` decides budgets and
what an arm may override, `plan.py` refuses runs of another recipe, `differences.py` computes the report and its
verdict, and `compare_page.py` shows them. `cli/paper.py` runs a paper's table.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.checkpoints.file_names import PAGE, REPORT
from fathom.cli.paper import refuse_tables_options
from fathom.cli.paper import run as run_table
from fathom.cli.parser import Parser, add_recipe, add_running, refuse
from fathom.cli.team import recipe_words, refuse_unless_slurm, team_of
from fathom.errors import SettingsError
from fathom.recipe import find_recipe, load_recipe
from fathom.report.files import require_directory
from fathom.report.results import to_json
from fathom.report.tables import print_report

EXAMPLES = (
    "fathom compare tiny --arms vanilla,loop --equal flops --dry-run",
    "fathom compare tiny --arms vanilla,depth_attention --seeds 3 --workers 2",
    "fathom compare runs/tiny-compare",
    "fathom compare 60m --arms vanilla,loop --executor slurm --workers 6",
    "fathom compare papers/depth-attention/table1 --tier full --dry-run",
)


AS_PLANNED = "a comparison resumes as planned; name its recipe to plan another one"
PLANNING = ("--arms", "--out", "--seeds", "--equal", "--pairs", "--contrasts", "--tier")


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    add_recipe(parser)
    parser.add_argument(
        "--arms",
        help="variants to compare, comma-separated: MECHANISM or NAME=MECHANISM[;key=value...]; the first is "
        "the control",
    )
    parser.add_argument(
        "--seeds", type=int, help="number of seeds per arm (default: 3; for a paper's table, as in its file)"
    )
    parser.add_argument(
        "--equal",
        choices=("tokens", "flops", "trips"),
        default="tokens",
        help="the training budget that all arms share: tokens, FLOPs, or tokens times loop iterations",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        default=12,
        help="rounds in which each arm A is timed next to the control B, in the order A B B A; 0 for none "
        "(default: 12)",
    )
    parser.add_argument(
        "--contrasts",
        metavar="SUMS",
        default="",
        help="sums of the arms' losses, such as an interaction, to test in addition to the differences from the "
        "control: comma-separated NAME=ARM - ARM - ARM + ARM",
    )
    add_running(parser, "compare, after the recipe's name")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs, FLOPs and hours of every arm, and stop before training"
    )
    table = parser.add_argument_group("a paper's table")
    table.add_argument(
        "--tier",
        choices=("tiny", "full"),
        help="tiny: models that train in minutes on two cores (default); full: the paper's sizes",
    )
    table.add_argument(
        "--task-data",
        type=Path,
        metavar="DIR",
        help="a folder with the documents of the paper's evaluation tasks",
    )
    table.add_argument(
        "--gpu", metavar="NAME", help="GPU type for which --dry-run estimates the days of training (default: H100)"
    )
    running = ("--retry-failed", "--task-data")
    parser.mode("--report", "runs nothing", *running, "--dry-run", "--workers", "--threads", "--executor")
    parser.mode("--dry-run", "runs nothing", *running)
    parser.needs("--dry-run", "--gpu")


def run(options: Namespace) -> int:
    """Plan the comparison, train the runs that are missing, and print the result. The directory of a comparison,
    instead of a recipe, resumes it."""
    from fathom.experiments.compare import carry_out, rewrite_report, slurm_script
    from fathom.experiments.compare_page import tables
    from fathom.experiments.dry_run import comparison_budget, comparison_rows
    from fathom.experiments.plan import Plan, check, make_plan
    from fathom.experiments.scheduler import check_processes, is_first
    from fathom.settings import kind_of, read_values

    check_processes("compare", options.workers, options.threads)
    team, overrides = team_of(options), recipe_words(options.overrides)
    retry = options.retry_failed
    source = Path(options.recipe)
    if source.is_dir():
        if overrides:
            raise SettingsError(f"{source}: {AS_PLANNED}")
        refuse(options.given, PLANNING, f"has no meaning with {source}: {AS_PLANNED}")
        out, plan = source, Plan.read(source)
        check(plan, out)
    else:
        source = find_recipe(source)
        if kind_of(read_values(source), "train") == "paper":
            return run_table(options, source)
        refuse_tables_options(options)
        if not options.arms:
            raise SettingsError("--arms is missing; for example --arms vanilla,uniform_depth,depth_attention")
        out = options.out or Path("runs") / f"{source.stem}-compare"
        recipe = load_recipe(source, overrides)
        seeds = 3 if options.seeds is None else options.seeds
        plan = make_plan(recipe, options.arms, seeds, options.equal, options.pairs, out, options.contrasts)
    if options.dry_run:
        refuse_unless_slurm(options)
        require_directory(out, SettingsError)
        budget = comparison_budget(plan)
        if options.json:
            print(to_json(budget))
        else:
            print_report([comparison_rows(budget)], str(budget), None)
            if team.executor.name == "slurm":
                print(slurm_script(out, team))
        return 0
    if options.report:
        report = rewrite_report(plan, out)
    else:
        report = carry_out(plan, out, team, options.json, retry)
    if not is_first():
        return 0
    if options.json:
        print((out / REPORT).read_text(encoding="utf-8"), end="")
    else:
        print_report(tables(report), report.verdict, out / PAGE)
    return 0
