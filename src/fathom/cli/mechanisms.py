"""`fathom mechanisms [--config DIR|RECIPE]`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fathom.cli.parser import Parser, UsageError
from fathom.recipe import load_recipe

if TYPE_CHECKING:
    from fathom.models import FathomConfig


def add(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--config",
        metavar="MODEL",
        help="a checkpoint directory, a recipe file, or a name that `fathom recipes` lists (default: Qwen3's shape)",
    )
    parser.add_argument("--bytes-per-scalar", type=int, default=2, help="of cache and activations (default: 2, bf16)")
    parser.add_argument("--json", action="store_true", help="print the rows for a program")


def run(options: Namespace) -> int:
    """Print the table."""
    from rich.console import Console

    from fathom.checkpoints.runs import read_config
    from fathom.comparison.catalogue import mechanism_rows, mechanism_table, vanilla_row
    from fathom.models import FathomConfig

    if options.bytes_per_scalar < 1:
        raise UsageError(f"--bytes-per-scalar {options.bytes_per_scalar}: allowed: 1 or more")
    config = _model_config(options.config, FathomConfig, read_config)
    if options.json:
        rows = list(mechanism_rows(config, options.bytes_per_scalar))
        print(json.dumps({"vanilla": vanilla_row(config, options.bytes_per_scalar), "mechanisms": rows}))
    else:
        Console().print(mechanism_table(config, options.bytes_per_scalar))
    return 0


def _model_config(name: str | None, default: type[FathomConfig], read: Callable[[Path], FathomConfig]) -> FathomConfig:
    """The configuration that a directory, a recipe file or the name of a recipe describes."""
    if name is None:
        return default()
    if not Path(name).is_dir():
        return load_recipe(name).config()
    return read(Path(name))
