"""`fathom mechanisms [--config DIR|RECIPE]`.

`experiments/catalogue.py` makes the table of costs, and `models/cost.py` computes them. The star marks mechanisms that
declare `closed` (`models/axes/roles.py`).
"""

from __future__ import annotations

import ast
import json
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fathom.cli.parser import Parser
from fathom.recipe import load_recipe
from fathom.report.results import to_json

FIRST = ("none", "plain", "once")
"""The first value of each axis: no mechanism."""
AXES = {
    "mixer": "which value attention reads",
    "residual": "how a layer's output reaches later layers",
    "recurrence": "how often a token passes the layers",
}

EXAMPLES = (
    "fathom mechanisms",
    "fathom mechanisms --config runs/mine",
)


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config",
        metavar="MODEL",
        help="show what each mechanism would add to this model: a checkpoint directory, a recipe file, or a name that "
        "`fathom recipes` lists",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def run(options: Namespace) -> int:
    """List the mechanisms, or print what each adds to a model."""
    if options.config is not None:
        return _show_costs(options.config, options.json)
    found = _of_other_packages() if entry_points(group="fathom.mechanisms") else _of_ours()
    if options.json:
        print(json.dumps({"mechanisms": found}))
        return 0
    width = max(len(row["name"]) for row in found)
    for axis, meaning in AXES.items():
        print(f"{axis}: {meaning}")
        for row in found:
            if row["axis"] == axis:
                mark = " *" if row["closed"] is not None and row["name"] not in FIRST else ""
                print(f"  {row['name']:<{width}}  {row['summary']} ({row['paper']}){mark}")
    print("\n* A pretrained model can start as itself, and fathom deepen adds it so.")
    print("Join them with +, as in loop+depth_attention. fathom mechanisms --config MODEL shows what each costs.")
    return 0


def _of_ours() -> list[dict[str, Any]]:
    """Name, axis and summary of every mechanism, read from the source files, because importing the modules would load
    torch."""
    try:
        return list(_in_sources())
    except (ValueError, KeyError):  # an argument is not a literal
        return _of_other_packages()


def _in_sources() -> Iterator[dict[str, Any]]:
    folder = Path(__file__).parents[1] / "models"
    first = folder / "registry.py"  # the first value of each axis
    for path in (first, *(path for path in sorted(folder.rglob("*.py")) if path != first)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Mechanism":
                words = dict(zip(("name", "axis", "summary", "paper"), node.args, strict=False))
                words |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                named = {key: str(ast.literal_eval(words[key])) for key in ("name", "axis", "summary", "paper")}
                yield named | {"closed": ast.literal_eval(words["closed"]) if "closed" in words else None}


def _of_other_packages() -> list[dict[str, Any]]:
    """Name, axis and summary of all mechanisms, including those of installed packages, which are imported."""
    from fathom.models.registry import known

    return [
        {
            **{"name": m.name, "axis": m.axis, "summary": m.summary, "paper": m.paper},
            "closed": None if m.closed is None else dict(m.closed),
        }
        for m in known().values()
    ]


def _show_costs(name: str, as_json: bool) -> int:
    """Print what each mechanism adds to the model of a directory, a recipe file or a named recipe."""
    from rich.console import Console

    from fathom.checkpoints.runs import read_config
    from fathom.experiments.catalogue import mechanism_rows, mechanism_table, vanilla_row

    config = read_config(Path(name)) if Path(name).is_dir() else load_recipe(name).config()
    if as_json:
        print(to_json({"vanilla": vanilla_row(config), "mechanisms": list(mechanism_rows(config))}))
    else:
        Console().print(mechanism_table(config))
    return 0
