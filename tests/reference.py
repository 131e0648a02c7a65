"""What the reference pages say, read from the code."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import fields

from fathom.cli.lineage import ACTIONS
from fathom.cli.main import COMMANDS, module_of
from fathom.cli.parser import Parser
from fathom.corpus.recipe import CorpusRecipe
from fathom.experiments.rules import Rules
from fathom.kvcache import METHODS
from fathom.models.registry import ALL
from fathom.recipe import describe as recipe_keys
from fathom.settings import default_of, describe, help_of


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A table of Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(' '.join(str(cell).split()).replace('|', chr(92) + '|') for cell in row)} |"


def named(action: argparse.Action) -> str:
    """An argument as it is typed, its longest name first."""
    if not action.option_strings:
        shown = action.metavar if isinstance(action.metavar, str) else action.dest
        return f"`{shown}`"
    metavar = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    value = "" if action.nargs == 0 else f" {metavar[0] if isinstance(metavar, tuple) else metavar}"
    return f"`{max(action.option_strings, key=len)}{value}`"


def arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The arguments of a command as a table."""
    shown = [one for one in parser._actions if one.dest != "help" and one.help != argparse.SUPPRESS]
    rows = [(named(one), one.help or "") for one in shown if not isinstance(one, argparse._SubParsersAction)]
    yield from table(("argument", "meaning"), [(name, text.replace("%%", "%")) for name, text in rows])


def commands() -> str:
    """All commands, with their arguments."""
    lines = [
        "Every command also takes `--help`, and ends with exit code 2 for a wrong request",
        "",
    ]
    lines[-2] += " and 1 for a failure. `NO_COLOR=1` turns colours off, and `COLUMNS` sets the width."
    for name, summary in COMMANDS.items():
        parser = Parser(prog=f"fathom {name}")
        importlib.import_module(module_of(name)).add(parser)
        lines += [f"## fathom {name}", "", f"{summary[0].upper()}{summary[1:]}.", ""]
        inner = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        if inner is None:
            lines += [*arguments(parser), ""]
            continue
        for action in ACTIONS:
            about = (inner.choices[action].description or "").partition("\n")[0]
            lines += [f"### fathom {name} {action}", "", about, "", *arguments(inner.choices[action]), ""]
    return "\n".join(lines).rstrip() + "\n"


def keys() -> str:
    """All keys of recipes, and all options."""
    lines = ["A key is set in a YAML file or on the command line, as in `optim.lr=3e-4`."]
    lines += ["`fathom train --keys` prints the first table.", ""]
    sections = (
        ("Recipes", recipe_keys()),
        ("Ladders", list(describe(Rules, "ladder."))),
        ("Corpora", list(describe(CorpusRecipe))),
    )
    for title, rows in sections:
        shown = [(f"`{key}`", f"`{default}`" if default else "", allowed, text) for key, allowed, default, text in rows]
        lines += [f"## {title}", "", *table(("key", "default", "allowed", "meaning"), shown), ""]
    lines += [
        "## Mechanisms",
        "",
        "Options stand under `model.mixer_options`, `model.residual_options` and `model.recurrence_options`.",
        "",
    ]
    options = [
        (f"`{one.name}`", f"`{field.name}`", f"`{default_of(field)}`", help_of(one.options).get(field.name, ""))
        for one in ALL
        for field in fields(one.options)
    ]
    lines += [*table(("mechanism", "option", "default", "meaning"), options), ""]
    lines += ["## Cache methods", "", *table(("method", "what a compression leaves"), caches()), ""]
    return "\n".join(lines).rstrip() + "\n"


def caches() -> Iterator[tuple[str, str]]:
    """Fathom's methods of `kvcache.method`, and the first sentence about each; other tests may have added theirs."""
    for name, method in METHODS.items():
        kind = method if isinstance(method, type) else type(method)
        if kind.__module__.startswith("fathom."):
            yield f"`{name}`", (kind.__doc__ or "").partition("\n")[0]
