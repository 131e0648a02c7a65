"""What `fathom compare` does with its words."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from fathom.comparison.work import PLAN, Plan, check, compare, make_plan, refuse_torchrun
from fathom.recipe import RecipeError, load_recipe


def run_compare(options: Namespace) -> int:
    """Plan, run what is missing, and print; an existing comparison's directory in place of a recipe goes on with it."""
    refuse_torchrun()
    retry = getattr(options, "retry_failed", False)
    if retry and options.report:
        raise RecipeError("--retry-failed trains, --report does not: give one of them")
    source = Path(options.recipe)
    if source.is_dir():
        if options.arms or options.overrides or options.out:
            raise RecipeError(f"{source}: a comparison goes on as it was planned; give its recipe to plan another")
        out, plan = source, Plan.read(source)
        check(plan, out)
    else:
        if not options.arms:
            raise RecipeError("--arms is missing; for example --arms vanilla,uniform_depth,depth_attention")
        out = options.out or Path("runs") / f"{source.stem}-compare"
        recipe = load_recipe(source, options.overrides)
        plan = make_plan(recipe, options.arms, options.seeds, options.equal, options.pairs, out)
    if options.report:
        report = _rewrite(plan, out)
    else:
        report = compare(plan, out, options.workers, options.threads, options.json, retry)
    if options.json:
        print((out / "report.json").read_text(encoding="utf-8"), end="")
    else:
        show(report, out)
    return 0


def show(report: dict[str, Any], out: Path) -> None:
    """The tables, the sentence, and where the rest is."""
    from rich.console import Console

    from fathom.comparison.page import tables

    console = Console(highlight=False)
    for table in tables(report):
        console.print(table, "")
    console.print(report["verdict"], markup=False)
    console.print(f"\nreport: {(out / 'report.html').resolve()}", markup=False, soft_wrap=True)


def _rewrite(plan: Plan, out: Path) -> dict[str, Any]:
    """The report from what is finished, its provenance that of the last whole report where there is one."""
    from fathom.comparison.findings import summarize
    from fathom.comparison.page import write_report
    from fathom.report.provenance import provenance

    if not (out / PLAN).exists():
        raise RecipeError(f"{out}: holds no comparison ({PLAN} is missing)")
    source = provenance()
    if (out / "report.json").exists():
        before = json.loads((out / "report.json").read_text(encoding="utf-8"))
        source = {key: before[key] for key in source}
    report = summarize(plan, out, source)
    write_report(report, out)
    return report
