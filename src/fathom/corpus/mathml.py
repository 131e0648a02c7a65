"""Writes MathML formulas in one line: in the TeX that they contain, or else as text built from their elements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

from fathom.corpus.superscripts import as_script

EMPTY = ("mspace", "none", "mprescripts", "malignmark", "maligngroup")
"""Elements without contents, which need no end tag in HTML."""
SET_CLOSE = ("mn", "mo", "msup", "msub", "msubsup")
"""What stands directly before or after a number that it belongs to."""
TEX = ("tex", "latex")
ENVIRONMENT = re.compile(r"\\(?:begin|end|color|hspace|mathop)\s*\{[^{}]*\}")
WORD = re.compile(r"(?<![\\a-z])[a-z]{3,}")
"""A word of a sentence; in TeX, the name of a function or a text, which the formula's elements have, too."""
DELIMITERS = ("$", "\\(", "\\[", "\\begin")


def formula(math: Element) -> str:
    """A `math` element as text: its TeX annotation or TeX `alttext` between \\( and \\), or else text built from its
    child elements."""
    tex = next((_text(one) for one in math.iter() if _is_tex(one)), "")
    if not tex.strip() and _is_formula(math.get("alttext", ""), math):
        tex = math.get("alttext", "")
    return in_tex(tex) if tex.strip() else " ".join(_shown(math).split())


def _is_formula(text: str, math: Element) -> bool:
    """Whether an `alttext` is the formula itself: it contains all of the formula's digits, and is not a sentence about
    the formula."""
    leaves = [one.text or "" for one in math.iter() if not len(one) and not _name(one).startswith("annotation")]
    said = "".join(leaves).lower()
    digits = Counter(filter(str.isdecimal, said)) - Counter(filter(str.isdecimal, text))
    words = WORD.findall(ENVIRONMENT.sub(" ", text).lower())
    return not digits and sum(word not in said for word in words) < 2


def in_tex(tex: str, display: bool = False) -> str:
    """TeX with its delimiters."""
    tex = " ".join(tex.split())
    if not tex or tex.startswith(DELIMITERS):
        return tex
    return f"\\[{tex}\\]" if display else f"\\({tex}\\)"


def parsed(source: str) -> Element:
    """The element tree parsed from a piece of HTML that consists of one element."""
    reader = _Reader()
    reader.feed(source)
    reader.close()
    return reader.element()


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._tree = TreeBuilder()
        self._tree.start("body", {})
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tree.start(tag, {name: value or "" for name, value in attrs})
        if tag in EMPTY:
            self._tree.end(tag)
        else:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tree.start(tag, {name: value or "" for name, value in attrs})
        self._tree.end(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while (last := self._open.pop()) != tag:
                self._tree.end(last)
            self._tree.end(tag)

    def handle_data(self, data: str) -> None:
        self._tree.data(data)

    def element(self) -> Element:
        for tag in reversed(self._open):
            self._tree.end(tag)
        self._tree.end("body")
        body = self._tree.close()
        return body[0] if len(body) else body


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2].rpartition(":")[2] if isinstance(element.tag, str) else ""


def _is_tex(element: Element) -> bool:
    return _name(element) == "annotation" and (element.get("encoding") or "").lower().endswith(TEX)


def _text(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def _shown(element: Element) -> str:
    name, parts = _name(element), [_shown(child) for child in element]
    if name in ("annotation", "annotation-xml", "mphantom"):
        return ""
    if name == "semantics":
        return parts[0] if parts else ""
    if name == "mspace":
        return " "
    if name == "mmultiscripts":
        return _around(list(map(_name, element)), parts)
    if name in SETTINGS and len(parts) >= SETTINGS[name][0]:
        return SETTINGS[name][1](parts)
    if name == "msqrt":
        return f"√{_group(_row(element, parts))}"
    if name == "mfenced":
        return f"{element.get('open', '(')}{', '.join(parts)}{element.get('close', ')')}"
    return _row(element, parts)


def _row(element: Element, parts: Sequence[str]) -> str:
    """The text of an element's children, joined in one line. Digits of adjacent `mn`, `mo` and script elements are
    one number; a fraction stands apart."""
    text, before = element.text or "", ""
    for child, part in zip(element, parts, strict=True):
        name, shown = _name(child), part if part.strip() or part == " " else ""
        apart = text[-1:].isdigit() and shown[:1].isdigit() and not (name in SET_CLOSE and before in (*SET_CLOSE, ""))
        text += f"{' ' if apart else ''}{shown}{child.tail if child.tail and child.tail.strip() else ''}"
        before = name if shown else before
    return text if text.strip() or text == " " else ""


def _group(text: str) -> str:
    text = text.strip()
    return text if re.fullmatch(r"[\w⁻₋.]+", text) else f"({text})"


def _over(text: str) -> str:
    """The text of what MathML sets above a base: an accent unchanged, a limit as a superscript."""
    return as_script(text, "super") if any(map(str.isalnum, text)) or text == "∞" else text


def _around(names: list[str], parts: list[str]) -> str:
    """A base followed by its pairs of subscript and superscript, and preceded by the pairs that come after
    `mprescripts`."""
    cut = names.index("mprescripts") if "mprescripts" in names else len(names)
    base, after, before = parts[0] if parts else "", parts[1:cut], parts[cut + 1 :]
    return f"{_pairs(before)}{base}{_pairs(after)}"


def _pairs(parts: list[str]) -> str:
    return "".join(as_script(part, "super" if at % 2 else "sub") for at, part in enumerate(parts) if part.strip())


SETTINGS: dict[str, tuple[int, Callable[[list[str]], str]]] = {
    "msup": (2, lambda part: part[0].strip() + as_script(part[1], "super")),
    "msub": (2, lambda part: part[0].strip() + as_script(part[1], "sub")),
    "msubsup": (3, lambda part: part[0].strip() + as_script(part[1], "sub") + as_script(part[2], "super")),
    "munder": (2, lambda part: part[0].strip() + as_script(part[1], "sub")),
    "mover": (2, lambda part: part[0].strip() + _over(part[1].strip())),
    "munderover": (3, lambda part: part[0].strip() + as_script(part[1], "sub") + as_script(part[2], "super")),
    "mfrac": (2, lambda part: f"{_group(part[0])}/{_group(part[1])}"),
    "mroot": (2, lambda part: f"{as_script(part[1], 'super')}√{_group(part[0])}"),
    "mtr": (1, lambda part: ", ".join(one.strip() for one in part)),
    "mtable": (1, lambda part: "; ".join(one.strip() for one in part)),
}
"""How an element shows its parts, and how many it needs."""
