"""What the reference pages say, read from the code."""

from __future__ import annotations

import argparse
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from fathom.cli.lineage import ACTIONS
from fathom.cli.main import COMMANDS, module_of
from fathom.cli.parser import Parser
from fathom.corpus.recipe import CorpusRecipe
from fathom.experiments.catalogue import mechanism_rows
from fathom.experiments.ladder_rules import Rules
from fathom.models.registry import ALL
from fathom.recipe import describe as recipe_keys
from fathom.recipe import load_recipe
from fathom.settings import default_of, describe, help_of

EXPLANATION = Path(__file__).parents[1] / "docs" / "explanation"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """A table of Markdown."""
    for row in (head, ("---",) * len(head), *rows):
        yield f"| {' | '.join(' '.join(str(cell).split()).replace('|', chr(92) + '|') for cell in row)} |"


def listed(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A list of names and what they mean."""
    for name, text in rows:
        yield f"- {name}: {' '.join(text.split())}"


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


SHARED_BY = 3
"""An option that as many mechanisms have alike is written in the reference; of two, the first page has it."""


def arguments(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """The arguments of a command, with their help."""
    shown = [one for one in parser._actions if one.dest != "help" and one.help != argparse.SUPPRESS]
    formatter = parser._get_formatter()
    return [
        (named(one), formatter._expand_help(one) if one.help else "")
        for one in shown
        if not isinstance(one, argparse._SubParsersAction)
    ]


def parsers() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Heading, summary and parser of every command, a command with its own commands first."""
    for name, summary in COMMANDS.items():
        parser = Parser(prog=f"fathom {name}")
        importlib.import_module(module_of(name)).add(parser)
        yield f"## fathom {name}", f"{summary[0].upper()}{summary[1:]}.", parser
        inner = next((one for one in parser._actions if isinstance(one, argparse._SubParsersAction)), None)
        for action in ACTIONS if inner else ():
            one = inner.choices[action]
            yield f"### fathom {name} {action}", (one.description or "").partition("\n")[0], one


def commands() -> str:
    """All commands, with their arguments; what several have alike comes first."""
    found = [(heading, summary, arguments(parser)) for heading, summary, parser in parsers()]
    counts = Counter(row for *_, rows in found for row in rows if row[0].startswith("`-"))
    best = {row[0].split()[0]: row for row, count in reversed(counts.most_common()) if count > 1}
    shared = sorted(best.values(), key=[*counts].index)
    lines = ["This page lists every command with its arguments. Each also takes `--help`, and ends with exit code 2"]
    lines[0] += " for a wrong request and 1 for a failure. `NO_COLOR=1` turns colours off; `COLUMNS` sets the width."
    lines += ["", "## Options of several commands", "", *listed(shared), ""]
    for heading, summary, rows in found:
        own = [row for row in rows if row not in shared]
        also = ", ".join(runs([shared.index(row) for row in rows if row in shared], shared))
        lines += [heading, "", summary, ""]
        lines += [*listed(own), ""] if own else []
        lines += [f"Also: {also}.", ""] if also else []
    return "\n".join(lines).rstrip() + "\n"


def runs(places: list[int], shared: list[tuple[str, str]]) -> Iterator[str]:
    """The names at some places of the list above; four or more that follow one another are named by their ends."""
    left = sorted(places)
    while left:
        count = next(n for n in range(1, len(left) + 1) if n == len(left) or left[n] != left[0] + n)
        names = [f"`{shared[place][0].strip('`').split()[0]}`" for place in left[:count]]
        yield from names if count < 4 else [f"{names[0]} to {names[-1]}"]
        left = left[count:]


def keys() -> str:
    """All keys of recipes, and the options that several mechanisms have."""
    lines = ["This page lists every key, which is set in a YAML file or on the command line, as in `optim.lr=3e-4`."]
    lines += ["What a value may be stands in brackets where the default and the text do not show it."]
    lines += ["`kvcache.method` is one of the [cache methods](../how-to/kvcache.md#choose-a-method).", ""]
    sections = (
        ("Recipes", recipe_keys()),
        ("Ladders", list(describe(Rules, "ladder."))),
        ("Corpora", list(describe(CorpusRecipe))),
    )
    for title, rows in sections:
        lines += [f"## {title}", "", *listed(_key(*row) for row in rows), ""]
    lines += [
        "## Mechanisms",
        "",
        "Options stand under `model.mixer_options`, `model.residual_options` and `model.recurrence_options`.",
        "The [page of a mechanism](../explanation/which_mechanism.md#in-one-table) has its own options.",
        "",
        "Options of several mechanisms:",
        "",
        *listed((f"`{name}` = `{default}`", text) for name, default, text in common()),
        "",
    ]
    rest = [
        (f"`{mechanism}` `{name}` = `{default}`", text)
        for mechanism, rows in options().items()
        if mechanism not in MECHANISM_PAGES
        for name, default, text in rows
    ]
    lines += [*listed(rest), ""] if rest else []
    return "\n".join(lines).rstrip() + "\n"


MECHANISM_PAGES = {
    one.name: f"../explanation/{page}.md"
    for one in ALL
    for page in ({"value_gain": "gates", "branch_gain": "gates"}.get(one.name, one.name),)
    if (EXPLANATION / f"{page}.md").is_file() and fields(one.options)
}
"""The page of every mechanism that has one, from docs/reference."""


def options() -> dict[str, list[tuple[str, str, str]]]:
    """Name, default and help of each mechanism's options."""
    return {
        one.name: [
            (field.name, default_of(field), help_of(one.options).get(field.name, "")) for field in fields(one.options)
        ]
        for one in ALL
    }


def _key(key: str, allowed: str, default: str, text: str) -> tuple[str, str]:
    """A key with its default and its meaning; what is allowed stands before it unless the two show it."""
    kinds = re.sub(r"\b(an? |one of )", "", allowed).replace(" or null", "")
    plain = re.match(r"true|number|integer|text|mapping|list of (?!names, of )", kinds)
    shown = default not in ("", "null", "[]", "{}") if plain else all(one in text for one in kinds.split(", "))
    return f"`{key}` = `{default}`" if default else f"`{key}`", text if shown else f"({kinds}) {text}"


def common() -> list[tuple[str, str, str]]:
    """What several mechanisms have alike, whatever their defaults; of these, the most frequent one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for rows in options().values():
        for name, default, text in rows:
            alike.setdefault((name, text), []).append(default)
    return [
        (name, Counter(found).most_common(1)[0][0], text)
        for (name, text), found in alike.items()
        if len(found) >= SHARED_BY
    ]


def own_options(mechanism: str) -> str:
    """The options of one mechanism, and the names of those that it shares with many, or with the page of one before."""
    shared = {(name, text): default for name, default, text in common()}
    rows, before = options()[mechanism], {}
    for other in reversed([*MECHANISM_PAGES][: [*MECHANISM_PAGES].index(mechanism)]):
        before |= {row: other for row in options()[other] if row[0] != "trips"}
    own = [
        (f"`{name}` = `{default}`", text)
        for name, default, text in rows
        if (name, text) not in shared and (name, default, text) not in before
    ]
    also = [
        f"`{name}`" if shared[name, text] == default else f"`{name}` (`{default}`)"
        for name, default, text in rows
        if (name, text) in shared
    ]
    lines = [*listed(own)] if own else []
    lines += ["", f"Further options: {', '.join(also)} ([meaning](../reference/keys.md#mechanisms))."] if also else []
    for other in dict.fromkeys(before[row] for row in rows if row in before and (row[0], row[2]) not in shared):
        alike = (f"`{row[0]}`" for row in rows if before.get(row) == other and (row[0], row[2]) not in shared)
        lines += ["", f"Options as in [`{other}`]({Path(MECHANISM_PAGES[other]).name}): {', '.join(alike)}."]
    return "\n".join(lines).lstrip("\n") + "\n"


def costs() -> str:
    """What each mechanism adds to the 3B model of the Depth-Attention paper."""
    rows = [
        (
            f"`{row.name}`",
            f"{row.parameters:,}",
            f"{row.flops:,.0f}",
            f"{100 * row.flops_share:.2g} %" if row.flops_share < 1 else f"{100 * row.flops_share:.0f} %",
            f"{row.cache_bytes:,}",
            f"{row.transient_bytes:,}",
            f"{row.io_bytes:,}",
        )
        for row in mechanism_rows(load_recipe("3b").config())
        if row.options
    ]
    heads = ("mechanism", "parameters", "FLOPs", "of 2N", "cache bytes", "state bytes", "bytes moved")
    return "\n".join(table(heads, rows)) + "\n"
