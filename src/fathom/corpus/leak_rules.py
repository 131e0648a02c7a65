"""Which passages of a text leak a benchmark item.

A leak is one of four passages:

- 13 consecutive words of a question that occur in no other question of the benchmark and not in its right answer;
- a whole question of 8 to 12 words that no other question contains;
- a whole question of any length, with its answer next to it;
- a whole question with its answer filled into its blank, of 8 to 12 words together.

Up to eight words, label words ("Answer: (b)", "He replied:") and the other choices may stand between question and
answer; the answer may also stand before its question, as in a row whose keys are sorted, or behind reasons that end
with "so the answer is". An answer that any text has, such as `no` or `3`, counts only after label words. Runs that
several questions share are the benchmark's template, and choices alone are not a question: neither is a leak.
Questions with errors in them are found by `damaged.py`, which also decides on questions that share a scenario.

Words are compared after folding (`folding.py`). `stems_of` leaves out labels that several questions begin or end with.
Paraphrases, translations and solutions without their question are not searched for.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fathom.corpus import damaged
from fathom.corpus.benchmarks import Item, filled, plain, plain_all
from fathom.corpus.folding import Folded, attributes, bare, folded, rejoined
from fathom.corpus.recipe import Decontaminate
from fathom.corpus.words import Numbers, Words, run_numbers, words_of

RUN, WHOLE, ANSWERED, FILLED = range(4)
"""A run of the question's own; all of a question; a question with its answer; one with its blank filled in."""
ANCHORS = (3, 5, 8)
"""Lengths of the runs by which questions of fewer words than a run are looked up, before all of their words are."""
SAID = (
    "a an the q question questions answer answers ans key solution result final correct right best true response "
    "responses respond responded responds reply replied replies said says say he she they it i we you to is are was "
    "were be called would that this choice choices option options choose select pick one of from by in with "
    "following below above assistant user human bot gpt model system output input instruction so therefore thus "
    "because and or b c d e f g h j x ii iii iv vi vii viii ix role content contents value values text texts label "
    "labels target targets message messages completion conversation conversations prompt query type subject topic "
    "category explanation inst sure certainly ok okay course give me only just please show"
)
LABELS = frozenset((*SAID.split(), *map(str, range(13))))
"""Words that may stand between a question and its answer, whatever the answer is."""
MOST_LABELS, MOST_WORDS = 8, 8
"""Label words, and other words, between a question and its answer, or between two choices."""
COMMON = ("yes", "no", "true", "false")
"""Answers that any text may have after a question, beside label words and digits: only label words lead to them."""
CONCLUSIONS, REASONS = ("answer", "boxed"), 200
"""What an answer behind reasons follows, and the words of these."""
OTHER = re.compile(r"[?？؟](?:(?!\w{3}[.!。]).)*\Z", re.DOTALL)
"""A question behind which no sentence ends: what follows may be its answer, and not that of an earlier question."""
DENIALS = ("not", "never", "nothing", "neither", "nor", "except")
"""Words after which an answer is not given."""
SHARED = 3
"""Questions that begin, or end, with the same label show that it is the benchmark's, and no part of the question."""
PREFIX = re.compile(r"\s*([^\n:.?!]{1,40}):\s+")
SUFFIX = re.compile(r"(?:(?<=[.?!])\s+|\s*\n\s*)([^\n:.?!]{1,40}):\s*\Z")
FARTHEST = 1000
"""Words after a question among which its answer is looked for."""
LARGEST_SIEVE, OTHER_BITS = 23, np.uint64(32)

Index = dict[str, np.ndarray]
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Hit:
    """A passage of a text that leaks an item."""

    item: int
    start: int
    end: int


class Unfound(NamedTuple):
    """Ids of items that a search for their own words cannot find."""

    template: list[str]  # only with the answer after the question, since other questions share all their word runs
    short: list[str]  # too short to be found


