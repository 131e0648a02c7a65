"""`fathom ladder LADDER.yaml --arms vanilla,depth_attention --out DIR [key=value ...]`, or `fathom ladder DIR`.

`experiments/ladder.py` runs the stages, and names the files that do the parts. Next to it, `rungs.py` decides sizes,
recipes, seeds and which arms are refused, `dry_run.py` is the dry run, `stages.py` decides the next runs and seals the
prediction, `tuning.py` finds the best learning rate, and `multipliers.py` computes the report and its verdict.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from fathom.checkpoints.file_names import PAGE, REPORT
from fathom.cli.parser import Parser, add_recipe, add_running
from fathom.cli.team import recipe_words, refuse_unless_slurm, team_of
from fathom.errors import SettingsError
from fathom.experiments.ladder_rules import Rules, ladders_folder
from fathom.recipe import describe as recipe_keys
from fathom.report.files import require_directory
from fathom.settings import describe

STAGES = ("tune", "rungs", "seal", "last", "check")

EXAMPLES = (
    "fathom ladder cpu --arms vanilla,uniform_depth --dry-run",
    "fathom ladder runs/cpu-ladder --until seal",
    "fathom ladder runs/cpu-ladder --executor ray --workers 8",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    packaged = ", ".join(sorted(path.stem for path in ladders_folder().glob("*.yaml")))
    ladder = f"a ladder's YAML file, or one that comes with Fathom: {packaged}"
    rows = lambda: [*describe(Rules, "ladder."), *recipe_keys()]  # noqa: E731
    add_recipe(parser, what=f"{ladder}; or the directory of a ladder to resume", rows=rows)
    parser.add_argument(
        "--arms",
        help=(
            "variants to compare, comma-separated: MECHANISM or NAME=MECHANISM[;key=value...]; the first is the "
            "control; the key ladder.layers=1/3 gives an arm a third of the control's layers"
        ),
    )
    add_running(parser, "ladder, after the ladder file's name")
    parser.add_argument(
        "--seeds",
        metavar="N[,N...]",
        help="new number of seeds for each model size (or one number for all sizes) of an existing ladder, for all "
        "arms: none smaller than before, at least one larger; resumes the ladder, and the report records the date",
    )
    parser.add_argument(
        "--until",
        choices=STAGES,
        default=STAGES[-1],
        help="the last stage to run: tune (learning rates), rungs (all model sizes but a sealed largest one), seal "
        "(the prediction for that one), last (the sealed size) or check (its learning rate)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the runs, FLOPs, hours and expected confidence intervals, and stop before training",
    )

    running = ("--retry-failed", "--seeds", "--until")
    parser.mode("--report", "runs nothing", *running, "--dry-run", "--workers", "--threads", "--executor")
    parser.mode("--dry-run", "runs nothing", *running)


def run(options: Namespace) -> int:
    """Plan the ladder, train the runs that are missing, and print the result. The directory of a ladder, instead of a
    file, resumes it."""
    from fathom.experiments.dry_run import budget, budget_rows
    from fathom.experiments.ladder import add_seeds, climb, rewrite, slurm_script
    from fathom.experiments.ladder_page import tables
    from fathom.experiments.rungs import Ladder, checked, find_ladder, load_ladder
    from fathom.experiments.scheduler import check_processes
    from fathom.report.files import asdict
    from fathom.report.tables import print_report

    check_processes("ladder", options.workers, options.threads)
    team, overrides = team_of(options), recipe_words(options.overrides)
    source = Path(options.recipe)
    if source.is_dir():
        if options.arms or overrides or options.out:
            raise SettingsError(
                f"{source}: a planned ladder resumes without --arms, --out and overrides; to plan another ladder, name "
                "a ladder file"
            )
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
        ladder = load_ladder(source, options.arms, overrides, out)
    if options.dry_run:
        refuse_unless_slurm(options)
        require_directory(out, SettingsError)
        found = budget(ladder)
        if options.json:
            print(json.dumps(asdict(found), indent=2))
        else:
            print_report([budget_rows(found)], str(found), None)
            if team.executor.name == "slurm":
                print(slurm_script(out, team))
        return 0
    if options.report:
        report = rewrite(ladder, out)
    else:
        report = climb(ladder, out, team, options.until, options.json, options.retry_failed)
    if options.json:
        print((out / REPORT).read_text(encoding="utf-8"), end="")
        return 0
    sealed, words = report.prediction, ""
    if sealed is not None and any(row.observed is None for row in sealed.rows):
        words = (
            f"prediction of the largest size sealed: {sealed.sha256} (publish it before the largest size is trained)"
        )
    print_report(tables(report), report.verdict, out / PAGE, words)
    return 0


def _numbers(text: str) -> list[int]:
    """`5,3,3`"""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise SettingsError(f"--seeds {text}: allowed: whole numbers with commas between") from None
