"""The words of texts as numbers, which deduplication and decontamination compare.

A word is a run of letters, digits and their marks, in lower case, so case, punctuation and line breaks do not matter.
In scripts that are written without spaces every character is a word. A word's number is a polynomial of its characters
modulo 2^64 and a run of words a polynomial of theirs, both computed for all texts of a batch at once.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.stage import grouped
from fathom.report.mixing import mixed

LETTER = 0x9E3779B97F4A7C15
WORD = 0xD1342543DE82EF95
"""Odd, so that they have an inverse modulo 2^64."""
TABLE_SIZE = 1 << 18
"""Code points above are ideographs or not in use."""
ALONE = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
"""Thai and Lao, Burmese, Khmer, Kana, Han: each character counts as a word."""
STANDING_ALONE = re.compile("[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in ALONE) + "\U00020000-\U0003ffff]")
BLOCK = 1 << 20
"""Characters processed at a time."""

Numbers = NDArray[np.uint64]


@dataclass(frozen=True)
class Words:
    """The words of several texts, concatenated."""

    numbers: Numbers  # [W]
    starts: NDArray[np.int64]  # [W]: the first character of each word, in its own text
    ends: NDArray[np.int64]  # index of the character after its last one
    bounds: NDArray[np.int64]  # [D + 1]: the words of text d are bounds[d] to bounds[d + 1]

    def runs(self, length: int) -> tuple[Numbers, NDArray[np.int64]]:
        """The hash numbers of all runs of `length` words within a text, and the range of each text in this array."""
        counts = np.maximum(np.diff(self.bounds) - length + 1, 0)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        found = [runs for _, runs, _ in self.runs_of([length])]
        return found[0] if found else np.empty(0, np.uint64), bounds

    def runs_of(self, lengths: Iterable[int]) -> Iterator[tuple[int, Numbers, NDArray[np.int64]]]:
        """(length, hashes, positions of the first word) of all runs of words within each text, for several lengths."""
        wanted = set(lengths)
        text = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))  # [W]
        grown = self.numbers.copy()
        for length in range(1, max(wanted, default=0) + 1):
            if length > 1:
                grown = grown[:-1] * np.uint64(WORD) + self.numbers[length - 1 :]
            if not len(grown):
                return
            if length in wanted:
                places = np.flatnonzero(text[: len(grown)] == text[length - 1 :])
                yield length, mixed(grown[places]), places


def count_words(text: str) -> int:
    """How many words a text has."""
    return len(words_of([text]).numbers)


def run_numbers(numbers: Numbers, length: int) -> Numbers:
    """A hash number for each run of `length` consecutive words."""
    found = numbers[: len(numbers) - length + 1].copy()
    for shift in range(1, length):
        found *= np.uint64(WORD)
        found += numbers[shift : len(numbers) - length + 1 + shift]
    return mixed(found)


def words_of(texts: Sequence[str]) -> Words:
    """The words of texts, which may have any length."""
    if sum(map(len, texts)) > BLOCK:
        groups = grouped(texts, len, BLOCK)
        return _joined([_words_of_one(one[0]) if len(one[0]) > BLOCK else _words_of_block(one) for one in groups])
    return _words_of_block(texts)


def pieces(text: str, size: int) -> Iterator[str]:
    """A long text in pieces that end before a space or line break; only a word of at least half a piece may be
    split."""
    begin = 0
    while len(text) - begin > size:
        middle, most = begin + size // 2, begin + size
        cut = max(text.rfind("\n", middle, most), text.rfind(" ", middle, most))
        end = cut if cut > 0 else most
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _joined(parts: Sequence[Words]) -> Words:
    counts = np.concatenate([np.diff(part.bounds) for part in parts])
    return Words(
        np.concatenate([part.numbers for part in parts]),
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.ends for part in parts]),
        np.concatenate([[0], np.cumsum(counts)]),
    )


def _words_of_one(text: str) -> Words:
    """The words of a long text, processed in blocks that end between words."""
    parts, begin = [], 0
    for piece in pieces(text, BLOCK):
        part = _words_of_block([piece])
        parts.append(Words(part.numbers, part.starts + begin, part.ends + begin, part.bounds))
        begin += len(piece)
    whole = _joined(parts)
    return Words(whole.numbers, whole.starts, whole.ends, np.array([0, len(whole.numbers)]))


def _words_of_block(texts: Sequence[str]) -> Words:
    lengths = np.fromiter((len(text) + 1 for text in texts), np.int64, len(texts))
    codes = np.frombuffer("\n".join([*texts, ""]).encode("utf-32-le", "surrogatepass"), "<u4")  # [C]
    letters, special = _letters(codes)
    inside = letters > 0
    before = np.concatenate([[False], inside[:-1]])
    first, after = inside & ~before, ~inside & before
    if special is not None:
        alone = special & inside
        next_to = alone | np.concatenate([[False], alone[:-1]])
        first |= inside & next_to
        after |= before & next_to
    starts = np.flatnonzero(first)
    ends = np.flatnonzero(after | np.concatenate([[False], first[1:] & inside[:-1]]))
    powers, inverses = _powers(len(codes))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(letters.astype(np.uint64) * powers, dtype=np.uint64)])
    numbers = mixed((sums[ends] - sums[starts]) * inverses[starts])
    edges = np.concatenate([[0], np.cumsum(lengths)])  # [D + 1]
    bounds = np.searchsorted(starts, edges)
    offsets = np.repeat(edges[:-1], np.diff(bounds))
    return Words(numbers, starts - offsets, ends - offsets, bounds)


@functools.lru_cache(maxsize=2)
def _powers_up_to(size: int) -> tuple[Numbers, Numbers]:
    steps = np.full(size, LETTER, np.uint64)
    back = np.full(size, pow(LETTER, -1, 1 << 64), np.uint64)
    steps[0] = back[0] = 1
    return np.cumprod(steps, dtype=np.uint64), np.cumprod(back, dtype=np.uint64)


def _powers(size: int) -> tuple[Numbers, Numbers]:
    powers, inverses = _powers_up_to(max(BLOCK + (BLOCK >> 2), 1 << (size - 1).bit_length()))
    return powers[:size], inverses[:size]


def _letters(codes: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.bool_] | None]:
    """Characters in lower case, with 0 for characters that belong to no word; and which characters count as words by
    themselves."""
    highest = int(codes.max(initial=0))
    if highest < 128:
        return np.take(_ascii(), codes), None
    table, alone = _table()
    if highest < TABLE_SIZE:
        letters = np.take(table, codes)
    else:  # beyond the table only variation selectors and private characters are in use
        letters = np.where(codes < TABLE_SIZE, table[np.minimum(codes, TABLE_SIZE - 1)], np.uint32(0))
    return letters, alone[np.minimum(codes, TABLE_SIZE - 1)] if highest >= ALONE[0][0] else None


@functools.cache
def _ascii() -> NDArray[np.uint32]:
    return np.array([ord(chr(code).lower()) if chr(code).isalnum() else 0 for code in range(128)], np.uint32)


@functools.cache
def _table() -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    letters = np.array([_letter(chr(code)) for code in range(TABLE_SIZE)], np.uint32)
    alone = np.zeros(TABLE_SIZE, np.bool_)
    for low, high in (*ALONE, (0x20000, TABLE_SIZE - 1)):
        alone[low : high + 1] = True
    return letters, alone


def _letter(character: str) -> int:
    """The code point of a word character in lower case; 0 for any other character."""
    if not character.isalnum() and unicodedata.category(character)[0] != "M":
        return 0
    small = lower(character)
    return ord(small) if len(small) == 1 else ord(character)


def lower(text: str) -> str:
    """A text in lower case; a final ς becomes σ, because both have the same capital letter."""
    return text.lower().replace("ς", "σ")
