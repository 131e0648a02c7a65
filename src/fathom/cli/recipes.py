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


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("action", nargs="?", choices=("list", "copy"), default="list", help="default: list")
    parser.add_argument("name", nargs="?", help="of the recipe to copy")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where to (default: NAME.yaml, here)")
    parser.add_argument("--json", action="store_true", help="print the result for a program")


def run(options: Namespace) -> int:
    """List them, or copy one to be edited."""
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
        print(textwrap.fill(f"{name:<{width}}{recipe['summary']}", line_width(), subsequent_indent=" " * width))
    return 0


def _copy(options: Namespace) -> int:
    """Write one recipe's file, comments and all; nothing is overwritten."""
    if options.name is None:
        raise SettingsError("which recipe? fathom recipes copy NAME [--to FILE]")
    source = find_recipe(options.name)
    target = options.to or Path(source.name)
    if target.exists():
        raise SettingsError(f"{target} exists; give --to another file")
    target.write_bytes(source.read_bytes())
    print(json.dumps({"path": str(target)}) if options.json else target)
    return 0
