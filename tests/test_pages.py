"""What the documentation takes from the code is what the code says."""

from __future__ import annotations

import re

import pytest

import fathom
from fathom.checkpoints.families.registry import NATIVE
from tests import api, pages
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


def test_what_guides_import_is_in_the_reference() -> None:
    """Every name of Fathom that a block of Python on a page imports, and every name of `import fathom`."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md") if page.name != "api.md")
    imported = {
        f"{module}.{name}"
        for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
        for module, names in re.findall(r"^from (fathom[\w.]*) import ([\w, ]+)", block, re.M)
        for name in names.replace(" ", "").split(",")
    }
    known = {f"fathom.{name}" for names in api.SECTIONS.values() for name in names}
    assert len(imported) > 15
    assert {name for name in imported - known if name.rpartition(".")[2] not in fathom.__all__} == set()
    assert {f"fathom.{name}" for name in fathom.__all__ if name != "__version__"} <= known


def test_every_family_says_what_it_opens() -> None:
    assert [one.name for one in NATIVE if not one.opens] == []
