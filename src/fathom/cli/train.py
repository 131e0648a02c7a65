"""`fathom train RECIPE [key=value ...]`, or resume a run, or branch it.

The exit code of a stopped run is set here. In `training/`, `loop.py` resumes a run, handles signals and refuses a run
of another recipe, `build.py` makes the steps, `first_steps.py` checks the first ones of a run that continues a
checkpoint, `branching.py` decides what a branch may change, `parallel.py` chooses device and strategy,
`same_tokenizer.py` refuses a corpus whose tokenizer is not the checkpoint's, and `probe.py` reports a probe of learning
rates.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.checkpoints.file_names import RECIPE
from fathom.cli.following import after_train, following
from fathom.cli.parser import Parser, add_recipe
from fathom.errors import SettingsError
from fathom.recipe import Recipe, find_recipe, load_recipe
from fathom.report.files import require_directory
from fathom.report.results import to_json

if TYPE_CHECKING:
    from fathom.training import Branch
    from fathom.training.estimate import Estimate


EXIT_CODES = """exit code:
  0    the run is finished and wrote RUN/result.json
  1    the run cannot continue (and torchrun's, if any rank does not end with 0)
  2    the recipe or the directory is refused
  130  Ctrl-C (SIGINT) stopped it: it wrote a checkpoint, and the same command
       resumes it; a second Ctrl-C, three seconds later, ends it at once
  143  SIGTERM stopped it, in the same way"""

EXAMPLES = (
    "fathom train tiny data.directory=data/mine --run runs/mine",
    "fathom train runs/mine",
    "fathom train --from runs/mine@step-120 --run runs/longer train.steps=480",
    "fathom train tiny --dry-run",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    add_recipe(parser, runs=True)
    parser.add_argument(
        "--run",
        "--out",  # torchrun reads --run as an abbreviation of its own --run-path
        dest="run_dir",
        type=Path,
        help="run directory (default: runs/NAME, after the recipe's name); under torchrun, write --out instead "
        "of --run",
    )
    parser.add_argument(
        "--from",
        dest="origin",
        metavar="RUN[@step-N]",
        help="branch: start --run from the weights, optimizer state and data position of another run's checkpoint",
    )
    parser.add_argument(
        "--cooldown",
        type=int,
        metavar="STEPS",
        help="with --from: decay the learning rate over this many steps, then end the run",
    )
    parser.add_argument("--new", action="store_true", help="start a new run: refuse a directory that has a run already")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved recipe and its cost, check the corpus, and stop before training",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    parser.epilog = EXIT_CODES
    parser.needs("--from", "--cooldown")
    parser.mode("--dry-run", "trains nothing", "--new")


def run(options: Namespace) -> int:
    """Train, or print the cost."""
    from fathom.checkpoints.find import checkpoint_steps
    from fathom.experiments.run_page import Extras, read_run, write_run_page
    from fathom.training import branch, train
    from fathom.training.build import check_training
    from fathom.training.estimate import estimate
    from fathom.training.loop import require_place

    change: Branch | None = None
    place: Path | None = options.run_dir
    words = [word for word in (options.recipe, *options.overrides) if word is not None]
    if options.origin is not None:
        if options.run_dir is None:
            raise SettingsError(f"--from {options.origin} needs --run, a new directory")
        change = branch(options.origin, options.run_dir, words, options.cooldown)
        recipe = change.recipe
    elif options.recipe is None:
        raise SettingsError(
            "the following arguments are required: recipe, or --from (fathom train --help lists the options)"
        )
    elif (Path(options.recipe) / RECIPE).is_file():
        if options.run_dir is not None:
            raise SettingsError(
                f"--run {options.run_dir}: {options.recipe} is already a run; leave --run out to resume it, or branch "
                f"it with --from {options.recipe}"
            )
        place = Path(options.recipe)
        recipe = load_recipe(place / RECIPE, options.overrides)
    else:
        place = place or Path("runs") / find_recipe(options.recipe).stem
        recipe = load_recipe(options.recipe, options.overrides)
    if options.dry_run:
        if place is not None:
            require_place(recipe, place)
            require_directory(place, SettingsError)
        _show_cost(recipe, estimate(recipe), options.json, change)
        # The cost does not need the corpus, so a missing corpus is reported last.
        begun = change is not None or (place is not None and bool(checkpoint_steps(place)))
        check_training(recipe, begins=not begun)
        return 0

    result = train(change or recipe, place, resume=not options.new, command=_command(options))
    evaluation = result.evaluation
    code = 0 if result.finished else 128 + (result.signal or signal.SIGTERM)  # another rank may have got it
    if os.environ.get("RANK", "0") != "0":
        return code  # only the first rank prints
    if options.json:
        print(to_json(result))
    elif result.finished:
        score = "the corpus has no validation split to score"
        if evaluation is not None:
            score = (
                f"held-out loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.2f}, "
                f"{evaluation.bits_per_byte:.4f} bits per byte{evaluation.how}"
            )
        page = write_run_page(read_run(result.run_dir), Extras(following=after_train(result, recipe)))
        print(f"{result.run_dir}: {result.step} steps; {score}\nreport: {page}")
        print(following(*after_train(result, recipe)))
    return code


def _command(options: Namespace) -> str:
    """The command as typed, for the history of a branch."""
    flags = {"--from": options.origin, "--run": options.run_dir, "--cooldown": options.cooldown}
    given = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    recipe = [] if options.recipe is None else [options.recipe]
    return shlex.join(["fathom", "train", *given, *recipe, *options.overrides])


def _show_cost(recipe: Recipe, cost: Estimate, as_json: bool, change: Branch | None) -> None:
    """Print the resolved recipe and its estimated cost."""
    if as_json:
        changed = change.changes if change is not None and change.begins else {}
        changes = {"changes": {key: list(pair) for key, pair in changed.items()}} if changed else {}
        print(json.dumps({"recipe": recipe.to_dict(), **asdict(cost), **changes}))
        return
    gib = 2**30
    active = "" if cost.active_parameters == cost.parameters else f", {cost.active_parameters:,} active per token"
    beside = " with adapters" if recipe.lora.rank is not None else ""
    trained = "" if cost.trained_parameters == cost.parameters else f", {cost.trained_parameters:,} trained{beside}"
    print(recipe.to_yaml())
    least, mean, most = (f"{value:.3g}" for value in cost.training_multiple)
    drawn = "" if least == most else f" ({least} to {most}, depending on the iterations drawn)"
    taught = "" if recipe.distill.teacher is None else ", with the teacher's forward pass"
    rows = {
        "mechanism": cost.mechanism,
        "parameters": f"{cost.parameters:,}{active}{trained}",
        "FLOPs per token": f"{cost.flops_per_token:,.0f} forward, mean over a context of "
        f"{recipe.data.sequence_length:,} tokens; in training {mean} x vanilla's{drawn}{taught}",
        "cache per token": f"{cost.cache_bytes_per_token:,} bytes (bf16)",
        "tokens": f"{cost.tokens:,}" + ("" if cost.epochs is None else f", {cost.epochs:.3g} epochs of the corpus"),
        "FLOPs": f"{cost.training_flops:.3g}",
        "ranks": f"{cost.ranks}",
        "memory per rank": f"{cost.state_bytes / gib:.2f} GiB of weights, gradients and optimizer state, "
        f"and about {cost.activation_bytes / gib:.2f} GiB of activations; about {cost.evaluation_bytes / gib:.2f} GiB "
        "instead of the activations during evaluation",
    }
    if cost.collections:
        rows["epochs"] = ", ".join(f"{name} {value:.3g}" for name, value in cost.collections.items())
    if cost.compressions:
        rows["compressions"] = f"{cost.compressions} per sequence, {recipe.kvcache.method}"
    if cost.changed:
        rows["from checkpoint"] = cost.changes_in_words
    lines = list(rows.items())
    if change is not None and change.begins:
        lines += [("change", text) for text in (*change.changes_in_words, str(change))]
    for group in cost.groups:
        rates = f"learning rate {group.lr:g}, weight decay {group.weight_decay:g}"
        lines.append(("group", f"{group.pattern}: {group.parameters:,} parameters, {rates}"))
    for name, value in lines:
        print(f"{name:<16} {value}")