class Wanted(NamedTuple):
    """The words of an item, as numbers."""

    stem: list[int]
    golds: list[list[int]]
    others: list[list[int]]  # wrong choices
    filled: list[int]  # the question with the answer filled into its blank; empty if it has no blank

    def reversed(self) -> Wanted:
        """This item with the words of every answer and choice in reverse order."""
        golds, others = ([words[::-1] for words in some] for some in (self.golds, self.others))
        return self._replace(golds=golds, others=others)


def stems_of(items: Sequence[Item]) -> list[str]:
    """The items' questions without labels that several questions begin or end with, such as `Question:` and
    `Answer:`."""
    stems = [item.stem for item in items]
    for pattern in (PREFIX, SUFFIX):
        found = [pattern.match(stem) if pattern is PREFIX else pattern.search(stem) for stem in stems]
        distinct = {(match[1], stem) for match, stem in zip(found, stems, strict=True) if match}
        often = Counter(label for label, _ in distinct)
        rest = [(stem[: m.start()] + stem[m.end() :]) if m else stem for m, stem in zip(found, stems, strict=True)]
        stems = [
            new if match and often[match[1]] >= SHARED and len(new.split()) >= ANCHORS[0] else stem
            for match, stem, new in zip(found, stems, rest, strict=True)
        ]
    return stems


def groups_of(items: Sequence[Item]) -> list[int]:
    """A number for each item; items with the same question and choices have the same number."""
    seen: dict[tuple[str, ...], int] = {}
    asked = plain_all([f"{item.context}\n{item.stem}" for item in items])
    options = iter(plain_all([choice for item in items for choice in item.choices]))
    keys = ((text, *sorted(next(options) for _ in item.choices)) for text, item in zip(asked, items, strict=True))
    return [seen.setdefault(key, len(seen)) for key in keys]


def wanted_of(items: Sequence[Item]) -> list[Wanted]:
    """For each item, the words of its question, its right answers and its other choices."""
    texts: list[str] = []
    for item, stem in zip(items, stems_of(items), strict=True):
        texts += [stem, filled(item, stem), *item.golds(), *item.choices]
    numbers = _numbers(texts)
    found = []
    for item in items:
        stem_words, whole, golds = next(numbers), next(numbers), [next(numbers) for _ in item.golds()]
        choices = [next(numbers) for _ in item.choices]
        others = [words for words in choices if words and words not in golds]
        found.append(Wanted(stem_words, [words for words in golds if words], others, whole))
    return found


def _numbers(texts: Sequence[str]) -> Iterator[list[int]]:
    words = words_of([folded(text).text for text in texts])
    numbers, bounds = words.numbers.tolist(), words.bounds.tolist()
    yield from (numbers[low:high] for low, high in itertools.pairwise(bounds))


def asked_texts(items: Sequence[Item]) -> list[tuple[int, str]]:
    """(item, text) of each text to search for: context with question, and the question with its blank filled in."""
    found = []
    for number, (item, stem) in enumerate(zip(items, stems_of(items), strict=True)):
        found.append((number, f"{item.context}\n{stem}"))
        if said := filled(item, stem):
            found.append((number, said))
    return found


