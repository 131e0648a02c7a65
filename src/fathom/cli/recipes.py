"""`fathom recipes`, and `fathom recipes copy NAME [--to FILE]`."""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from pathlib import Path

from fathom.cli.parser import Parser
from fathom.errors import SettingsError
from fathom.recipe import find_recipe, summary_of
from fathom.report.tables import line_width
from fathom.settings import packaged_recipes

EXAMPLES = (
    "fathom recipes",
    "fathom recipes copy tiny --to mine.yaml",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", nargs="?", choices=("list", "copy"), default="list", help="default: list")
    parser.add_argument("name", nargs="?", help="name of the recipe to copy")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="output file (default: NAME.yaml in the current directory)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """List the recipes, or copy one for editing."""
    if options.action == "copy":
        return _copy(options)
    if options.name or options.to:
        raise SettingsError("to copy a recipe: fathom recipes copy NAME [--to FILE]")
    found = {name: {"summary": summary_of(path), "path": str(path)} for name, path in packaged_recipes().items()}
    if options.json:
        print(json.dumps(found))
        return 0
    width = max(map(len, found)) + 2
    for name, recipe in found.items():
        print(
            textwrap.fill(
                f"{name:<{width}}{recipe['summary']}",
                line_width(),
                subsequent_indent=" " * width,
                break_on_hyphens=False,
            )
        )
    return 0


def _copy(options: Namespace) -> int:
    """Copy a recipe's file with its comments; never overwrite."""
    if options.name is None:
        raise SettingsError("a recipe's name is missing: fathom recipes copy NAME [--to FILE]")
    source = find_recipe(options.name)
    target = options.to or Path(source.name)
    if target.exists():
        raise SettingsError(f"{target} exists; name another file with --to")
    target.write_bytes(source.read_bytes())
    print(json.dumps({"path": str(target)}) if options.json else target)
    return 0
