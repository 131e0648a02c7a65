"""`fathom compare RECIPE --arms vanilla,depth_attention [key=value ...]`, or `fathom compare DIRECTORY`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from fathom.checkpoints.layout import PAGE, REPORT
from fathom.cli.parser import Parser, add_recipe, add_running
from fathom.errors import SettingsError
from fathom.recipe import find_recipe, load_recipe
from fathom.report.files import require_directory
from fathom.report.results import to_json
from fathom.report.tables import print_report

EXAMPLES = (
    "fathom compare tiny --arms vanilla,loop --equal flops --dry-run",
    "fathom compare tiny --arms vanilla,depth_attention --seeds 3 --workers 2",
    "fathom compare runs/tiny-compare",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    add_recipe(parser)
    parser.add_argument(
        "--arms", help="comma-separated MECHANISM or NAME=MECHANISM[;key=value...]; the first is the control"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs per arm (default: 3)")
    parser.add_argument(
        "--equal",
        choices=("tokens", "flops", "trips"),
        default="tokens",
        help="the training budget that all arms share: tokens, FLOPs, or tokens times loop iterations",
    )
    parser.add_argument(
        "--pairs", type=int, default=12, help="timing rounds per arm, in the order A B B A; 0 for none (default: 12)"
    )
    add_running(parser, "the recipe's name, -compare")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, FLOPs and hours of every arm, and stop")


def run(options: Namespace) -> int:
    """Plan, run what is missing, and print. The directory of a comparison, instead of a recipe, resumes it."""
    from fathom.experiments.budget import comparison_budget, comparison_rows
    from fathom.experiments.compare import carry_out, rewrite_report
    from fathom.experiments.compare_page import tables
    from fathom.experiments.plan import Plan, check, make_plan
    from fathom.experiments.schedule import check_processes

    check_processes("compare", options.workers, options.threads)
    retry = options.retry_failed
    if options.report and (retry or options.dry_run):
        raise SettingsError("--report excludes options that run something")
    source = Path(options.recipe)
    if source.is_dir():
        if options.arms or options.overrides or options.out:
            raise SettingsError(f"{source}: a comparison resumes as planned; name its recipe to plan another one")
        out, plan = source, Plan.read(source)
        check(plan, out)
    else:
        source = find_recipe(source)
        if not options.arms:
            raise SettingsError("--arms is missing; for example --arms vanilla,uniform_depth,depth_attention")
        out = options.out or Path("runs") / f"{source.stem}-compare"
        recipe = load_recipe(source, options.overrides)
        plan = make_plan(recipe, options.arms, options.seeds, options.equal, options.pairs, out)
    if options.dry_run:
        require_directory(out, SettingsError)
        budget = comparison_budget(plan)
        if options.json:
            print(to_json(budget))
        else:
            print_report([comparison_rows(budget)], str(budget), None)
        return 0
    if options.report:
        report = rewrite_report(plan, out)
    else:
        report = carry_out(plan, out, options.workers, options.threads, options.json, retry)
    if options.json:
        print((out / REPORT).read_text(encoding="utf-8"), end="")
    else:
        print_report(tables(report), report.verdict, out / PAGE)
    return 0
