"""Reads JATS, the XML format of journals: title, abstract, body and notes are rewritten as HTML and read as a web page.

A superscript that is a cross reference is the mark of a note, and so is a bare number that is one and directly follows
a word. Formulas are their MathML, or else their TeX. The list of references is left out.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

from fathom.corpus.extraction import POSSIBLE_NOTES, Extracted, IngestValues, tag_of, xml_of
from fathom.corpus.html import visible_text
from fathom.corpus.superscripts import MARK
from fathom.corpus.typeset import typeset

NAMES = {
    **{name: name for name in ("p", "sup", "sub", "table", "thead", "tbody", "tr", "td", "th")},
    **{"sec": "section", "title": "h2", "article-title": "h1", "italic": "i", "bold": "b", "list": "ul"},
    **{
        "list-item": "li",
        "def-item": "p",
        "disp-quote": "blockquote",
        "preformat": "pre",
        "code": "pre",
        "break": "br",
    },
    **{"fig": "section", "table-wrap": "section", "caption": "section", "label": "p", "xref": "a", "fn": "section"},
    **{"ext-link": "span", "disp-formula": "p", "abstract": "section", "boxed-text": "section"},
}
"""HTML's elements for those of JATS; the text of others stands where they are."""
LEFT_OUT = ("ref-list", "object-id", "fn-group-label", "alt-text", "graphic", "media", "permissions", "counts")
PARTS = (".//{*}front//{*}title-group/{*}article-title", ".//{*}front//{*}abstract", "./{*}body", "./{*}back")
TEX = re.compile(r"\\begin\{document\}\s*(.*?)\s*\\end\{document\}", re.DOTALL)


def extract(path: Path, settings: IngestValues) -> Extracted:
    """The text of an article."""
    root = xml_of(path)
    if isinstance(root, Extracted):
        return root
    parts = [one for part in PARTS for one in root.findall(part)]
    inside, name = "".join(text for one in parts for text in _page(one)), "body"
    page = typeset(f"<{name}>{inside}</{name}>")
    text = visible_text(page.page)
    if not text.strip():
        return Extracted("empty", detail="an article without text")
    return Extracted("ok", text, meta={POSSIBLE_NOTES: page.possible_notes} if page.possible_notes else {})


def _page(element: Element) -> Iterator[str]:
    """An element as HTML, without the text that follows its end tag."""
    name = tag_of(element)
    if name in LEFT_OUT or not name:
        return
    if name == "math":
        yield _mathml(element)
        return
    if name == "tex-math":
        yield html.escape(_tex("".join(element.itertext())))
        return
    shown = NAMES.get(name, "")
    link = " href='#'" if shown == "a" else ""
    yield f"<{shown}{link}>" if shown else ""
    before = element.text or ""
    yield html.escape(before)
    math = next((one for one in element if tag_of(one) == "math"), None) if name == "alternatives" else None
    for child in element if math is None else [math]:
        glued = before[-1:].isalnum() and tag_of(child) == "xref" and MARK.fullmatch("".join(child.itertext()).strip())
        yield from () if glued else _page(child)
        before = (child.tail or "") or "".join(child.itertext())
        yield html.escape(child.tail or "") if math is None else ""
    yield f"</{shown}>" if shown and shown != "br" else ""


def _mathml(element: Element) -> str:
    """A formula with HTML's names."""
    given = "".join(f' {key.rpartition("}")[2]}="{html.escape(value)}"' for key, value in element.items())
    inside = "".join(_mathml(child) + html.escape(child.tail or "") for child in element if tag_of(child))
    return f"<{tag_of(element)}{given}>{html.escape(element.text or '')}{inside}</{tag_of(element)}>"


def _tex(text: str) -> str:
    """A TeX formula between inline-math delimiters, without the LaTeX document around it."""
    whole = TEX.search(text)
    return f"\\({(whole[1] if whole else text).strip().strip('$').strip()}\\)"
