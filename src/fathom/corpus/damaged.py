"""Finds passages that nearly equal a benchmark question: with a word inserted or missing, other spellings, or OCR
errors.

Seeds are runs of four words that one question alone has. Where two of a question stand in a text as in the
question, eight words in all or five in a row, the rest is aligned word by word to both sides. Words match if few of
their letters differ. A word of one side alone is passed over, seldom; another word in the place of one never is, since
that is another question of the same pattern.

A few questions may share a scenario. Seeds that stand only in it lead to each of them, but the scenario is nobody's
question: to the end of the question the text must agree, and the question's answer must follow.

`leak_rules.py` finds undamaged questions. `planting.py` measures the share of damaged questions that is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fathom.corpus.benchmarks import Item, filled, plain, plain_all
from fathom.corpus.folding import folded
from fathom.corpus.words import Numbers, Words, lower, words_of

SEED = 4
LEAST = 8
"""Words of the shortest question that is searched for."""
REACH = 24
"""Words of a longer question, or of its passage, that must stand in the text."""
APART, DRIFT = 64, 3
"""Words between two seeds, and by how many more or fewer in the text."""
PASSED = 16
"""One word may be passed over, and one more in each so many words."""
ALIKE = 0.35
"""The largest share of words that are not equal but alike."""
EDGE = 16
"""Words of the shortest question whose first or last word may be missing."""
SHARED, SCENARIO = 4, 8
"""The most questions that share a scenario, and the words in a row that they share at least."""
ANSWER = 8
"""Words of a longer answer that must follow a question of a shared scenario."""
KEPT = frozenset(["not", "never", "no", "none", "nothing", "neither", "nor", "except", "without"])
"""Words that nothing is like, and that are never passed over."""


class Asked(NamedTuple):
    """One wording of a question as a list of words, either with its passage or without it."""

    item: int
    words: list[str]


def questions(items: Sequence[Item]) -> tuple[list[Asked], list[str]]:
    """The questions to search for, as words and as texts; a question that has a passage occurs twice: with the passage
    and alone.

    A blank is filled in, since another word in its place is another question.
    """
    stems = [filled(item, item.stem) or item.stem for item in items]
    texts = [(number, f"{item.context}\n{stem}") for number, (item, stem) in enumerate(zip(items, stems, strict=True))]
    texts += [(number, stems[number]) for number, item in enumerate(items) if item.context]
    plainest = [folded(text).text for _, text in texts]
    return [Asked(item, said.split()) for (item, _), said in zip(texts, plain_all(plainest), strict=True)], plainest


def seeds_of(items: Sequence[Item], groups: Sequence[int]) -> dict[str, NDArray[np.uint64] | NDArray[np.int64]]:
    """Sorted seeds (hashes of short word runs), with the question and word position of each, and 1 if other questions
    share the seed.

    A question's right answer owns its seeds, too.
    """
    asked, texts = questions(items)
    answered = [folded(f"{item.context}\n{item.stem} {item.gold}").text for item in items]
    words = words_of([*texts, *answered])
    owner = np.array([*(groups[one.item] for one in asked), *groups], np.int64)
    runs = {length: (found, places) for length, found, places in words.runs_of([SEED, SCENARIO])}
    if SEED not in runs:
        return {}
    seeds, places = runs[SEED]
    of = np.searchsorted(words.bounds, places, "right") - 1
    owners = np.zeros(len(words.numbers), np.int64)  # how many questions have the run at a word
    owners[places] = _owners(seeds, owner[of])
    if SCENARIO in runs:
        few = (owners > 1) & (owners <= SHARED)
        owners[few & (_owners_around(*runs[SCENARIO], words, owner, few) < owners)] = SHARED + 1
    often = owners[places]
    kept = (often <= SHARED) & (of < len(asked)) & (np.diff(words.bounds)[of] >= LEAST)
    order = np.argsort(seeds[kept], kind="stable")
    seeded = np.stack([of, places - words.bounds[of], often > 1], 1)
    return {"seeds": seeds[kept][order], "seeded": seeded[kept][order]}


def _owners(runs: Numbers, owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each run of words, the number of distinct owners (questions) in which the run occurs, at any position."""
    order = np.lexsort((owner, runs))
    new = np.diff(runs[order], prepend=~runs[order[:1]]) != 0
    fresh = new | (np.diff(owner[order], prepend=-1) != 0)
    number = np.cumsum(new) - 1
    counts = np.empty(len(runs), np.int64)
    counts[order] = np.bincount(number, fresh)[number]
    return counts


