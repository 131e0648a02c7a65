"""Normalised text: NFC, or NFKC where that keeps the meaning; no control characters, no long runs of blank lines.

NFKC writes 2³² as 232, 5½ as 51⁄2 and 10⁻³ as 10−3, so superscripts, subscripts, fractions and formulas are left
unchanged. Normalising a text twice gives the same as normalising it once.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Literal

FORMULA = re.compile(
    r"\[START_FORMULA\].{0,4000}?\[END_FORMULA\]|\$\$.{1,4000}?\$\$|\\\[.{1,4000}?\\\]|\\\(.{1,1000}?\\\)"
    r"|(?<![\\$])\$(?!\s)[^$\n]{1,1000}?(?<![\s\\])\$(?![$\d])",
    re.DOTALL,
)
"""Formulas, in which NFKC would change the meaning of letters too."""
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u2060\ufeff]")
"""Control characters, and soft hyphens, word joiners and byte order marks, which would split words."""
LINE_ENDS = re.compile(r"\r\n?|[\x85\u2028\u2029]")


Form = Literal["nfc", "nfkc"]


def normalize(text: str, strip: Sequence[str] = (), blank_lines: int = 2, form: Form = "nfc") -> str:
    """A text in normalised form.

    Args:
        text: The text.
        strip: Regular expressions whose matches are removed.
        blank_lines: Longer runs are cut to this many.
        form: Unicode's form; nfkc also takes ligatures, fullwidth letters and other compatibility forms apart.
    """
    before = None
    # Removing a match may create another one, and so may NFKC: repeat until nothing changes.
    while text != before:
        before = text
        text = _once(text, strip, blank_lines, form)
    return text


def _once(text: str, strip: Sequence[str], blank_lines: int, form: Form) -> str:
    text = LINE_ENDS.sub("\n", text)
    text = CONTROLS.sub("", text.replace("\f", "\n"))
    for pattern in strip:
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    if not text.isascii():
        text = _compatible(text) if form == "nfkc" else unicodedata.normalize("NFC", text)
    text = "\n".join(line.rstrip(" \t") for line in text.split("\n"))
    text = re.sub(f"\n{{{blank_lines + 2},}}", "\n" * (blank_lines + 1), text)
    return text.strip("\n")


def _compatible(text: str) -> str:
    """A text in NFKC form, except for its formulas, superscripts, subscripts and fractions."""
    parts, end = [], 0
    for match in _kept().finditer(text):
        parts += [unicodedata.normalize("NFKC", text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, unicodedata.normalize("NFKC", text[end:])])


@functools.cache
def _kept() -> re.Pattern[str]:
    tags = ("<super>", "<sub>", "<fraction>")
    kept = [one for one in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(one).startswith(tags)]
    return re.compile(f"{FORMULA.pattern}|[{''.join(kept)}]+", re.DOTALL)
