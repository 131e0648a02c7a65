"""TEI to Markdown: one document for each fault of the public converter, as it should come out."""

from __future__ import annotations

from pathlib import Path

import pytest

from fathom.corpus.tei import extract
from tests.corpus.files import tei, write

FIGURE = '<figure xml:id="fig_0"><head>Fig. 1</head><figDesc>A map of depths.</figDesc></figure>'
SHOWN = '<ref target="#fig_0">Fig. 1</ref>'
TABLE = (
    '<figure type="table" xml:id="tab_0"><head>Table 1</head><table><row><cell>Name</cell><cell>Depth</cell></row>'
    "<row><cell>Po</cell><cell/></row></table><note>In fathoms.</note></figure>"
)
CITED = '<biblStruct xml:id="b0"><analytic><title level="a">On soundings</title></analytic></biblStruct>'
UNTITLED = '<biblStruct xml:id="b1"><analytic/></biblStruct>'


def converted(tmp_path: Path, text: str, sentinels: bool = False) -> str:
    found = extract(write(tmp_path / "a.tei.xml", text), {"sentinels": sentinels})
    assert found.status == "ok", found
    return found.text


CASES = {
    "a figure that is cited twice stands once": (
        tei(f"<div><p>See {SHOWN}.</p><p>And {SHOWN}.</p></div>{FIGURE}"),
        "# A title\n\nSee Fig. 1.\n\n[START_FIGURE]\nFig. 1\nA map of depths.\n[END_FIGURE]\n\nAnd Fig. 1.",
    ),
    "what a reference shows is kept": (
        tei('<div><p>As known <ref type="bibr" target="#b0">[12]</ref>, so.</p></div>', back=CITED),
        "# A title\n\nAs known [12] [START_REF]On soundings[END_REF], so.",
    ),
    "a cited work without a title keeps its mark": (
        tei('<div><p>As known <ref type="bibr" target="#b1">[3]</ref>.</p></div>', back=UNTITLED),
        "# A title\n\nAs known [3].",
    ),
    "text inside other elements is kept": (
        tei("<div><p>Water <hi>of <s>great</s> depth</hi> here.</p></div>"),
        "# A title\n\nWater of great depth here.",
    ),
    "a target that is not there": (
        tei('<div><p>See <ref target="#fig_9">Fig. 9</ref>.</p></div>'),
        "# A title\n\nSee Fig. 9.",
    ),
    "a heading without text": (
        tei("<div><head/><p>Text.</p></div><div><head>2.1 Method</head><p>More.</p></div>"),
        "# A title\n\nText.\n\n### 2.1 Method\n\nMore.",
    ),
    "a note is marked once": (
        tei("<div><note><note>Inner.</note></note><p>Text<note>foot</note>.</p></div>"),
        "# A title\n\n[START_NOTE]Inner.[END_NOTE]\n\nText[START_NOTE]foot[END_NOTE].",
    ),
    "an empty cell is empty": (
        tei(f"<div><p>T.</p></div>{TABLE}"),
        "# A title\n\nT.\n\n[START_TABLE]\nTable 1\n| Name | Depth |\n| --- | --- |\n| Po |  |\n"
        "[START_NOTE]In fathoms.[END_NOTE]\n[END_TABLE]",
    ),
    "a title of blanks is none": (
        tei("<div><p>Text.</p></div>", title="  ", abstract="<div><p> </p></div>"),
        "Text.",
    ),
    "a formula": (
        tei("<div><p>We have</p><formula>a = b²</formula></div>", abstract="<div><p>Short.</p></div>"),
        "# A title\n\n## Abstract\n\nShort.\n\nWe have\n\n[START_FORMULA]a = b²[END_FORMULA]",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(tmp_path: Path, name: str) -> None:
    text, expected = CASES[name]
    assert converted(tmp_path, text, sentinels=True) == expected


def test_without_sentinels(tmp_path: Path) -> None:
    text, _ = CASES["an empty cell is empty"]
    expected = "# A title\n\nT.\n\nTable 1\n\n| Name | Depth |\n| --- | --- |\n| Po |  |\n\nIn fathoms."
    assert converted(tmp_path, text) == expected


def test_dangling_references_are_counted(tmp_path: Path) -> None:
    found = extract(write(tmp_path / "a.xml", CASES["a target that is not there"][0]), {"sentinels": False})
    assert found.meta == {"dangling_references": 1}
