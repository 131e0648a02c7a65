"""Superscripts, subscripts and formulas of a web page, rewritten as text before any reader takes the tags away.

A superscript is the mark of a note, and left out, if it is a link or has the class or role of a note. Every other one
is kept: `2<sup>32</sup>` becomes 2³². Formulas become their TeX, or their contents. What a line hides, such as a number
to sort by, is left out.
"""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Literal

from fathom.corpus.mathml import formula, in_tex, parsed
from fathom.corpus.superscripts import Script, as_script, may_be_note, named_script

SIGNS = re.compile(
    r"<(?:sup|sub|(?:\w{1,9}:)?math|mjx-)\b|math/tex|(?:align|shift|position):\s*(?:super|sub|relative|[+-]?[\d.])"
    r"|(?:super|sub)script|\bsu[pb]\b|align-su|\bexponent\b|katex|noteref|\bhidden\b|display:\s*none"
    r"|<img\b[^>]{0,500}\b(?:la)?tex\b|<img\b[^>]{0,500}\bmath\b",
    re.IGNORECASE,
)
"""Without any of these a page has nothing to rewrite."""
INLINE = {
    *("a", "abbr", "b", "bdi", "cite", "em", "font", "i", "label", "note", "q", "ref", "s", "small", "span", "strong"),
    *("u", "xref"),
}
"""Elements that may enclose a note's mark, or set text higher."""
ENDING = {
    *("address", "article", "aside", "blockquote", "body", "dd", "div", "dl", "dt", "figcaption", "figure", "footer"),
    *("header", "hr", "html", "li", "main", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
    *(f"h{level}" for level in range(1, 7)),
}
"""Elements that end what has no end tag before them."""
NOTES = ("note", "ref", "xref")
NOTE = re.compile(
    r"(?:^|[\s_-])(?:doc-)?(?:foot|end|side|margin)?notes?(?:$|[\s_-]|refs?\b|call|mark|link|anchor)|footnote|noteref"
    r"|(?:^|[\s_-])fn|(?:^|[\s_-])(?:ref|reference|xref)s?(?:$|[\s_-])|cite|citation|bibr|inline-template",
    re.IGNORECASE,
)
"""Class, role or id of a note's mark."""
STYLE = re.compile(r"(?:vertical-align|baseline-shift|font-variant-position):\s*(super|sub)\b", re.IGNORECASE)
MOVED = re.compile(
    r"position:\s*relative\b.{0,80}?(?<![\w-])(top|bottom):\s*(-?)[\d.]*[1-9][\d.]*(?:em|ex|px|pt|%)", re.IGNORECASE
)
"""Styles that set text higher or lower."""
SHIFTED = re.compile(r"vertical-align:\s*(-?)[\d.]*[1-9][\d.]*(?:em|ex|rem|px|pt|%)", re.IGNORECASE)
SMALLER = re.compile(
    r"font-size:\s*(?:smaller|small|x+-small|0?\.\d+r?em|[1-8]?\d(?:\.\d+)?%|(?:[1-9]|10)(?:\.\d+)?(?:px|pt))",
    re.IGNORECASE,
)
"""Together they are a script; a shift alone is how an icon or a label is set on its line."""
UNSEEN = re.compile(r"display:\s*none|visibility:\s*hidden", re.IGNORECASE)
RULE = re.compile(r"([^{}]{1,500})\{([^{}]{1,2000})\}")
CLASS = re.compile(r"\.([\w-]+)(?=[\s,:]*$|\s*,)")
SHEET = re.compile(r"<style\b[^>]*>(.{1,200000}?)</style", re.IGNORECASE | re.DOTALL)
SCRIPTS = ("sup", "superscript", "align-super", "exponent", "sub", "subscript", "align-sub")
"""Classes that say where an element is set, in any style sheet."""
ROMAN = "(?=[ivxl])(?:xl|l?x{0,3})(?:ix|iv|v?i{0,3})"
MARK = re.compile(rf"(?:(?:fn?|n)?\d{{1,3}}[a-z]?(?:,\s?\d{{1,3}})*|[a-z]|{ROMAN}|[*†‡§¶#‖⁎∗]{{1,3}})", re.IGNORECASE)
"""A note's mark on the line, without its brackets. A longer number is one if the link ends with it: otherwise it may be
a year."""
NAMING = ("class", "role", "rel", "epub:type", "id", "data-role")
MATH_IMAGE = re.compile(r"(?:^|[\s_-])(?:tex|latex|math|mwe-math)", re.IGNORECASE)

Kind = Literal["super", "sub", "math", "tex", "rendered", "note", ""]


@dataclass
class _Open:
    """An open element, whose end tag has not been read yet."""

    tag: str
    kind: Kind
    start: int
    before: str
    """The text before it."""
    attributes: dict[str, str]
    text: list[str] = field(default_factory=list)
    inner: list[int] = field(default_factory=list)
    """Superscripts in it, as indices of changes."""
    besides: bool = False
    """Whether it holds letters or digits outside of `inner`."""
    in_notes: str = ""
    """Its text that notes and links enclose."""


@dataclass
class Typeset:
    """A rewritten page."""

    page: str
    possible_notes: int = 0
    """Superscripts that are kept and may be marks of notes: they follow a word or a year, and nothing names them."""


def typeset(page: str) -> Typeset:
    """Rewrite the superscripts, subscripts and formulas of a page as text."""
    if not SIGNS.search(page):
        return Typeset(page)
    reader = _Typesetter(page)
    reader.feed(page)
    reader.close()
    return reader.result()


class _Typesetter(HTMLParser):
    """Parses a page and collects the changes that rewrite its superscripts, subscripts and formulas."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self._page = page
        self._classes = _raised_classes(page)
        lengths = (len(line) for line in page.split("\n"))
        self._lines = list(itertools.accumulate((length + 1 for length in lengths), initial=0))
        self._open: list[_Open] = []
        self._changes: list[tuple[int, int, str, bool]] = []  # start, end, text, whether it may be a note's mark
        self._before = ""
        """The last characters of text."""
        self._formulas = False

    def result(self) -> Typeset:
        """The page with all changes."""
        while self._open:
            self._end(self._open.pop(), len(self._page), len(self._page))
        parts, end = [], 0
        for start, stop, text, _ in sorted(self._changes):
            if start >= end:
                parts += [self._page[end:start], html.escape(text, quote=False)]
                end = stop
        return Typeset("".join([*parts, self._page[end:]]), sum(possible for *_, possible in self._changes))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        start = self._offset()
        self._end_block(tag, start)
        attributes = {name: value or "" for name, value in attrs}
        if tag == "img":
            self._image(attributes, start)
        if (kind := _kind(tag, attributes, self._classes)) or tag in INLINE:
            outer = self._scripted() if kind else None
            before = "".join(outer.text)[-8:] if outer else self._before
            self._open.append(_Open(tag, kind, start, before, attributes))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "img":
            self._image({name: value or "" for name, value in attrs}, self._offset())

    def handle_endtag(self, tag: str) -> None:
        start = self._offset()
        self._end_block(tag, start)
        if not any(one.tag == tag for one in self._open):
            return
        while (one := self._open.pop()).tag != tag:
            self._end(one, start, start)
        self._end(one, start, (self._page.find(">", start) + 1) or len(self._page))

    def handle_data(self, data: str) -> None:
        self._add(data)

    def _end_block(self, tag: str, start: int) -> None:
        """End all open elements at the edge of a paragraph or table cell, which neither notes nor formulas cross."""
        if tag in ENDING:
            while self._open:
                self._end(self._open.pop(), start, start)
            self._before = ""

    def _offset(self) -> int:
        line, column = self.getpos()
        return self._lines[line - 1] + column

    def _scripted(self) -> _Open | None:
        """The innermost open element that will be rewritten, if any."""
        return next((one for one in reversed(self._open) if one.kind), None)

    def _add(self, text: str, change: int | None = None) -> None:
        """Add text at the current position; `change` is the index of the superscript that it comes from."""
        said = any(map(str.isalnum, text))
        noted = False
        for one in reversed(self._open):
            if one.kind:
                one.text.append(text)
                one.in_notes += text if noted else ""
                return
            one.besides |= said and change is None
            noted |= _is_note(one)
            if change is not None:
                one.inner.append(change)
        self._before = (self._before + text)[-8:]

    def _image(self, attributes: dict[str, str], start: int) -> None:
        """Replace an image of a formula by its TeX, unless the page contains the formulas themselves."""
        tex = attributes.get("alt", "")
        named = f"{attributes.get('class', '')} {attributes.get('role', '')}"
        if tex and MATH_IMAGE.search(named) and not self._formulas and not self._scripted():
            text = in_tex(tex)
            self._changes.append((start, start + len(self.get_starttag_text() or ""), text, False))
            self._add(text)

    def _end(self, one: _Open, start: int, stop: int) -> None:
        """Close an element, and replace it by the text that it becomes."""
        if not one.kind:
            if one.inner and not one.besides and _is_note(one):  # a link around nothing but a superscript
                for change in one.inner:
                    self._changes[change] = (*self._changes[change][:2], "", False)
            return
        text, possible = self._text_of(one, start), False
        if one.kind == "super" and text:
            possible = may_be_note("".join(one.text), one.before)
        if self._scripted():
            self._add(text)
            return
        self._changes.append((one.start, stop, text, possible))
        self._add(text, len(self._changes) - 1 if one.kind == "super" else None)

    def _text_of(self, one: _Open, start: int) -> str:
        said = "".join(one.text)
        if one.kind == "rendered":
            return ""
        if one.kind == "math":
            self._formulas = True
            return formula(parsed(f"{self._page[one.start : start]}</{one.tag}>"))
        if one.kind == "tex":
            self._formulas = True
            return in_tex(said, "display" in one.attributes["type"])
        if one.kind == "note":
            return "" if _is_mark(said.strip(), one.attributes.get("href", "")) else said
        letters = [letter for letter in said if letter.isalnum()]
        linked = letters and letters == [letter for letter in one.in_notes if letter.isalnum()]
        if one.kind == "super" and (linked or _is_note(one)):
            return ""
        script: Script = "super" if one.kind == "super" else "sub"
        return as_script(said, script, one.before)


def _raised_classes(page: str) -> dict[str, Script]:
    """The CSS classes that a page's style sheets set above or below the line, which is how word processors write
    superscripts."""
    found: dict[str, Script] = {}
    for sheet in SHEET.findall(page):
        for selectors, body in RULE.findall(sheet):
            if script := _styled(body):
                found |= dict.fromkeys(CLASS.findall(selectors.strip()), script)
    return found


def _styled(style: str) -> Script | None:
    """Whether a CSS style sets its text as a superscript or a subscript; None if neither."""
    if named := STYLE.search(style):
        return named_script(named[1])
    if moved := MOVED.search(style):
        return "super" if (moved[1].lower() == "top") == (moved[2] == "-") else "sub"
    shifted = SHIFTED.search(style)
    return None if not shifted or not SMALLER.search(style) else "sub" if shifted[1] else "super"


def _kind(tag: str, attributes: dict[str, str], classes: Mapping[str, Script]) -> Kind:
    """The kind of superscript, subscript or formula as which an element is rewritten."""
    names = attributes.get("class", "")
    if tag.rpartition(":")[2] == "math":
        return "math"
    if tag == "script" and attributes.get("type", "").startswith("math/tex"):
        return "tex"
    if tag == "mjx-math" or "katex-html" in names.split():
        return "rendered"
    if tag in ("sup", "sub"):
        return "super" if tag == "sup" else "sub"
    if tag in INLINE:
        if ("hidden" in attributes or UNSEEN.search(attributes.get("style", ""))) and "math" not in names.lower():
            return "rendered"
        if tag == "a" and "noteref" in (attributes.get("epub:type", "") + attributes.get("role", "")):
            return "note"
        if script := _styled(attributes.get("style", "")):
            return script
        for name in names.split():
            if name in classes or name.lower() in SCRIPTS:
                return classes.get(name) or named_script(name) or ""
    return ""


def _is_mark(said: str, link: str) -> bool:
    """Whether a link of type `noteref` contains only a note mark; in glossaries such a link contains the word
    itself."""
    mark = unicodedata.normalize("NFKC", said).strip("^{}[](). ")  # which may have been set above the line
    return bool(MARK.fullmatch(mark)) or (mark.isdecimal() and re.search(rf"(?<!\d){mark}$", link) is not None)


def _is_note(one: _Open) -> bool:
    """Whether an element is, or links to, a note.

    A link to another page from a number's exponent is no note: it explains the power.
    """
    if one.tag in NOTES or NOTE.search(" ".join(one.attributes.get(name, "") for name in NAMING)):
        return True
    return (
        one.tag == "a" and "href" in one.attributes and ("#" in one.attributes["href"] or not one.before[-1:].isdigit())
    )
