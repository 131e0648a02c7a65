"""Folds texts: removes the effects of layout, fonts and markup; benchmark items are searched for in every folded form
of a text.

Folding removes markup (entities, tags, LaTeX, footnote marks), accents of Latin, Greek and Cyrillic letters, and
invisible characters. It decomposes compatibility forms (NFKC), and replaces letters of other alphabets by the Latin
letters that they look like. Joining words that a line break hyphenates takes a vocabulary.

`bare` is the second reading: without citations, notes, links, time codes and line numbers (`apparatus.py`).

`confusables.py` lists the letters that look like Latin ones.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fathom.corpus import apparatus, markup
from fathom.corpus.confusables import LOOKALIKES, SHAPES
from fathom.corpus.words import lower

DIVISION = re.compile(r"[-‐]\n[ \t]*(?:(?:[>#*|;%!]|//|--)[ \t>]*)*(?=[^\W_])")
"""A hyphen at a line's end, where normalised text has no blanks, and what follows up to the next word: blanks, and the
marks of quotes and comments."""
GROUPED = re.compile(r",(?=\d{3}(?!\d))(?<=\d,)")
"""The comma of a number's thousands."""
BEFORE, AFTER = re.compile(r"[^\W_]+\Z"), re.compile(r"[^\W_]+")
LONGEST = 64
"""Most characters of the first half of a divided word."""
LAST = 0x2FFFF
"""Beyond it no character is in use that folding changes, but tags, which no text has."""
INVISIBLE = re.compile(r"[\u034f\u180b-\u180f\ufe00-\ufe0f]")
"""Variation selectors and joiners that Unicode counts among marks, not among format characters."""
ACCENTS = re.compile(r"[\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]")
"""Combining marks of Latin, Greek and Cyrillic letters; those of other scripts are vowels and part of a word."""
AROUND = 900
"""Characters that are read once more before and after what stands between the words of a text."""
DEEPEST = 3
"""Times that markup may be spelled by entities."""
TAG = re.compile(r"<[a-zA-Z][^<>]{20,20000}>")
SEVERAL = 4
"""Words of a tag, without which its attributes hold no question."""

LATIN = {shape: letter for letter, shapes in SHAPES.items() for shape in shapes}
LATIN_OF = {ord(shape): letter for letter, shapes in LOOKALIKES.items() for shape in shapes}
ALIKE = re.compile(f"[{''.join(map(chr, LATIN_OF))}]")
NOT_LATIN = re.compile(r"[^A-Za-z]+")


@dataclass(frozen=True)
class Folded:
    """A folded text, and for each of its characters the position in the original text (None if every character
    has kept its position)."""

    text: str
    places: NDArray[np.int64] | None = None

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The (start, end) in the original text of a passage that is given by its (start, end) in the folded text."""
        return (start, end) if self.places is None else (int(self.places[start]), int(self.places[end - 1]) + 1)

    def then(self, again: Folded) -> Folded:
        """This text folded once more."""
        if self.places is None or again.places is None:
            return Folded(again.text, self.places if again.places is None else again.places)
        return Folded(again.text, self.places[again.places])


def folded(text: str) -> Folded:
    """A text with its markup removed and every character reduced to its simplest form."""
    one = Folded(text)
    for _ in range(DEEPEST):
        if not (changes := list(markup.changes(one.text))):
            break
        one = one.then(_replaced(one.text, changes))
    if not one.text.isascii():
        one = one.then(_plainest(one.text))
        one = one.then(Folded(_as_latin(one.text)))
    if "," in one.text and (commas := [(*match.span(), "") for match in GROUPED.finditer(one.text)]):
        one = one.then(_replaced(one.text, commas))
    return one


def bare(text: str) -> list[Folded]:
    """Folded copies of those parts of a text that contain citations, notes, links, time codes or line numbers, with
    these removed.

    Escapes of a URL are read as the characters that they stand for.
    """
    found: list[Folded] = []
    changes: list[tuple[int, int, str]] = []
    for change in [*apparatus.changes(text), (len(text) + 2 * AROUND + 1, 0, "")]:
        if changes and change[0] - changes[-1][1] > 2 * AROUND:
            start = max(changes[0][0] - AROUND, 0)
            part = text[start : changes[-1][1] + AROUND]
            one = _replaced(part, [(low - start, high - start, new) for low, high, new in changes])
            one = one.then(folded(one.text))
            found.append(Folded(one.text, one.places + start if one.places is not None else None))
            changes = []
        changes.append(change)
    return found


def attributes(text: str) -> Folded | None:
    """The folded contents of markup tags that hold several words, such as alt texts of images, questions in script
    attributes, and rows in XML attributes."""
    tags = [match.span() for match in TAG.finditer(text)] if "<" in text and "=" in text else []
    said = [(low + 1, high - 1) for low, high in tags if len(text[low:high].split()) >= SEVERAL]
    if not said:
        return None
    gaps = zip([0, *(high for _, high in said)], [*(low for low, _ in said), len(text)], strict=True)
    one = _replaced(text, ((*gap, "\n") for gap in gaps))
    return one.then(folded(one.text))


def rejoined(one: Folded, known: Container[str]) -> Folded | None:
    """A folded text in which words hyphenated at a line end are joined if the joined word is known; None if no word
    is."""
    text = one.text
    if "-\n" not in text and "‐\n" not in text:
        return None
    changes = [(*match.span(), "") for match in DIVISION.finditer(text) if _whole(text, *match.span()) in known]
    return one.then(_replaced(text, changes)) if changes else None


def _as_latin(text: str) -> str:
    """A text in which letters that look like Latin letters are replaced by these, unless another non-Latin letter
    stands in the same run between Latin letters.

    So Greek and Cyrillic words among Latin ones stay as they are, but for the few that look like Latin words.
    """
    if not ALIKE.search(text):
        return text
    return NOT_LATIN.sub(lambda match: _read(match[0]), text)


def _read(part: str) -> str:
    letters = [one for one in part if one.isalpha()]
    return part.translate(LATIN_OF) if letters and all(ord(one) in LATIN_OF for one in letters) else part


def _whole(text: str, start: int, end: int) -> str:
    """The word that a hyphen at a line's end divides, in lower case; empty if nothing precedes the hyphen."""
    before, after = BEFORE.search(text[max(start - LONGEST, 0) : start]), AFTER.match(text, end)
    return lower(before[0] + after[0]) if before and after else ""


