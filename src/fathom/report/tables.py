"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.table import Table
    from rich.text import Text

NAME = 24
"""Characters of a row's name that stay on one line."""


def terminal_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], left: int = 1) -> Table:
    """A rich table; the first `left` columns are text, the others numbers. Brackets in names are not markup."""
    from rich.table import Table
    from rich.text import Text

    title = Text(caption) if caption else None
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    named = min(max((len(str(row[0])) for row in rows), default=0), NAME)
    for i, column in enumerate(columns):
        justify: JustifyMethod = "left" if i < left else "right"
        width = None if i else named
        table.add_column(Text(column), justify=justify, header_style="dim", overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
