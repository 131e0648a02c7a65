"""`fathom ladder LADDER.yaml --arms vanilla,depth_attention --out DIR [key=value ...]`, or `fathom ladder DIR`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from rich.console import Console

from fathom.checkpoints.layout import PAGE, REPORT
from fathom.cli.parser import Parser, add_recipe
from fathom.errors import SettingsError
from fathom.experiments.rules import Rules, ladders_folder
from fathom.recipe import describe as recipe_keys
from fathom.settings import describe

STAGES = ("tune", "rungs", "seal", "last", "check")


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    packaged = ", ".join(sorted(path.stem for path in ladders_folder().glob("*.yaml")))
    ladder = f"a ladder's YAML file, or one that comes with Fathom: {packaged}"
    rows = lambda: [*describe(Rules, "ladder."), *recipe_keys()]  # noqa: E731
    add_recipe(parser, what=f"{ladder}; or the directory of a ladder to resume", rows=rows)
    parser.add_argument(
        "--arms",
        help=(
            "comma-separated MECHANISM or NAME=MECHANISM[;key=value...]; the first is the control; ladder.layers=1/3 "
            "gives an arm that share of the layers"
        ),
    )
    parser.add_argument("--out", type=Path, help="directory (default: runs/ and the ladder file's name)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes on this machine; others may join")
    parser.add_argument("--threads", type=int, help="CPU threads per worker (default: 1 with several workers)")
    parser.add_argument(
        "--seeds",
        metavar="N[,N...]",
        help="add seeds to the model sizes of an existing ladder, for all arms, and resume; the report records when",
    )
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage to run")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the runs, FLOPs, hours and expected intervals, and stop"
    )
    parser.add_argument("--report", action="store_true", help="only rewrite the report from finished runs")
    parser.add_argument("--retry-failed", action="store_true", help="resume runs that diverged")
    parser.add_argument("--json", action="store_true", help="print the report for a program")


def run(options: Namespace) -> int:
    """Plan, run what is missing, and print. The directory of a ladder, instead of a file, resumes it."""
    from fathom.experiments.budget import budget, budget_rows
    from fathom.experiments.ladder import add_seeds, climb, rewrite
    from fathom.experiments.ladder_page import tables
    from fathom.experiments.rungs import Ladder, checked, find_ladder, load_ladder
    from fathom.report.files import asdict
    from fathom.report.tables import terminal_table

    if options.report and (options.retry_failed or options.dry_run):
        raise SettingsError("--report excludes options that run something")
    for name, count in (("--workers", options.workers), ("--threads", options.threads)):
        if count is not None and count < 1:
            raise SettingsError(f"{name} {count}: allowed: 1 or more")
    if options.seeds is not None and (options.report or options.dry_run):
        raise SettingsError("--seeds adds runs and excludes --report and --dry-run")
    source, console = Path(options.recipe), Console(highlight=False)
    if source.is_dir():
        if options.arms or options.overrides or options.out:
            raise SettingsError(f"{source}: a ladder resumes as planned; name its file to plan another one")
        out, ladder = source, checked(Ladder.read(source), begins=False)
        if options.seeds is not None:
            ladder = add_seeds(out, _numbers(options.seeds))
    else:
        if options.seeds is not None:
            raise SettingsError("--seeds needs the directory of a ladder; in a new plan write ladder.seeds=[...]")
        source = find_ladder(source)
        if not options.arms:
            raise SettingsError("--arms is missing; for example --arms vanilla,uniform_depth,depth_attention")
        out = options.out or Path("runs") / f"{source.stem}-ladder"
        ladder = load_ladder(source, options.arms, options.overrides, out)
    if options.dry_run:
        found = budget(ladder)
        if options.json:
            print(json.dumps(asdict(found), indent=2))
        else:
            console.print(terminal_table(*budget_rows(found)), "")
            console.print(str(found), markup=False)
        return 0
    if options.report:
        report = rewrite(ladder, out)
    else:
        report = climb(ladder, out, options.workers, options.threads, options.until, options.json, options.retry_failed)
    if options.json:
        print((out / REPORT).read_text(encoding="utf-8"), end="")
        return 0
    for table in tables(report):
        console.print(table, "")
    console.print(report.verdict, markup=False)
    sealed = report.prediction
    if sealed is not None and any(row.observed is None for row in sealed.rows):
        console.print(
            f"\nprediction of the largest size sealed: {sealed.sha256} (publish it before the largest size is trained)",
            markup=False,
            soft_wrap=True,
        )
    console.print(f"\nreport: {(out / PAGE).resolve()}", markup=False, soft_wrap=True)
    return 0


def _numbers(text: str) -> list[int]:
    """`5,3,3`"""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SettingsError(f"--seeds {text}: allowed: whole numbers with commas between") from None
