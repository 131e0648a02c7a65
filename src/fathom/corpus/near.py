"""Passages that are nearly a question: with a word inserted or missing, other spellings, or errors of OCR.

Seeds are runs of four words that one question alone has. Where two of a question stand in a text as in the
question, eight words in all or five in a row, the rest is aligned word by word to both sides. Words match if few of
their letters differ. A word of one side alone is passed over, seldom; another word in the place of one never is, since
that is another question of the same pattern.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.benchmarks import Item, filled, plain_all
from fathom.corpus.folding import folded
from fathom.corpus.words import Words, words_of

SEED = 4
LEAST = 8
"""Words of the shortest question that is searched for."""
REACH = 24
"""Words of a longer question, or of its passage, that must stand in the text."""
WINDOW = 2 * REACH
"""Words of a text that are read on either side of a seed."""
APART, DRIFT = 64, 3
"""Words between two seeds, and by how many more or fewer in the text."""
PASSED = 16
"""One word may be passed over, and one more in each so many words."""
ALIKE = 0.35
"""The largest share of words that are not equal but alike."""
EDGE = 16
"""Words of the shortest question whose first or last word may be missing."""
KEPT = frozenset(["not", "never", "no", "none", "nothing", "neither", "nor", "except", "without"])
"""Words that nothing is like, and that are never passed over."""


class Asked(NamedTuple):
    """A question with its passage, or alone."""

    item: int
    words: list[str]


def questions(items: Sequence[Item]) -> tuple[list[Asked], Words]:
    """The texts to search for: each question with its passage, and if it has one, the question alone, too.

    A blank is filled in, since another word in its place is another question.
    """
    stems = [filled(item, item.stem) or item.stem for item in items]
    texts = [(number, f"{item.context}\n{stem}") for number, (item, stem) in enumerate(zip(items, stems, strict=True))]
    texts += [(number, stems[number]) for number, item in enumerate(items) if item.context]
    plainest = [folded(text).text for _, text in texts]
    asked = [Asked(item, said.split()) for (item, _), said in zip(texts, plain_all(plainest), strict=True)]
    return asked, words_of(plainest)


def seeds_of(items: Sequence[Item], groups: Sequence[int]) -> dict[str, NDArray[np.uint64] | NDArray[np.int64]]:
    """Seeds, sorted, with the question and the place of each. A question's right answer owns its seeds, too."""
    asked, words = questions(items)
    answered = words_of([folded(f"{item.context}\n{item.stem} {item.gold}").text for item in items])
    owner = np.array([groups[one.item] for one in asked], np.uint64)
    sizes, rows = np.diff(words.bounds), []
    for some, of_text in ((words, owner), (answered, np.array(groups, np.uint64))):
        for _, runs, places in some.runs_of([SEED]):
            of = np.searchsorted(some.bounds, places, "right") - 1
            rows.append((runs, of, places - some.bounds[of], of_text[of]))
    if not rows:
        return {}
    pairs = np.unique(np.concatenate([np.stack([runs, mine], 1) for runs, _, _, mine in rows]), axis=0)
    known, counts = np.unique(pairs[:, 0], return_counts=True)
    runs, of, place, _ = rows[0]
    kept = (counts[np.searchsorted(known, runs)] == 1) & (sizes[of] >= LEAST)
    order = np.argsort(runs[kept], kind="stable")
    return {"seeds": runs[kept][order], "seeded": np.stack([of[kept], place[kept]], 1)[order]}


