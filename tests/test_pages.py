"""What the documentation takes from the code is what the code says."""

from __future__ import annotations

import re

import pytest

from fathom.checkpoints.families.registry import NATIVE
from tests import pages
from tests.pages import BLOCKS, COMMAND, DOCS, Block

CASES = [pytest.param(one, id=one.name, marks=pytest.mark.slow if one.slow else ()) for one in BLOCKS]


@pytest.mark.parametrize("block", CASES)
def test_a_block_is_current(block: Block) -> None:
    assert block.parts()[1] == block.text(), f"run {COMMAND}"


def test_every_block_of_every_page_is_known() -> None:
    """And a page that says that anything else writes it would be found."""
    found = {
        (page.relative_to(DOCS).as_posix(), name, command)
        for page in DOCS.rglob("*.md")
        for name, command in re.findall(r"<!-- ([^>]*): (python [^>]*) -->", page.read_text(encoding="utf-8"))
    }
    assert found == {(one.page, one.name, COMMAND) for one in BLOCKS}


def test_a_stale_block_is_seen_and_written(tmp_path, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n<!-- table: {COMMAND} -->\nold\n<!-- end -->\n\nAfter.\n", encoding="utf-8")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    block = Block("page.md", "table", lambda: "new\n")
    with pytest.raises(AssertionError, match=r"run python -m tests\.pages"):
        test_a_block_is_current(block)
    block.write()
    test_a_block_is_current(block)
    assert page.read_text(encoding="utf-8").startswith("# A page\n") and page.read_text(encoding="utf-8").endswith(
        "<!-- end -->\n\nAfter.\n"
    )
    with pytest.raises(ValueError, match=r"docs/page\.md has no block named other"):
        Block("page.md", "other", str).parts()


def test_every_family_says_what_it_opens() -> None:
    assert [one.name for one in NATIVE if not one.opens] == []