def build_index(items: Sequence[Item], rules: Decontaminate) -> tuple[Index, Unfound]:
    """The search index: for each run length, the sorted hashes of word runs and the item of each run; also the items
    that cannot be found."""
    shared, own, by_runs = _shared(items, rules)
    entries: dict[int, list[tuple[int, int, int, int]]] = {rules.words: [(run, item, RUN, 0) for run, item in own]}
    template, short = [], []

    def look_up(number: int, kind: int, sequence: Sequence[int]) -> None:
        length = max(least for least in (*ANCHORS, rules.words) if least <= len(sequence))
        runs = run_numbers(np.array(sequence, np.uint64), length).tolist()
        at = min(range(len(runs)), key=lambda at: (shared.get(length, {}).get(runs[at], 1), -at))  # the rarest
        entries.setdefault(length, []).append((runs[at], number, kind, at))

    for number, one in enumerate(wanted_of(items)):
        by_run = number in by_runs
        if by_run and (len(one.stem) >= rules.words or not items[number].context):
            continue  # but a short question may stand without its passage, whose runs these are
        size, answer = len(one.stem), max(map(len, one.golds), default=0)
        alone = rules.whole <= size < rules.words and _run(one.stem) not in shared[size]
        if size >= rules.whole and not alone and not by_run:
            template.append(items[number].id)
        if rules.whole <= len(one.filled) < rules.words:
            look_up(number, FILLED, one.filled)
        if alone:
            look_up(number, WHOLE, one.stem)
        elif answer and size >= ANCHORS[0] and size + answer >= rules.shortest:
            look_up(number, ANSWERED, one.stem)
        elif size < rules.whole and len(one.filled) < rules.whole and not by_run:
            short.append(items[number].id)
    return _packed(entries) | damaged.seeds_of(items, groups_of(items)), Unfound(template, short)


def _shared(
    items: Sequence[Item], rules: Decontaminate
) -> tuple[dict[int, dict[int, int]], list[tuple[int, int]], set[int]]:
    """By run length, how many questions contain each shared run; (run, item) of long runs that only one question
    contains; and the items of these runs.

    A run in a question's right answer counts as held by it, since the next question of a story may begin with that.
    Runs of a question with its blank filled in are among the second, but do not make its item one of the third.
    """
    asked = asked_texts(items)
    answered = [(number, f"{item.context}\n{item.stem} {item.gold}") for number, item in enumerate(items)]
    words = words_of([folded(text).text for _, text in (*asked, *answered)])
    owner = np.array([number for number, _ in (*asked, *answered)])
    group = np.array(groups_of(items))[owner]
    shared: dict[int, dict[int, int]] = {length: {} for length in range(rules.whole, rules.words)}
    own: list[tuple[int, int]] = []
    items_of_runs: set[int] = set()
    question = np.arange(len(owner)) < len(asked)
    first = question & np.concatenate([[True], owner[1:] != owner[:-1]])
    for length, runs, places in words.runs_of({*shared, rules.words, *ANCHORS}):
        of = np.searchsorted(words.bounds, places, "right") - 1
        pairs = np.unique(np.stack([runs, group[of].astype(np.uint64)], 1), axis=0)
        known, counts = np.unique(pairs[:, 0], return_counts=True)
        often = counts > 1
        shared[length] = dict(zip(known[often].tolist(), counts[often].tolist(), strict=True))
        if length == rules.words:
            alone = question[of] & (counts[np.searchsorted(known, runs)] == 1)
            rows = np.stack([runs[alone], owner[of[alone]].astype(np.uint64)], 1)
            items_of_runs = set(owner[of[alone & first[of]]].tolist())
            own = [(run, item) for run, item in np.unique(rows, axis=0).tolist()]
    return shared, own, items_of_runs


def _run(numbers: Sequence[int]) -> int:
    return int(run_numbers(np.array(numbers, np.uint64), len(numbers))[0])


def _packed(entries: Mapping[int, Sequence[tuple[int, int, int, int]]]) -> Index:
    index: Index = {}
    for length, rows in entries.items():
        rows = sorted(rows)
        index[f"runs_{length}"] = np.array([row[0] for row in rows], np.uint64)
        index[f"found_{length}"] = np.array([row[1:] for row in rows], np.int64).reshape(-1, 3)
    return index