def _replaced(text: str, changes: Iterable[tuple[int, int, str]]) -> Folded:
    parts, places, end = [], [], 0
    for start, stop, new in changes:
        parts += [text[end:start], new]
        places += [np.arange(end, start), np.full(len(new), start)]
        end = stop
    return Folded("".join([*parts, text[end:]]), np.concatenate([*places, np.arange(end, len(text))]))


def _plainest(text: str) -> Folded:
    """A text with every character replaced by the form that `_fold` gives it."""
    changed, begins, lengths, letters = _forms()
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
    known = np.minimum(codes, LAST)
    if not changed[known].any():
        return Folded(text)
    counts = lengths[known]
    places = np.repeat(np.arange(len(codes)), counts)
    within = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    new = np.where(changed[known[places]], letters[begins[known[places]] + within], codes[places])
    return Folded(new.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass"), places)


def _fold(character: str) -> str:
    plain = unicodedata.normalize("NFKC", character)
    circled = len(plain) == 1 and plain.isalpha()
    if unicodedata.category(character)[0] in "SPZ" and not circled:  # no part of a word: ´ would leave a mark in one
        return character
    if plain != character and "\u2044" in plain:  # a fraction, which is not a digit of the preceding number
        return f" {plain}"
    plain = unicodedata.normalize("NFC", ACCENTS.sub("", unicodedata.normalize("NFD", plain)))
    plain = "".join(LATIN.get(one, one) for one in plain)
    if len(plain.casefold()) != len(plain):
        plain = unicodedata.normalize("NFKC", plain.casefold())
    return "".join(one for one in plain if unicodedata.category(one) != "Cf" and not INVISIBLE.match(one))


Forms = tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]


@functools.cache
def _forms() -> Forms:
    """Which characters folding changes, and the positions, lengths and text of their new forms."""
    forms = [_fold(chr(code)) for code in range(LAST + 1)]
    changed = np.fromiter((lower(form) != lower(chr(code)) for code, form in enumerate(forms)), np.bool_, LAST + 1)
    changed[:128] = False
    lengths = np.where(changed, np.fromiter(map(len, forms), np.int64, LAST + 1), 1)
    whole = "".join(form for form, new in zip(forms, changed, strict=True) if new)
    begins = np.cumsum(np.where(changed, lengths, 0)) - np.where(changed, lengths, 0)
    letters = np.frombuffer(whole.encode("utf-32-le", "surrogatepass"), "<u4")
    return changed, np.minimum(begins, len(letters) - 1), lengths, letters
