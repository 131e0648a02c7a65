"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def terminal_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], left: int = 1) -> Table:
    """A rich table; the first `left` columns are text, the others numbers. Brackets in names are not markup."""
    from rich.table import Table
    from rich.text import Text

    title = Text(caption) if caption else None
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if i < left else "right", header_style="dim", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