class Matcher:
    """Finds the items of benchmarks in texts."""

    def __init__(self, indices: Sequence[Index], items: Sequence[Sequence[Item]]) -> None:
        self._items = items
        self._tables = {}
        for length in sorted({int(key.removeprefix("runs_")) for index in indices for key in index if "runs_" in key}):
            self._tables[length] = _table(length, indices)
        self._met: dict[tuple[int, int], list[str]] = {}
        """The plain texts of items that a run led to: a long question has a run at every word."""
        self._near = damaged.Near(indices, items)
        self._seeds = _sieve(self._near.seeds)

    def hits(self, texts: Sequence[str]) -> Iterator[list[tuple[int, Hit]]]:
        """Yields for each text, in order, the list of its (benchmark, hit)."""
        whole = [folded(text) for text in texts]
        found = self._hits(whole, True)
        again = [(number, one) for number, text in enumerate(texts) for one in bare(text)]
        again += [(number, one) for number, text in enumerate(texts) if (one := attributes(text))]
        joined = ((number, rejoined(one, self._vocabulary)) for number, one in [*enumerate(whole), *again])
        again += [(number, one) for number, one in joined if one]
        for (number, _), hits in zip(again, self._hits([one for _, one in again]), strict=True):
            found[number] |= hits
        for hits in found:
            yield sorted(hits, key=lambda hit: (hit[1].start, hit[1].end, hit[0], hit[1].item))

    def _hits(self, texts: Sequence[Folded], nearly: bool = False) -> list[set[tuple[int, Hit]]]:
        words = words_of([one.text for one in texts])
        found: list[set[tuple[int, Hit]]] = [set() for _ in texts]
        seeds: tuple[NDArray[np.int64], ...] = ()
        for length, runs, places in words.runs_of({*self._tables, damaged.SEED}):
            if length == damaged.SEED and nearly:
                seeds = _known(runs, places, self._near.seeds, self._seeds)
            if length not in self._tables:
                continue
            known, entries, sieve = self._tables[length]
            for begin, low, high in zip(*(part.tolist() for part in _known(runs, places, known, sieve)), strict=True):
                text = int(np.searchsorted(words.bounds, begin, "right")) - 1
                for benchmark, item, kind, at in entries[low:high].tolist():
                    if span := self._passage(words, texts, text, (benchmark, item, kind), (begin, at, length)):
                        found[text].add((benchmark, Hit(item, *texts[text].span(*span))))
        if seeds and len(seeds[0]):
            self._add_near(words, texts, seeds, found)
        return found

    def _add_near(
        self,
        words: Words,
        texts: Sequence[Folded],
        seeds: tuple[NDArray[np.int64], ...],
        found: Sequence[set[tuple[int, Hit]]],
    ) -> None:
        """Add passages that nearly equal an item, for items that the text does not contain exactly."""
        done = {(text, benchmark, hit.item) for text, hits in enumerate(found) for benchmark, hit in hits}
        for pair in self._near.pairs(words, *seeds):
            text, benchmark, asked = pair.text, pair.benchmark, self._near.asked(pair.benchmark, pair.question)
            if (text, benchmark, asked.item) in done:
                continue
            bounds = int(words.bounds[text]), int(words.bounds[text + 1])
            said = damaged.Said(texts[text].text, words.starts, words.ends, bounds)
            if not (span := self._near.span(asked, pair, said)):
                continue
            first, last = span
            if pair.shared:
                wanted = self._wanted[benchmark][asked.item]
                ahead, after = _beside(words, first, last, wanted, texts[text].text)
                after = after or self._near.answer(benchmark, asked.item, said, last)
                if not ahead + after:
                    continue
                first, last = first - ahead, last + after
            characters = texts[text].span(int(words.starts[first]), int(words.ends[last - 1]))
            found[text].add((benchmark, Hit(asked.item, *characters)))

    def _passage(
        self,
        words: Words,
        texts: Sequence[Folded],
        text: int,
        what: tuple[int, int, int],
        where: tuple[int, int, int],
    ) -> tuple[int, int] | None:
        """The (start, end) of a passage that leaks an item, if the words around a known run match the item; else
        None."""
        (benchmark, item, kind), (begin, at, length) = what, where
        low, high = int(words.bounds[text]), int(words.bounds[text + 1])
        end, beside = begin + length, (0, 0)
        if kind != RUN:
            wanted = self._wanted[benchmark][item]
            sequence = wanted.filled if kind == FILLED else wanted.stem
            begin -= at
            end = begin + len(sequence)
            if begin < low or end > high or words.numbers[begin:end].tolist() != sequence:
                return None
            if kind == ANSWERED and not sum(beside := _beside(words, begin, end, wanted, texts[text].text)):
                return None
        asked = texts[text].text[int(words.starts[begin]) : int(words.ends[end - 1])]
        if not self._holds(benchmark, item, plain(asked)):  # numbers of different runs can collide
            return None
        return int(words.starts[begin - beside[0]]), int(words.ends[end + beside[1] - 1])

    @functools.cached_property
    def _wanted(self) -> list[list[Wanted]]:
        return [wanted_of(items) for items in self._items]

    @functools.cached_property
    def _asked(self) -> list[dict[int, list[str]]]:
        found: list[dict[int, list[str]]] = [{} for _ in self._items]
        for mine, items in zip(found, self._items, strict=True):
            for number, text in asked_texts(items):
                mine.setdefault(number, []).append(text)
        return found

    @functools.cached_property
    def _vocabulary(self) -> set[str]:
        """The words of all items."""
        texts = [folded(text).text for items in self._items for _, text in asked_texts(items)]
        texts += [folded(gold).text for items in self._items for item in items for gold in item.golds()]
        return {word for text in plain_all(texts) for word in text.split()}

    def _holds(self, benchmark: int, item: int, passage: str) -> bool:
        met, key = self._met, (benchmark, item)
        if key not in met:
            met[key] = [f" {plain(folded(text).text)} " for text in self._asked[benchmark][item]]
        return any(f" {passage} " in text for text in met[key])