def _owners_around(
    runs: Numbers, places: NDArray[np.int64], words: Words, owner: NDArray[np.int64], of_seeds: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """For each seed, how many questions share the words around it: the largest such number over the longer runs that
    contain the seed."""
    offsets = range(SCENARIO - SEED + 1)
    holds = np.zeros(len(of_seeds), np.bool_)
    for offset in offsets:
        holds[: len(of_seeds) - offset] |= of_seeds[offset:]
    kept = holds[places]
    runs, places = runs[kept], places[kept]
    counts = _owners(runs, owner[np.searchsorted(words.bounds, places, "right") - 1])
    most = np.zeros(len(of_seeds), np.int64)
    for offset in offsets:
        most[places + offset] = np.maximum(most[places + offset], counts)
    return most


class Said(NamedTuple):
    """The words of a text, read one at a time and only as far as they agree with a question."""

    text: str
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    bounds: tuple[int, int]
    """The first word of the text, and the end of its last one, among the words of all."""

    def after(self, at: int) -> Iterator[str]:
        """The words of the text from a position on."""
        return self._read(slice(at, self.bounds[1]))

    def before(self, at: int) -> Iterator[str]:
        """The words of the text before a position, the nearest first."""
        return self._read(slice(at - 1, self.bounds[0] - 1 if self.bounds[0] else None, -1)) if at else iter(())

    def _read(self, places: slice) -> Iterator[str]:
        return (lower(self.text[start:end]) for start, end in zip(self.starts[places], self.ends[places], strict=True))


class Pair(NamedTuple):
    """A position in a question and one in a text, near which both contain the same two seeds."""

    text: int
    benchmark: int
    question: int
    place: int
    at: int
    shared: bool
    """Whether others share a seed."""


class Near:
    """Finds passages of texts that nearly equal a question, starting from the seeds that a text shares with it."""

    def __init__(self, indices: Sequence[Mapping[str, NDArray[Any]]], items: Sequence[Sequence[Item]]) -> None:
        self._items = items
        self._asked: list[list[Asked]] | None = None
        known, found = [np.empty(0, np.uint64)], [np.empty((0, 4), np.int64)]
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
    ) -> Iterator[Pair]:
        """Yields one pair of seeds for each matching stretch of text: first seeds of one question alone, then also
        seeds that several questions share.

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
        own = row[:, 3] == 0
        for some, shared in ((own, False), (np.ones(len(own), np.bool_), True)):
            for one in _stretches(at[some], row[some], text[some], shared).tolist():
                benchmark, question, place, _ = row[some][one].tolist()
                yield Pair(int(text[some][one]), benchmark, question, place, int(at[some][one]), shared)

    def asked(self, benchmark: int, question: int) -> Asked:
        """The question of a benchmark with this index in the list that `questions` returns."""
        if self._asked is None:
            self._asked = [questions(items)[0] for items in self._items]
        return self._asked[benchmark][question]

    def span(self, asked: Asked, pair: Pair, said: Said) -> tuple[int, int] | None:
        """The range of words of a text that nearly equals the question around a pair of matching seeds; None if it does
        not.

        If the seed is shared, they are the question's to its end.
        """
        size = len(asked.words)
        ahead = _walk(asked.words[pair.place :], said.after(pair.at), size if pair.shared else REACH)
        behind = _walk(asked.words[: pair.place][::-1], said.before(pair.at))
        words, passed, alike = ahead.asked + behind.asked, ahead.passed + behind.passed, ahead.alike + behind.alike
        whole = words >= min(size, REACH) and (not ahead.cut + behind.cut or size >= EDGE or pair.shared)
        there = ahead.asked == size - pair.place if pair.shared else passed + alike > 0
        if not (whole and there) or passed > 1 + words // PASSED or alike > max(2, ALIKE * words):
            return None
        return pair.at - behind.said, pair.at + ahead.said

    def answer(self, benchmark: int, item: int, said: Said, end: int) -> int:
        """The number of words from the question's end to its answer's end, if the answer, or nearly the same text,
        follows; else 0."""
        for gold in self._items[benchmark][item].golds():
            wanted = plain(folded(gold).text).split()[:ANSWER]
            for first, word in enumerate(islice(said.after(end), ANSWER if len(wanted) >= SEED else 0)):
                walk = _walk(wanted, said.after(end + first))
                if walk.asked == len(wanted) and not walk.cut and walk.alike <= max(1, ALIKE * len(wanted)):
                    return first + walk.said
                if word in KEPT:
                    break
        return 0


def _stretches(
    at: NDArray[np.int64], row: NDArray[np.int64], text: NDArray[np.int64], shared: bool
) -> NDArray[np.int64]:
    """The index of the first pair of seeds in each stretch; with `shared`, only of pairs with a seed that several
    questions share."""
    same = (text[1:] == text[:-1]) & (row[1:, :2] == row[:-1, :2]).all(1)
    near = (at[1:] - at[:-1] <= APART) & (np.abs(np.diff(at - row[:, 2])) <= DRIFT) & (np.diff(row[:, 2]) > 0)
    wanted = (row[1:, 3] | row[:-1, 3]) > 0 if shared else True
    pair = np.flatnonzero(same & near & wanted)
    fresh = np.ones(len(pair), np.bool_)
    fresh[1:] = ~((np.diff(pair) == 1) & (np.diff(at[pair]) <= APART))  # the others continue a stretch
    return pair[fresh]


class Walk(NamedTuple):
    """How many words of a question and of a text were aligned, and how many of them were skipped or differ in a few
    letters."""

    asked: int
    said: int
    passed: int
    alike: int
    cut: int
    """Words at the question's end that the text lacks: 0 or 1."""


def _walk(asked: Sequence[str], said: Iterator[str], size: int = REACH) -> Walk:
    """Align the words of a question with those of a text, from the first word of each on; only a few of `size` words
    may be skipped."""
    i = j = passed = alike = 0
    most = 1 + size // PASSED
    near = list(islice(said, 4))
    while i < len(asked):
        step = _step(asked[i : i + 4], near)
        i, j, theirs = i + step[0], j + step[1], near[: step[1]]
        near = [*near[step[1] :], *islice(said, step[1])]
        if step == (0, 0) or (0 in step and passed == most):
            if step == (0, 0) and passed < most and i == len(asked) - 1 and asked[i] not in KEPT:
                return Walk(i + 1, j, passed + 1, alike, 1)
            break
        passed += 0 in step
        alike += 0 not in step and asked[i - step[0] : i] != theirs
    return Walk(i, j, passed, alike, 0)


def _step(asked: Sequence[str], said: Sequence[str]) -> tuple[int, int]:
    """How many words of the question and of the text to consume next: (1, 0) and (0, 1) skip one word, (0, 0) ends the
    alignment."""
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
    """Whether two words are equal except for a few letters. Different numbers, and words that deny, are not."""
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
