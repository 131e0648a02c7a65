"""`fathom corpus RECIPE.yaml [key=value ...]`."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.cli.parser import Parser, add_keys
from fathom.corpus.recipe import CorpusRecipe, load_corpus_recipe
from fathom.settings import describe

if TYPE_CHECKING:
    from fathom.corpus.pipeline import Preview


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override values of the file")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="output directory (default: corpora/ and the recipe's name)"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes; short for executor.workers=N")
    parser.add_argument("--dry-run", action="store_true", help="print inputs, stages and budget, and stop")
    parser.add_argument("--json", action="store_true", help="print the result for a program")
    add_keys(parser, lambda: describe(CorpusRecipe))


def run(options: Namespace) -> int:
    """Build the corpus, or with `--dry-run` print the plan."""
    from fathom.corpus.pipeline import build, preview

    words = [*options.overrides, *([f"executor.workers={options.workers}"] if options.workers is not None else [])]
    recipe = load_corpus_recipe(options.recipe, words)
    directory = options.out or Path("corpora") / options.recipe.stem
    if options.dry_run:
        found = preview(recipe, directory)
        print(json.dumps(found) if options.json else _words(found))
        return int("infeasible" in found["budget"])
    report = build(recipe, directory)
    print(json.dumps(report.to_dict()) if options.json else report)
    return 0


def _words(found: Preview) -> str:
    """A preview as text."""
    lines = [f"recipe {found['recipe']}"]
    for name, facts in found["inputs"].items():
        lines.append(f"  {name}: {facts['files']:,} files, {facts['bytes'] / 1e6:,.1f} MB")
    width = max(map(len, found["stages"]))
    lines += [f"  {name:<{width}}  {stage['state']}  {stage.get('key', '')}" for name, stage in found["stages"].items()]
    budget = found["budget"]
    origin = "counted" if budget["counted"] else "estimated from the size of the inputs"
    if "infeasible" in budget:
        lines.append(f"infeasible, by tokens {origin}: {budget['infeasible']}")
    else:
        epochs = ", ".join(f"{name} {value:.2f}" for name, value in budget["epochs"].items())
        lines.append(f"a budget of {budget['tokens']:,} tokens reads, in epochs ({origin}): {epochs}")
    return "\n".join(lines)