def _beside(words: Words, begin: int, end: int, wanted: Wanted, text: str) -> tuple[int, int]:
    """How many words before the question its answer begins, or how many words after the question its answer ends; 0 on
    the side without an answer."""
    number = int(np.searchsorted(words.bounds, begin, "right"))
    low, high = max(begin - FARTHEST, int(words.bounds[number - 1])), min(end + FARTHEST, int(words.bounds[number]))
    after = words.numbers[end:high].tolist()
    found, place = _answer_end(after, wanted)
    if found:
        return 0, found
    said, found = _concluded(after, place, wanted)
    if found and not OTHER.search(text[int(words.starts[end]) : int(words.starts[end + said])]):
        return 0, found
    return _answer_end(words.numbers[low:begin].tolist()[::-1], wanted.reversed())[0], 0


def _answer_end(after: Sequence[int], wanted: Wanted) -> tuple[int, int]:
    """The number of words from a question's end to its answer's end (0 if the answer does not follow), and the number
    of words examined.

    Args:
        after: The words that follow the question.
        wanted: The item's words.
    """
    place, labels, others, vague = 0, MOST_LABELS, MOST_WORDS, False  # vague: other words stood before this place
    while True:
        rest = after[place:]
        for gold in () if (offered := _alternatives(rest, wanted)) else wanted.golds:
            if list(rest[: len(gold)]) == gold and not (vague and _common().issuperset(gold)):
                return place + len(gold), place
        passed = offered or max((len(one) for one in wanted.others if list(rest[: len(one)]) == one), default=0)
        if passed:
            place, labels, others, vague = place + passed, MOST_LABELS, MOST_WORDS, False
        elif rest and labels and rest[0] in _labels():
            place, labels = place + 1, labels - 1
        elif rest and others and rest[0] not in _denials():
            place, others, vague = place + 1, others - 1, True
        else:
            return 0, place


def _concluded(after: Sequence[int], place: int, wanted: Wanted) -> tuple[int, int]:
    """For a question followed by reasons and a phrase such as "so the answer is": the words up to this phrase, and up
    to the answer's end (0 if no answer follows)."""
    said = next(
        (at for at in range(place, min(place + REASONS, len(after))) if after[at] in _conclusions()), len(after)
    )
    for at in range(said + 1, min(said + 1 + MOST_LABELS, len(after))):
        for gold in wanted.golds:
            if list(after[at : at + len(gold)]) == gold and not _common().issuperset(gold):
                return said, at + len(gold)
        if after[at] not in _labels():
            break
    return said, 0


