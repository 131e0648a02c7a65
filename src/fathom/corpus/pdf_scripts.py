"""Finds the superscripts and subscripts of a PDF page, which PDFium's text shows as ordinary digits: 2³² as 232.

A run of characters is set above or below the line if it is smaller than the characters next to it and its baseline
differs from theirs. Only words with a digit are examined, because each look at a character costs a call.
"""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import dataclass
from typing import Any

from fathom.corpus.superscripts import Script, as_script, may_be_note

WITH_DIGIT = re.compile(r"[^\s\ufffe]*\d[^\s\ufffe]*")
SMALLER = 0.86
"""Most of the size of the line's characters that a superscript has."""
RAISED, LOWERED = (0.15, 0.9), (-0.6, -0.04)
"""How far its baseline is from theirs, in their size."""
GAP, SAME = 0.25, 0.03
"""Largest gap within a word, and largest difference of one baseline, in the size of the characters."""


@dataclass(frozen=True)
class _Run:
    """A run of neighbouring characters that have the same size and the same baseline."""

    start: int
    stop: int
    size: float
    baseline: float
    left: float
    right: float

    def script_next_to(self, other: _Run | None) -> Script | None:
        """Whether this run is a superscript or a subscript of another run; None if it is neither."""
        if other is None or self.size > SMALLER * other.size:
            return None
        height = (self.baseline - other.baseline) / other.size
        if RAISED[0] < height < RAISED[1]:
            return "super"
        return "sub" if LOWERED[0] < height < LOWERED[1] else None


def with_scripts(page: Any) -> tuple[str, int]:
    """The text of a page with its superscripts and subscripts, and how many of these may be marks of notes.

    Args:
        page: PDFium's text page.
    """
    text = page.get_text_range()
    if len(text) != page.count_chars():  # positions in the text are not those of the characters
        return text, 0
    written, end, notes = "", 0, 0
    for match in WITH_DIGIT.finditer(text):
        runs = _runs(page, text, match.start(), match.end())
        before, after = _neighbour(page, text, match.start(), -1), _neighbour(page, text, match.end(), 1)
        line = None if before is None or before.script_next_to(after) else before
        for number, run in enumerate(runs):
            following = next(
                (one for one in (*runs[number + 1 :], after) if one and not run.script_next_to(one)), after
            )
            script = run.script_next_to(line) or run.script_next_to(following)
            if script is None:
                line = run
                continue
            written += _joined(text[end : run.start], line, run)
            notes += script == "super" and may_be_note(text[run.start : run.stop], written)
            written += as_script(text[run.start : run.stop], script, written)
            end = run.stop
            if run is runs[-1] and after and line and abs(after.baseline - line.baseline) < SAME * line.size:
                written += _joined(text[end : after.start], run, after)
                end = after.start
    return written + text[end:], notes


def _joined(between: str, one: _Run | None, other: _Run) -> str:
    """The text between two runs of a line, without a line break that PDFium inserted because the baseline changes."""
    if one is None or "\n" not in between or between.strip():
        return between
    gap = other.left - one.right
    if not -one.size < gap < 3 * one.size:
        return between
    return " " if gap > GAP * one.size else ""


def _neighbour(page: Any, text: str, place: int, step: int) -> _Run | None:
    """The nearest character other than white space before or after a word, even if it is on another line."""
    at = place - 1 if step < 0 else place
    while 0 <= at < len(text) and text[at].isspace():
        at += step
    return _runs(page, text, at, at + 1)[0] if 0 <= at < len(text) else None


def _runs(page: Any, text: str, start: int, stop: int) -> list[_Run]:
    import pypdfium2.raw as pdfium

    matrix = pdfium.FS_MATRIX()
    x, y = ctypes.c_double(), ctypes.c_double()
    left, right, low, high = (ctypes.c_double() for _ in range(4))
    runs: list[_Run] = []
    for at in range(start, stop):
        pdfium.FPDFText_GetMatrix(page, at, matrix)
        size = pdfium.FPDFText_GetFontSize(page, at) * math.hypot(matrix.c, matrix.d)
        pdfium.FPDFText_GetCharOrigin(page, at, x, y)
        pdfium.FPDFText_GetCharBox(page, at, left, right, low, high)
        last = runs[-1] if runs else None
        if last and abs(last.size - size) < SAME * size and abs(last.baseline - y.value) < SAME * size:
            runs[-1] = _Run(last.start, at + 1, last.size, last.baseline, last.left, right.value)
        else:
            runs.append(_Run(at, at + 1, size, y.value, left.value, right.value))
    return runs
