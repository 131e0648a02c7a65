"""Wrap text that arrives in pieces, with line breaks only between words.

`fathom chat` uses it in a terminal, or if `COLUMNS` is set (`chat.py`); `line_width` in `report/tables.py` is the
width.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable


class Wrapped:
    """A writer for streamed text, which writes a word once it is whole, on a new line if it does not fit on the current
    one.

    Args:
        write: Receives the text.
        width: The characters of a line; asked for every piece, since a terminal may be resized.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._blank, self._word = "", ""
        """Blanks that were not written yet, and the word after them."""

    def __call__(self, text: str) -> None:
        """Write what is whole. A line break ends a word."""
        done = "".join(map(self._taken, text))
        if done:
            self._write(done)

    def _taken(self, letter: str) -> str:
        """The text that can be written once this character has arrived."""
        if letter == "\n":
            done = self._flushed() + "\n"
            self._column, self._blank = 0, ""
            return done
        if letter.isspace():
            done = self._flushed()
            self._blank += letter
            return done
        alone = cells(letter) == 2  # no blanks between words: any character may begin a line
        done = self._flushed() if alone else ""
        self._word += letter
        return done + self._flushed() if alone or cells(self._word) >= self._width() else done

    def _flushed(self) -> str:
        if not self._word:
            return ""
        blank, size = self._blank, cells(self._word)
        if self._column and self._column + cells(blank) + size > self._width():
            blank, self._column = "\n", 0
        else:
            self._column += cells(blank)
        done, self._column = blank + self._word, self._column + size
        self._blank = self._word = ""
        return done


def cells(text: str) -> int:
    """The terminal columns that a text takes: two for a wide character, none for a combining accent."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
