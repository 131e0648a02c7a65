"""Everything in the documentation that is read from the code: `python -m tests.pages` writes it.

A page holds a block between `<!-- NAME: python -m tests.pages -->` and `<!-- end -->`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests import api, papers, reference
from tests.checkpoints.families import tables
from tests.models import test_exact_starts, test_released

DOCS = Path(__file__).parents[1] / "docs"
COMMAND, END = "python -m tests.pages", "<!-- end -->\n"


@dataclass(frozen=True)
class Block:
    """One generated part of a page."""

    page: str
    """The file in `docs/`."""
    name: str
    text: Callable[[], str]
    """What it should say."""
    slow: bool = False
    """Whether the text takes long to make, so that only `make test-all` compares it."""

    def parts(self) -> tuple[str, str, str]:
        """The page before the block, the block, and the page after it."""
        whole = (DOCS / self.page).read_text(encoding="utf-8")
        before, begin, rest = whole.partition(f"<!-- {self.name}: {COMMAND} -->\n")
        inside, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"docs/{self.page} has no block named {self.name}")
        return before + begin, inside, end + after

    def write(self) -> None:
        """Write the block anew."""
        before, _, after = self.parts()
        (DOCS / self.page).write_text(before + self.text() + after, encoding="utf-8")


BLOCKS = (
    Block("reference/commands.md", "commands", reference.commands),
    Block("reference/keys.md", "keys", reference.keys),
    *(
        Block(f"explanation/{Path(page).name}", f"options of {name}", partial(reference.own_options, name))
        for name, page in reference.MECHANISM_PAGES.items()
    ),
    Block("explanation/which_mechanism.md", "costs", reference.costs),
    Block("reference/api.md", "api", api.api),
    Block("how-to/checkpoints.md", "families", tables.families),
    Block("how-to/hosted.md", "hosted families", tables.hosted, slow=True),
    Block("how-to/hosted.md", "closed types", tables.closed),
    Block("explanation/hyper_connections.md", "released", test_released.table, slow=True),
    Block("how-to/papers.md", "paper tables", papers.tables),
    Block("how-to/papers.md", "faithfulness", papers.faithfulness),
    Block("tutorials/deepen.md", "exact starts", test_exact_starts.table, slow=True),
)

if __name__ == "__main__":
    for block in BLOCKS:
        block.write()
