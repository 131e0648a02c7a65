"""Tables for a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table

PlainTable = tuple[str, list[str], list[list[str]]]
"""Caption, columns, rows: for a page and for a terminal."""
NAME = 24
"""Characters of a row's name that stay on one line."""


def without(column: str, table: PlainTable) -> PlainTable:
    """The table without the column of this name."""
    caption, columns, rows = table
    at = columns.index(column)
    return caption, columns[:at] + columns[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]


def line_width() -> int:
    """The number of characters in a line of output: that of the terminal or of `COLUMNS`, or 240 if the output is a
    pipe."""
    return shutil.get_terminal_size((240, 24)).columns


def print_report(tables: Iterable[PlainTable], verdict: str, page: Path | None, more: str = "") -> None:
    """Print the tables that have rows, then the verdict, a further remark, and the path of the HTML page if there is
    one."""
    from rich.console import Console

    console = Console(highlight=False, width=line_width())
    for table in tables:
        if table[2]:
            console.print(terminal_table(*table), "")
    console.print(verdict, markup=False, soft_wrap=True)
    for text in filter(None, (more, page and f"report: {page.resolve()}")):
        console.print(f"\n{text}", markup=False, soft_wrap=True)


def terminal_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A rich table; the first `left` columns are text, the others numbers. Brackets in names are not markup."""
    from rich.table import Table
    from rich.text import Text

    title = Text(caption) if caption else None
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    folded = sum(widths) + 2 * len(widths) > line_width()
    for i, column in enumerate(columns):
        justify: JustifyMethod = "left" if i < left else "right"
        # A fixed width: without one rich folds the column, and with a minimum width it cuts off the last columns.
        width = min(widths[0], NAME) if folded and not i else None
        table.add_column(Text(column), justify=justify, header_style="dim", overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table in Markdown: the first column is text, the others numbers."""
    yield f"| {' | '.join(head)} |"
    yield "| --- |" + " --: |" * (len(head) - 1)
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"
