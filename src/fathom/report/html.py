"""Building blocks of a report: one HTML file that loads nothing, for narrow and wide screens, in light and dark.

Blocks are markup made by the templates next to this file. All other text is escaped, so no name from the command line
can break a page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from fathom.report import PAGE, REPORT
from fathom.report.files import write_atomically, write_json
from fathom.report.plots import DASHES, SERIES, Line, line_plot
from fathom.report.provenance import Provenance
from fathom.report.templates import macro, render

BLOCKS = "report/blocks.html.j2"


def page(title: str, verdict: str, *blocks: str) -> str:
    """A whole document: a title, the verdict in one sentence, and the blocks."""
    return render("report/page.html.j2", title=title, verdict=verdict, blocks=list(filter(None, blocks)))


def clauses(verdict: str, names: Iterable[str]) -> str:
    """A long verdict with each clause on a line of its own, beginning with a capital unless it begins with one of
    `names`.

    A clause ends outside of brackets.
    """
    lines = [line.rstrip(".") for line in re.split(r"(?<!e\.g)[.;] (?![^(]*\))", verdict)]
    kept = tuple(f"{name}{after}" for name in names for after in " ',:")
    return "\n".join(f"{line if line.startswith(kept) else line[:1].upper() + line[1:]}." for line in lines)


def section(heading: str, *blocks: str) -> Markup:
    """A section of a heading and blocks; empty if there are no blocks."""
    shown = list(filter(None, blocks))
    return macro("section", BLOCKS, heading, shown) if shown else Markup()


def paragraph(text: str, quiet: bool = False) -> Markup:
    """A paragraph; `quiet` for details in smaller type."""
    return macro("paragraph", BLOCKS, text, quiet)


def quotation(text: str) -> Markup:
    """A quoted text, shown unchanged and with its line breaks."""
    return macro("quotation", BLOCKS, text)


def bullets(items: Sequence[str]) -> Markup:
    """A list of sentences."""
    return macro("bullets", BLOCKS, items, False)


def commands(lines: Sequence[str]) -> Markup:
    """Commands for the reader to copy, one on each line; empty if there are none."""
    return macro("commands", BLOCKS, lines) if lines else Markup()


def link(text: str, path: str) -> Markup:
    """A link to another page, by its path next to this page."""
    return Markup(macro("link", BLOCKS, text, path).strip())


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], prose: Collection[str] = (), note: str = ""
) -> Markup:
    """A table whose first column holds row headers, with a note below it; empty if there are no rows.

    The columns in `prose` wrap. Wide tables scroll sideways.
    """
    if not rows:
        return Markup()
    return macro("table", BLOCKS, caption, columns, rows, prose) + (paragraph(note, quiet=True) if note else "")


def figure(title: str, picture: str, caption: str = "") -> Markup:
    """A plot with its title and caption; empty if there is no plot."""
    return macro("figure", BLOCKS, title, picture, caption) if picture else Markup()


def plot(
    title: str,
    lines: Sequence[Line],
    axes: tuple[str, str],
    words: str,
    caption: str = "",
    zero: bool = False,
    x_from_zero: bool = True,
    top: float | None = None,
) -> Markup:
    """A figure of curves, with a title and the description `words` for a screen reader; other arguments are those of
    `line_plot`."""
    return figure(title, line_plot(lines, *axes, f"{title}: {words}", zero, x_from_zero, top), caption)


def figures(*items: str) -> Markup:
    """Figures side by side where there is room."""
    shown = list(filter(None, items))
    return macro("figures", BLOCKS, shown) if shown else Markup()


def legend(names: Sequence[str]) -> Markup:
    """The legend of several plots: names in the order of the plots' colours and dashes."""
    return macro("legend", BLOCKS, [(name, i % SERIES, DASHES[i % len(DASHES)]) for i, name in enumerate(names)])


def details(summary: str, text: str) -> Markup:
    """Preformatted text that opens on demand."""
    return macro("details", BLOCKS, summary, text)


def facts(label: str, values: Mapping[str, str]) -> Markup:
    """A list of named facts, one on each line."""
    return macro("facts", BLOCKS, label, values)


def source(report: Provenance) -> Markup:
    """A list of facts on where a report's numbers come from (command, date, commit, machine), one on each line."""
    return facts("Provenance", report.facts())


def write(directory: Path, values: object, html: str) -> tuple[Path, Path]:
    """Write `report.json` and `report.html`, each atomically; returns their paths."""
    paths = directory / REPORT, directory / PAGE
    write_json(paths[0], values)
    write_atomically(paths[1], html)
    return paths