class Near:
    """Finds nearly equal questions among the seeds of texts."""

    def __init__(self, indices: Sequence[Mapping[str, NDArray[Any]]], items: Sequence[Sequence[Item]]) -> None:
        self._items = items
        self._asked: list[list[Asked]] | None = None
        known, found = [np.empty(0, np.uint64)], [np.empty((0, 3), np.int64)]
        for number, index in enumerate(indices):
            if "seeds" in index:
                known.append(index["seeds"].astype(np.uint64))
                rows = index["seeded"].astype(np.int64)
                found.append(np.column_stack([np.full(len(rows), number), rows]))
        runs, entries = np.concatenate(known), np.concatenate(found)
        order = np.argsort(runs, kind="stable")
        self.seeds, self._entries = runs[order], entries[order]

    def pairs(
        self, words: Words, places: NDArray[np.int64], first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """(text, benchmark, question, its place, the place in the text) of pairs of seeds, one for each stretch.

        Args:
            words: The words of the texts.
            places: Where seeds begin.
            first: The first entry of each.
            last: The end of its entries.
        """
        counts = last - first
        at = np.repeat(places, counts)
        row = self._entries[np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())]
        text = np.searchsorted(words.bounds, at, "right") - 1
        order = np.lexsort((at, row[:, 1], row[:, 0], text))
        at, row, text = at[order], row[order], text[order]
        same = (text[1:] == text[:-1]) & (row[1:, :2] == row[:-1, :2]).all(1)
        near = (at[1:] - at[:-1] <= APART) & (np.abs(np.diff(at - row[:, 2])) <= DRIFT) & (np.diff(row[:, 2]) > 0)
        pair = np.flatnonzero(same & near)
        fresh = np.ones(len(pair), np.bool_)
        fresh[1:] = ~((np.diff(pair) == 1) & (np.diff(at[pair]) <= APART))  # the others continue a stretch
        for one in pair[fresh].tolist():
            benchmark, question, place = row[one].tolist()
            yield int(text[one]), benchmark, question, place, int(at[one])

    def asked(self, benchmark: int, question: int) -> Asked:
        """A question by its number among `questions`."""
        if self._asked is None:
            self._asked = [questions(items)[0] for items in self._items]
        return self._asked[benchmark][question]

    def span(self, asked: Asked, place: int, said: Sequence[str], here: int) -> tuple[int, int] | None:
        """Which words of a text are nearly the question, if those at a seed are."""
        ahead = _walk(asked.words[place:], said[here:])
        behind = _walk(asked.words[:place][::-1], said[:here][::-1])
        words, size = ahead.asked + behind.asked, len(asked.words)
        passed, alike = ahead.passed + behind.passed, ahead.alike + behind.alike
        edges = ahead.cut + behind.cut
        enough = words >= min(size, REACH) and (not edges or size >= EDGE)
        if not enough or passed > 1 + words // PASSED or alike > max(2, ALIKE * words) or not passed + alike:
            return None
        return here - behind.said, here + ahead.said


class Walk(NamedTuple):
    """How far a question and a text agree."""

    asked: int
    said: int
    passed: int
    alike: int
    cut: int
    """Words at the question's end that the text lacks: 0 or 1."""


def _walk(asked: Sequence[str], said: Sequence[str]) -> Walk:
    """How far words agree from their beginnings on."""
    i = j = passed = alike = 0
    most = 1 + REACH // PASSED
    while i < len(asked):
        step = _step(asked[i : i + 4], said[j : j + 4])
        i, j = i + step[0], j + step[1]
        if step == (0, 0) or (0 in step and passed == most):
            if step == (0, 0) and passed < most and i == len(asked) - 1 and asked[i] not in KEPT:
                return Walk(i + 1, j, passed + 1, alike, 1)
            break
        passed += 0 in step
        alike += 0 not in step and asked[i - step[0] : i] != said[j - step[1] : j]
    return Walk(i, j, passed, alike, 0)


def _step(asked: Sequence[str], said: Sequence[str]) -> tuple[int, int]:
    """How many words of both belong together next: (1, 0) and (0, 1) pass one over, (0, 0) is the end."""
    if not said:
        return 0, 0
    if _like(asked[0], said[0]):
        return 1, 1
    for one, other in ((2, 1), (1, 2), (2, 2)):
        theirs, its = asked[:one], said[:other]
        whole = len(theirs) == one and len(its) == other and not any(map(str.isdecimal, (*theirs, *its)))
        if whole and _like("".join(theirs), "".join(its), 1):
            return one, other
    if said[0] not in KEPT and _follows(asked, said[1:]):
        return 0, 1
    if asked[0] not in KEPT and len(asked) > 1 and _follows(asked[1:], said):
        return 1, 0
    return 0, 0


def _follows(asked: Sequence[str], said: Sequence[str]) -> bool:
    return len(said) >= min(len(asked), 2) and all(map(_like, asked[:2], said[:2]))


@lru_cache(1 << 16)
def _like(one: str, other: str, limit: int = 9) -> bool:
    """Whether two words are the same but for few letters. Different numbers, and words that deny, are not."""
    if one == other:
        return True
    longest = max(len(one), len(other))
    most = min(1 + longest // 5, limit)
    if abs(len(one) - len(other)) > most or one in KEPT or other in KEPT or (one.isdecimal() and other.isdecimal()):
        return False
    if longest == 1:
        return one in "aio"
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, its in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != its))
        if min(row) > most:
            return False
    return row[-1] <= most
