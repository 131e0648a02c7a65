"""`fathom report RUN`: a page for a run; for a folder of runs, a page for each run and a page that lists them."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.checkpoints.file_names import LADDER, PLAN, RECIPE
from fathom.checkpoints.places import is_page, require_file
from fathom.cli.following import using
from fathom.cli.parser import Parser
from fathom.errors import SettingsError
from fathom.report.results import to_json

if TYPE_CHECKING:
    from fathom.experiments.run_page import Sample

EXAMPLES = (
    "fathom report runs/mine",
    "fathom report runs/mine --against runs/other --prompt 'The sea is'",
    "fathom report runs",
)
LENGTH = 60
"""Tokens of a sample."""


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=Path, help="a run's directory, finished or not, or a folder of runs")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="a second run to plot in the same charts; the page lists how its settings and results differ",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="prompt that the trained model continues and the lens analyses on the page; may be repeated",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        metavar="FILE",
        help="HTML file to write (default: report.html in the run's directory)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """Read the run or the folder of runs, write its report page, and print the page's path."""
    from fathom.checkpoints.find import finished_model
    from fathom.experiments.run_page import (
        INDEX,
        Extras,
        difference,
        read_run,
        runs_in,
        write_front_page,
        write_run_page,
    )

    if not options.run.is_dir():
        raise SettingsError(f"{options.run}: {'a file, not a run' if options.run.exists() else 'no such directory'}")
    for command, plan in (("compare", PLAN), ("ladder", LADDER)):
        if (options.run / plan).is_file():
            writes = shlex.join(["fathom", command, str(options.run), "--report"])
            raise SettingsError(f"{options.run} is the directory of fathom {command}: `{writes}` writes its report")
    if not (options.run / RECIPE).is_file() and runs_in(options.run):
        given = [flag for flag, value in _single(options).items() if value]
        if given:
            raise SettingsError(f"{given[0]} is about one run, and {options.run} is a folder of runs")
        require_file(options.run / INDEX, "a page of Fathom's", is_page)
        print(write_front_page(options.run, lambda line: print(line, file=sys.stderr)))
        return 0
    lens = (options.out or options.run / "report.html").with_name("report-lens.html")
    for page in filter(None, (options.out, lens if options.prompt else None)):
        require_file(page, "a page of Fathom's", is_page)
    found = read_run(options.run)
    extras = Extras(against=None if options.against is None else read_run(options.against))
    model = finished_model(options.run)
    if options.prompt and model is None:
        raise SettingsError(f"--prompt needs a finished model, and {options.run} has none")
    if model is not None:
        extras.following = [using(options.run, model)]
    if options.prompt:
        lens.parent.mkdir(parents=True, exist_ok=True)
        extras.samples, extras.lens = _samples(options.run, options.prompt, lens), lens
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    page = write_run_page(found, extras, options.out)
    gap = [] if extras.against is None else difference(found, extras.against)
    if options.json:
        cost = dataclasses.asdict(found.cost)
        told = {"against": gap} if extras.against is not None else {}
        print(to_json({"page": page, "verdict": found.verdict, "result": found.result, "cost": cost, **told}))
    else:
        print("\n".join([found.verdict, *gap, str(page)]))
    return 0


def _single(options: Namespace) -> dict[str, object]:
    """The options that are allowed only for a single run, not for a folder of runs."""
    return {"--against": options.against, "--prompt": options.prompt, "--out": options.out, "--json": options.json}


def _samples(directory: Path, prompts: list[str], lens: Path) -> list[Sample]:
    """Generate a greedy continuation of each prompt, and write the `fathom lens` page of all prompts."""
    from fathom.checkpoints.open import open_checkpoint
    from fathom.experiments.run_page import Sample
    from fathom.inference.generate import generate
    from fathom.inference.settings import Sampling
    from fathom.lens.look import look
    from fathom.lens.page import lens_page
    from fathom.report.files import write_atomically

    model, tokenizer = open_checkpoint(directory)
    greedy = Sampling(max_new_tokens=LENGTH, temperature=0)
    made = [Sample(prompt, generate(model, tokenizer, prompt, greedy).text) for prompt in prompts]
    write_atomically(lens, lens_page(look(model, tokenizer, "\n".join(prompts), name=directory.name)))
    return made