def _alternatives(after: Sequence[int], wanted: Wanted) -> int:
    """The length in words of a phrase that offers the right choice and another one, such as "true or false", and so
    leaks nothing; 0 if there is none."""
    both = [(gold, other) for gold in wanted.golds for other in wanted.others]
    for one, two in (*both, *((other, gold) for gold, other in both)):
        if len(after) > len(one) and after[len(one)] == _or() and list(after[: len(one)]) == one:
            end = len(one) + 1 + len(two)
            if list(after[len(one) + 1 : end]) == two:
                return end
    return 0


@functools.cache
def _or() -> int:
    return int(words_of(["or"]).numbers[0])


@functools.cache
def _labels() -> frozenset[int]:
    return _set_of(LABELS)


@functools.cache
def _common() -> frozenset[int]:
    return _set_of([*LABELS, *COMMON])


@functools.cache
def _conclusions() -> frozenset[int]:
    return _set_of(CONCLUSIONS)


@functools.cache
def _denials() -> frozenset[int]:
    return _set_of(DENIALS)


def _set_of(words: Iterable[str]) -> frozenset[int]:
    return frozenset(words_of([" ".join(sorted(words))]).numbers.tolist())


def _known(
    runs: Numbers, places: NDArray[np.int64], known: Numbers, sieve: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], ...]:
    """The positions of those runs that are known, with the range of each in the sorted array of known runs."""
    maybe = np.flatnonzero(sieve[0][_low(runs, sieve.shape[1])])
    maybe = maybe[sieve[1][_low(runs[maybe] >> OTHER_BITS, sieve.shape[1])]]
    first, last = (np.searchsorted(known, runs[maybe], side) for side in ("left", "right"))
    real = np.flatnonzero(last > first)
    return places[maybe[real]], first[real], last[real]


def _table(length: int, indices: Sequence[Index]) -> tuple[Numbers, NDArray[np.int64], NDArray[np.bool_]]:
    """All known runs of one length, sorted, with the benchmark and item of each; and a lookup table that excludes most
    texts fast."""
    runs, found = [np.empty(0, np.uint64)], [np.empty((0, 4), np.int64)]
    for number, index in enumerate(indices):
        if f"runs_{length}" in index:
            runs.append(index[f"runs_{length}"])
            entries = index[f"found_{length}"]
            found.append(np.column_stack([np.full(len(entries), number), entries]))
    known, entries = np.concatenate(runs), np.concatenate(found)
    order = np.argsort(known, kind="stable")
    return known[order], entries[order], _sieve(known)


def _sieve(known: Numbers) -> NDArray[np.bool_]:
    """Boolean tables for two groups of bits of a hash: which values these bits have in any known hash."""
    sieve = np.zeros((2, 1 << min(max((8 * len(known)).bit_length(), 16), LARGEST_SIEVE)), np.bool_)
    for part, numbers in zip(sieve, (known, known >> OTHER_BITS), strict=True):
        part[_low(numbers, len(part))] = True
    return sieve


def _low(numbers: Numbers, size: int) -> NDArray[np.int64]:
    return (numbers & np.uint64(size - 1)).astype(np.int64)


def passages(hits: Iterable[tuple[Key, Hit]]) -> dict[tuple[Key, int], list[list[int]]]:
    """The passages that leak each (benchmark, item); overlapping ones are merged."""
    spans: dict[tuple[Key, int], list[list[int]]] = {}
    for benchmark, hit in hits:
        mine = spans.setdefault((benchmark, hit.item), [])
        if mine and hit.start <= mine[-1][1]:
            mine[-1][1] = max(mine[-1][1], hit.end)
        else:
            mine.append([hit.start, hit.end])
    return spans
