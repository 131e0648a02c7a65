"""Normalised text: NFKC outside of formulas, no control characters, no long runs of blank lines. Idempotent."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

FORMULA = re.compile(
    r"\[START_FORMULA\].{0,4000}?\[END_FORMULA\]|\$\$.{1,4000}?\$\$|\\\[.{1,4000}?\\\]|\\\(.{1,1000}?\\\)"
    r"|(?<![\\$])\$(?!\s)[^$\n]{1,1000}?(?<![\s\\])\$(?![$\d])",
    re.DOTALL,
)
"""Formulas, in which NFKC would change the meaning: x² must not become x2."""
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u2060\ufeff]")
"""Control characters, and soft hyphens, word joiners and byte order marks, which would split words."""
LINE_ENDS = re.compile(r"\r\n?|[\x85\u2028\u2029]")


def normalize(text: str, strip: Sequence[str] = (), blank_lines: int = 2) -> str:
    """A text in normalised form.

    Args:
        text: The text.
        strip: Regular expressions whose matches are removed.
        blank_lines: Longer runs are cut to this many.
    """
    before = None
    # Removing a match may create another one, and so may NFKC: repeat until nothing changes.
    while text != before:
        before = text
        text = _once(text, strip, blank_lines)
    return text


def _once(text: str, strip: Sequence[str], blank_lines: int) -> str:
    text = LINE_ENDS.sub("\n", text)
    text = CONTROLS.sub("", text.replace("\f", "\n"))
    for pattern in strip:
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    if not text.isascii():
        text = _composed(text)
    text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    text = re.sub(f"\n{{{blank_lines + 2},}}", "\n" * (blank_lines + 1), text)
    return text.strip("\n")


def _composed(text: str) -> str:
    """NFKC between formulas."""
    if not any(mark in text for mark in ("$", "\\", "[START_FORMULA]")):
        return unicodedata.normalize("NFKC", text)
    parts, end = [], 0
    for match in FORMULA.finditer(text):
        parts += [unicodedata.normalize("NFKC", text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, unicodedata.normalize("NFKC", text[end:])])
