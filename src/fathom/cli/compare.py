"""`fathom compare RECIPE --arms vanilla,depth_attention [key=value ...]`, or `fathom compare DIRECTORY`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fathom.checkpoints.layout import PAGE, REPORT
from fathom.cli.parser import Parser, add_recipe
from fathom.errors import SettingsError
from fathom.recipe import find_recipe, load_recipe

if TYPE_CHECKING:
    from fathom.experiments.compare_results import ComparisonReport


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
    parser.add_argument("--out", type=Path, help="directory (default: runs/ and the recipe's name, -compare)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes on this machine; others may join")
    parser.add_argument("--threads", type=int, help="CPU threads per worker (default: 1 with several workers)")
    parser.add_argument("--report", action="store_true", help="only rewrite the report from finished runs")
    parser.add_argument(
        "--retry-failed", action="store_true", help="resume runs that diverged; otherwise they are excluded"
    )
    parser.add_argument("--json", action="store_true", help="print the report for a program")


def run(options: Namespace) -> int:
    """Plan, run what is missing, and print. The directory of a comparison, instead of a recipe, resumes it."""
    from fathom.experiments.compare import carry_out, refuse_torchrun, rewrite_report
    from fathom.experiments.compare_page import tables
    from fathom.experiments.plan import Plan, check, make_plan

    refuse_torchrun()
    retry = options.retry_failed
    if retry and options.report:
        raise SettingsError("--retry-failed trains and --report does not: use one of them")
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
    if options.report:
        report = rewrite_report(plan, out)
    else:
        report = carry_out(plan, out, options.workers, options.threads, options.json, retry)
    if options.json:
        print((out / REPORT).read_text(encoding="utf-8"), end="")
    else:
        _show(report, out, tables(report))
    return 0


def _show(report: ComparisonReport, out: Path, found: Iterable[Table]) -> None:
    """The tables, the verdict, and the path of the full report."""
    console = Console(highlight=False)
    for table in found:
        console.print(table, "")
    console.print(report.verdict, markup=False)
    console.print(f"\nreport: {(out / PAGE).resolve()}", markup=False, soft_wrap=True)
