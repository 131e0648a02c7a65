"""Books and articles are read in order, with code, tables and formulas; broken ones are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathom.corpus.ingest import kind_of
from fathom.corpus.sandbox import EXTRACTORS
from tests.corpus.files import epub, jats, write

SETTINGS: dict[str, Any] = {"max_document_bytes": 1 << 20, "html": "plain", "sentinels": False}


def read(tmp_path: Path, name: str, data: bytes | str) -> Any:
    path = write(tmp_path / name, data)
    return EXTRACTORS[str(kind_of(path))](path, SETTINGS)


def test_a_book_is_read_in_the_order_of_its_spine(tmp_path: Path) -> None:
    pages = [
        "<p>first 2<sup>10</sup></p><pre>  a\n    b</pre>",
        "<p>second</p><table><tr><td>1</td><td>2</td></tr></table>",
    ]
    text = read(tmp_path, "a.epub", epub(pages)).text
    assert text.index("first 2¹⁰") < text.index("  a\n    b") < text.index("second") < text.index("1 2")


@pytest.mark.parametrize(
    ("data", "status"),
    [(b"no archive", "parse_error"), (epub([]), "empty"), (epub(["<p>a</p>"], hidden=True), "encrypted"),
     (epub(["<p>" + "a" * (1 << 20) + "</p>"]), "too_large")],
)  # fmt: skip
def test_books_that_cannot_be_read(tmp_path: Path, data: bytes, status: str) -> None:
    assert read(tmp_path, "a.epub", data).status == status


def test_an_article_keeps_code_tables_and_formulas(tmp_path: Path) -> None:
    body = (
        "<sec><title>Method</title><p>We count H<sub>2</sub>O.</p><code>if a &lt; b:\n    c()</code>"
        "<table-wrap><label>Table 1</label><table><tr><th>n</th><th>10<sup>6</sup></th></tr></table></table-wrap>"
        "<disp-formula><mml:math><mml:mfrac><mml:mn>1</mml:mn><mml:mn>2</mml:mn></mml:mfrac></mml:math></disp-formula></sec>"
    )
    back = "<fn-group><fn><p>A note.</p></fn></fn-group><ref-list><ref>Smith 1999</ref></ref-list>"
    text = read(tmp_path, "a.xml", jats(body, "On H<sub>2</sub>", "<p>Short.</p>", back)).text
    wanted = ("On H₂", "Short.", "Method", "We count H₂O.", "if a < b:\n    c()", "Table 1", "n 10⁶", "1/2", "A note.")
    places = [text.replace("(", "").replace(")", "").find(one.replace("(", "").replace(")", "")) for one in wanted]
    assert -1 not in places and places == sorted(places) and "Smith" not in text
    assert (
        read(tmp_path, "b.nxml", "<article").status == "parse_error"
        and kind_of(write(tmp_path / "c.xml", "<a/>")) == "text"
    )
