"""Texts with what layout and type change about their words undone, so that items are found in every form of them.

Compatibility forms are taken apart (NFKC, ligatures above all), case is folded where that changes the number of
letters, invisible characters are left out. Which words a hyphen at a line's end divides only a vocabulary can tell.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.words import lower

DIVISION = re.compile(r"[-‐]\n[ \t]*(?=[^\W_])")
"""A hyphen at a line's end, where normalised text has no blanks, and what follows up to the next word."""
BEFORE, AFTER = re.compile(r"[^\W_]+\Z"), re.compile(r"[^\W_]+")
LONGEST = 64
"""Most characters of the first half of a divided word."""
LAST = 0x2FFFF
"""Beyond it no character is in use that folding changes, but tags, which no text has."""
INVISIBLE = re.compile(r"[\u034f\u180b-\u180f\ufe00-\ufe0f]")
"""Variation selectors and joiners that Unicode counts among marks, not among format characters."""


@dataclass(frozen=True)
class Folded:
    """A folded text, and the place in the text of each of its characters; None if they are the same."""

    text: str
    places: NDArray[np.int64] | None = None

    def span(self, start: int, end: int) -> tuple[int, int]:
        """A passage of the folded text as one of the text."""
        return (start, end) if self.places is None else (int(self.places[start]), int(self.places[end - 1]) + 1)


def folded(text: str) -> Folded:
    """A text with compatibility forms taken apart and without invisible characters."""
    if text.isascii():
        return Folded(text)
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    places = np.flatnonzero(_changed()[np.minimum(codes, LAST)]).tolist()
    return _replaced(text, ((place, place + 1, _fold(text[place])) for place in places)) if places else Folded(text)


def rejoined(one: Folded, known: Container[str]) -> Folded | None:
    """A folded text with its divided words joined if the whole is a known word; None if no word is."""
    text = one.text
    if "-\n" not in text and "‐\n" not in text:
        return None
    changes = [(*match.span(), "") for match in DIVISION.finditer(text) if _whole(text, *match.span()) in known]
    if not changes:
        return None
    joined = _replaced(text, changes)
    return joined if one.places is None or joined.places is None else Folded(joined.text, one.places[joined.places])


def _whole(text: str, start: int, end: int) -> str:
    """The word that a division divides, in lower case; empty if nothing stands before it."""
    before, after = BEFORE.search(text[max(start - LONGEST, 0) : start]), AFTER.match(text, end)
    return lower(before[0] + after[0]) if before and after else ""


def _replaced(text: str, changes: Iterable[tuple[int, int, str]]) -> Folded:
    parts, places, end = [], [], 0
    for start, stop, new in changes:
        parts += [text[end:start], new]
        places += [np.arange(end, start), np.full(len(new), start)]
        end = stop
    return Folded("".join([*parts, text[end:]]), np.concatenate([*places, np.arange(end, len(text))]))


def _fold(character: str) -> str:
    if unicodedata.category(character)[0] in "SPZ":  # no part of a word: ´ would leave a mark, and ™ letters, in one
        return character
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", character).casefold())
    return "".join(one for one in plain if unicodedata.category(one) != "Cf" and not INVISIBLE.match(one))


@functools.cache
def _changed() -> NDArray[np.bool_]:
    """Which characters folding changes beyond what the words themselves ignore."""
    characters = map(chr, range(LAST + 1))
    return np.fromiter((lower(_fold(one)) != lower(one) for one in characters), np.bool_, LAST + 1)
