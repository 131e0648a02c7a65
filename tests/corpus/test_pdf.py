"""PDF: lines put together again, and every broken file with its status."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.corpus.pdf import flow, without_running_heads
from tests.corpus.files import pdf, write
from tests.corpus.test_ingest import failures, ingested, rows

PARAGRAPH = [
    "The depth of a river is measured with rope",
    "and lead, and a care-",
    "ful hand writes it down.",
    "",
    "Next.",
]


def test_running_heads_go_and_the_rest_stays() -> None:
    pages = [
        f"Journal of Depths\nbody {word} one\nbody {word} two\nbody {word} three\nbody {word} four\npage {n}"
        for n, word in enumerate("abcde", 1)
    ]
    kept = without_running_heads(pages)
    assert [line for page in kept for line in page] == [
        f"body {word} {number}" for word in "abcde" for number in ("one", "two", "three", "four")
    ]
    assert [page[0] for page in without_running_heads(pages[:2])] == ["body a one", "body b one"]
    inner = [f"{word}\nJournal of Depths\nbody {word}\nlast {word}" for word in ("first", "second")]
    assert without_running_heads(inner)[0][1] == "Journal of Depths"  # further in, two pages prove nothing
    outside = [f"body {word}\nAnnals of Heads, {n}\nhttp://a/b {n}/2" for n, word in enumerate("ab", 1)]
    assert without_running_heads(outside) == [["body a"], ["body b"]], "head and foot at the end, as browsers print"
    assert without_running_heads(pages[:1])[0][0] == "Journal of Depths"


def test_words_that_pdfium_joined_with_a_noncharacter() -> None:
    """A word of which the document has a form with a hyphen alone keeps the hyphen."""
    lines = ["a popu\ufffelous town, well\ufffeknown to all", "and a well-known one"]
    assert flow([lines]).startswith("a populous town, well-known to all")


def test_no_hyphenation_divides_before_a_capital() -> None:
    assert flow([["from Epping\ufffeChatswood to B\ufffe29 in self\ufffedefence"]]) == (
        "from Epping-Chatswood to B-29 in selfdefence"
    )
    assert flow([["the line from here to Epping-", "Chatswood, in the year 1990-", "1995, and so on to the end"]]) == (
        "the line from here to Epping-Chatswood, in the year 1990-1995, and so on to the end"
    )


def test_hyphens_of_layout_go_and_those_of_spelling_stay() -> None:
    lines = [
        "a careful hand and a long line here",
        "it was a care-",
        "ful one and well-",
        "known to all of them in the town",
    ]
    assert flow([[lines[0], "", *lines[1:]]]) == (
        "a careful hand and a long line here\n\nit was a care-\nful one and well-\nknown to all of them in the town"
    )
    wide = [
        "it was a very careful and long-drawn care-",
        "ful one and also a very well-meant well-",
        "known one, to all",
    ]
    assert flow([[wide[0], wide[1], wide[2]]]) == (
        "it was a very careful and long-drawn careful one and also a very well-meant well-known one, to all"
    )


def test_every_broken_file_has_its_status(tmp_path: Path) -> None:
    pytest.importorskip("pypdfium2")
    folder = tmp_path / "in"
    text = [f"Line {number} of a page that has a text layer to be read" for number in range(12)]
    write(folder / "good.pdf", pdf([text, text]))
    write(folder / "encrypted.pdf", pdf([text], encrypted=True))
    write(folder / "image.pdf", pdf([[], []], picture=True))
    write(folder / "blank.pdf", pdf([[""]]))
    write(folder / "empty.pdf", b"")
    write(folder / "corrupt.pdf", b"%PDF-1.4\n" + bytes(range(256)) * 20)
    write(folder / "cut.pdf", pdf([text])[:200])
    huge = write(folder / "huge.pdf", pdf([text]))
    with huge.open("r+b") as file:
        file.truncate(1 << 31)  # two gigabytes, none of them on the disk
    workspace = ingested(tmp_path, [folder], identify="stamp")
    assert failures(workspace) == {
        "in/encrypted.pdf": "encrypted",
        "in/image.pdf": "no_text_layer",
        "in/blank.pdf": "empty",
        "in/empty.pdf": "empty",
        "in/corrupt.pdf": "parse_error",
        "in/cut.pdf": "parse_error",
        "in/huge.pdf": "too_large",
    }
    (good,) = rows(workspace).values()
    assert good["mime"] == "application/pdf" and good["meta"] == {"pages": 2} and good["text"].count("Line 6") == 2


def test_a_page_of_the_web(tmp_path: Path) -> None:
    pytest.importorskip("trafilatura")
    body = "".join(f"<p>{'A sentence of the main text number ' + str(number) + '. ' * 3}</p>" for number in range(20))
    page = f'<html><body><nav><a href="/">Menu</a></nav><article>{body}</article><a rel="license" href="http://x/by/4.0">l</a></body></html>'
    write(tmp_path / "a.html", page)
    (row,) = rows(ingested(tmp_path, [tmp_path / "a.html"], html="trafilatura")).values()
    assert "main text number 7" in row["text"] and "Menu" not in row["text"] and row["license"] == "http://x/by/4.0"
