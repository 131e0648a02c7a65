"""Streamed text is broken between words, whatever pieces it comes in."""

from __future__ import annotations

import random
import textwrap

import pytest

from fathom.cli.wrapping import Wrapped, cells

TEXT = (
    "A model that has more depth may do more work for every token, and that is the whole of the idea.  \n"
    "Next line:\n\n  def f(x):\n      return x\n"
)


def wrapped(text: str, width: int, sizes: int) -> str:
    """The text as it is written if it comes in pieces of up to so many characters."""
    chance, written = random.Random(sizes), list[str]()
    write = Wrapped(written.append, lambda: width)
    while text:
        size = chance.randint(1, sizes)
        write(text[:size])
        text = text[size:]
    return "".join(written)


@pytest.mark.parametrize("sizes", [1, 3, 1000])
@pytest.mark.parametrize("width", [12, 40, 80])
def test_lines_break_between_words(width: int, sizes: int) -> None:
    found = wrapped(TEXT, width, sizes)
    assert max(map(len, found.splitlines())) <= width and found.split() == TEXT.split()
    first = TEXT.splitlines()[0]
    expected = textwrap.wrap(first, width, break_long_words=False, break_on_hyphens=False)
    assert found.splitlines()[: len(expected)] == expected
    assert "\n\n  def f(x):\n" in found or width == 12


def test_a_word_longer_than_a_line_and_a_script_without_blanks() -> None:
    assert wrapped("ab " + "x" * 25 + " c\n", 10, 1).splitlines() == ["ab", *["x" * 10] * 2, "xxxxx c"]
    lines = wrapped("深さを測る縄と鉛" * 4 + "\n", 10, 5).splitlines()
    assert max(map(cells, lines)) <= 10 and "".join(lines) == "深さを測る縄と鉛" * 4
    assert cells("e\u0301") == 1
