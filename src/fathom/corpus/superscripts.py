"""Writes superscripts and subscripts as text: 2³² and x₁ where Unicode has every character, else 2^{a/b}; words as
x_{max}.

`typeset.py` finds them in HTML, EPUB and JATS files, `tei.py` in TEI files, and `pdf_scripts.py` in PDF files, there
only in words with a digit. `card.py` says how many may be marks of notes (`may_be_note`).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Literal

Script = Literal["super", "sub"]
MARKS: dict[Script, str] = {"super": "^", "sub": "_"}
MINUS = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2212"}
CODES = (*range(0xA0, 0x100), *range(0x2120, 0x2123), *range(0x1D2C, 0x209D), 0x2C7C)
"""Where Unicode has them; the last form of a letter is used."""
WORD = re.compile(r"[^\W\d_]{2}")
ORDINALS = frozenset(("st", "nd", "rd", "th"))
NAMED = {
    "super": re.compile(r"\b(?:sup(?:er(?:script)?)?|exponent)\b", re.I),
    "sub": re.compile(r"\b(?:sub(?:script)?|inf)\b", re.I),
}
"""How attributes name the two: a class, TEI's `rend`, CSS's `vertical-align`."""
MARK = re.compile(r"\[?\d{1,3}(?:\s?[,;\u2013-]\s?\d{1,3})*\]?")
YEAR_OR_END = re.compile(r"(?:(?<!\d)(?:1\d|20)\d\d|[.,;:!?\"”’])\Z")


def as_script(text: str, script: Script, before: str = "") -> str:
    """A superscript or subscript, written as plain text in one line.

    Args:
        text: The text.
        script: Where it is set.
        before: What stands before it; an ordinal's letters (19th) are written as they are.
    """
    text = " ".join(text.split())
    if before[-1:].isdigit() and text.lower() in ORDINALS:
        return text
    forms = _forms(script)
    if text in forms:  # ™
        return forms[text]
    plain = text.translate(MINUS).replace(" ", "")
    if all(one in forms for one in plain) and not WORD.search(plain):
        return "".join(map(forms.__getitem__, plain))
    if not any(map(str.isalnum, text)):  # a degree, a star, a prime
        return text
    return f"{MARKS[script]}{{{text}}}"


def named_script(words: str) -> Script | None:
    """Whether an attribute's value names a superscript or a subscript; None if it names neither."""
    return "super" if NAMED["super"].search(words) else "sub" if NAMED["sub"].search(words) else None


def may_be_note(text: str, before: str) -> bool:
    """Whether a superscript may be the mark of a note: a small number after a word, a year or a sentence."""
    word = len(before) >= 3 and before[-3:].isalpha()
    return bool(MARK.fullmatch(text.strip()) and (word or YEAR_OR_END.search(before)))


@functools.cache
def _forms(script: Script) -> dict[str, str]:
    """Maps each text that Unicode has as one superscript (or one subscript) character to this character."""
    found: dict[str, str] = {}
    for code in CODES:
        tag, *parts = unicodedata.decomposition(chr(code)).split() or [""]
        if tag == f"<{script}>":
            found["".join(chr(int(part, 16)) for part in parts).translate(MINUS)] = chr(code)
    return found
