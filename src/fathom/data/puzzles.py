"""Puzzles whose accuracy shows how many steps a model can compute in sequence: generated data.

    data.directory: puzzle:hops?names=17&hops=8&queries=8

`hops`: a cycle through some names, written as pairs in random order, and queries for the k-th name after one. `a5` and
`z60`: words over a group of sixty elements, with the running product as the label at every position; A5 is not
solvable, Z60 is cyclic. `arithmetic`: expressions in prefix notation modulo 23. `recall`: pairs of a key and a value,
and queries for the value, which need no depth. A row is a pure function of (seed, split, number) on every machine;
train and held-out rows have different keys. Labels are -100 except at answers, and the domains of the held-out split
are difficulties.

For bits per byte an answer counts as one byte.

`experiments/acquisition.py` decides when a run has solved a puzzle, and `experiments/tuning.py` that losses below 0.01
nats count as equal. The invented minerals of `make specialise` are not a puzzle: `examples/minerals.py` writes them.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from fathom.checkpoints.file_names import PUZZLE
from fathom.data.collections import locate, open_mixture
from fathom.data.shards import NoCorpus, TokenDataset, read_index
from fathom.data.targets import TargetDataset
from fathom.errors import DataError
from fathom.report.mixing import mixed

Ids = NDArray[np.int64]
Chances = NDArray[np.uint64]
UNASKED = -100
"""The label of tokens that are not answers."""
ROWS = {"train": 1 << 40, "val": 1 << 20}
"""Number of rows of a split, more than any run reads."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MODULUS = 23


@dataclass(frozen=True)
class PuzzleRows:
    """Sequences `[rows, T]` and their labels; `positions` restart with each item if a sequence holds several items."""

    tokens: Ids
    labels: Ids
    positions: Ids | None = None


class Traits(NamedTuple):
    """The sizes, chance level and difficulties that a puzzle has with the given options."""

    length: int
    """Tokens of a row."""
    vocabulary: int
    """Number of token ids; the last id ends a row."""
    answers: int
    """Number of answers in a training row."""
    chance: float
    """Accuracy of a uniform guess among the possible answers."""
    levels: tuple[int, ...]
    """Difficulties of the held-out split, easiest first."""
    draws: int
    """Random numbers that a row needs."""


@dataclass(frozen=True)
class Puzzle(ABC):
    """One kind of puzzle; its fields are the options."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise DataError(f"{field.name}={getattr(self, field.name)}: allowed: 1 or more")

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Sizes, chance level and difficulties."""

    @abstractmethod
    def rows(self, chances: Chances, level: int | None) -> PuzzleRows:
        """Make sequences from random numbers `[rows, traits.draws]`, of difficulty `level`, or of all difficulties if
        it is None, as in training."""

    @property
    def end(self) -> int:
        """The last token id."""
        return self.traits.vocabulary - 1


@dataclass(frozen=True)
class Hops(Puzzle):
    """A puzzle with n pairs `x next(x)`, followed by queries `<hop k> x <is> y`, where y is the k-th successor of x."""

    names: int = 17
    """Names on the cycle; must be odd. Among 2k names, k steps twice lead back, so one answer would reveal another."""
    hops: int = 8
    """The largest k."""
    queries: int = 8
    """Queries in a row, each from a different name."""
    words: int = 64
    """Names to choose from."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hops < self.names <= self.words or self.queries > self.names:
            raise DataError("puzzle:hops: allowed: hops < names <= words, queries <= names")

    @cached_property
    def traits(self) -> Traits:
        """See `Puzzle.traits`."""
        return Traits(
            length=2 * self.names + 4 * self.queries + 1,
            vocabulary=self.words + self.hops + 2,
            answers=self.queries,
            chance=1 / (self.names - 1),
            levels=tuple(2**i for i in range(self.hops.bit_length())),
            draws=self.words + 2 * self.names + self.queries,
        )

    def rows(self, chances: Chances, level: int | None) -> PuzzleRows:
        """See `Puzzle.rows`."""
        words, order, asked, far = np.split(chances, np.cumsum([self.words, self.names, self.names]).tolist(), axis=1)
        cycle = shuffled(words)[:, : self.names]  # [rows, n]: the successor of each name is to its right
        place = shuffled(order)
        pairs = np.stack([_pick(cycle, place), _pick(cycle, (place + 1) % self.names)], 2)
        start = shuffled(asked)[:, : self.queries]
        hop = 1 + below(far, self.hops) if level is None else np.full((len(chances), self.queries), level)
        answer = _pick(cycle, (start + hop) % self.names)
        tell = np.full_like(answer, self.words + self.hops)
        queries = np.stack([self.words + hop - 1, _pick(cycle, start), tell, answer], 2)  # [rows, q, 4]
        return _asked(self.end, pairs, queries)


@dataclass(frozen=True)
class Word(Puzzle):
    """A sequence of elements of Z60; the label at each position is the sum of all elements so far."""

    elements: int = 16
    """Elements of a sequence, at least two, because the first held-out level is products of two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elements < 2:
            raise DataError(f"elements={self.elements}: allowed: 2 or more")

    @property
    def table(self) -> Ids:
        """The group's table: the product of two elements, `[60, 60]`."""
        return np.add.outer(np.arange(60), np.arange(60)) % 60

    @cached_property
    def traits(self) -> Traits:
        """See `Puzzle.traits`."""
        return Traits(
            length=self.elements + 1,
            vocabulary=61,
            answers=self.elements,
            chance=1 / 60,
            levels=tuple(2**i for i in range(1, self.elements.bit_length())),
            draws=self.elements,
        )

    def rows(self, chances: Chances, level: int | None) -> PuzzleRows:
        """See `Puzzle.rows`."""
        word = below(chances, 60)
        table = self.table
        product, products = word[:, 0], [word[:, 0]]
        for place in range(1, self.elements):
            product = table[product, word[:, place]]
            products.append(product)
        tokens = np.concatenate([word, np.full((len(word), 1), self.end)], 1)
        labels = np.full_like(tokens, UNASKED)
        labels[:, 1:] = np.stack(products, 1)  # the model shifts labels, so the label at t + 1 is predicted at t
        if level is not None:
            labels[:, [place for place in range(self.elements + 1) if place != level]] = UNASKED
        return PuzzleRows(tokens, labels)


@dataclass(frozen=True)
class Alternating(Word):
    """A sequence of elements of A5, the group of even permutations of five, which is not solvable; the label at each
    position is the product so far."""

    @property
    def table(self) -> Ids:
        """The group's table, `[60, 60]`."""
        return a5()


@dataclass(frozen=True)
class Arithmetic(Puzzle):
    """A puzzle `<len l> expression <is> value`, with l operators + - x in prefix notation, and operands and value
    modulo 23."""

    operators: int = 6
    """Maximum operators in an expression."""
    items: int = 4
    """Expressions in a row, which do not attend to each other."""

    @property
    def slot(self) -> int:
        """Tokens reserved for an item."""
        return 2 * self.operators + 4

    @cached_property
    def traits(self) -> Traits:
        """See `Puzzle.traits`."""
        return Traits(
            length=self.items * self.slot,
            vocabulary=MODULUS + 3 + self.operators + 2,
            answers=self.items,
            chance=1 / MODULUS,
            levels=tuple(range(1, self.operators + 1)),
            draws=self.items * (3 * self.operators + 2),
        )

    def rows(self, chances: Chances, level: int | None) -> PuzzleRows:
        """See `Puzzle.rows`."""
        tokens = np.full((len(chances), self.traits.length), self.end)
        labels = np.full_like(tokens, UNASKED)
        for row, drawn in enumerate(chances.reshape(len(chances), self.items, -1)):
            for item in range(self.items):
                chance = iter(drawn[item].tolist())
                size = 1 + _under(next(chance), self.operators)
                text, value = self._expression(size if level is None else level, chance)
                written = [MODULUS + 3 + (size if level is None else level) - 1, *text, self.end - 1, value]
                first = item * self.slot
                tokens[row, first : first + len(written)] = written
                labels[row, first + len(written) - 1] = value
        positions = np.tile(np.arange(self.slot), (len(tokens), self.items))
        return PuzzleRows(tokens, labels, positions)

    def _expression(self, size: int, chance: Iterator[int]) -> tuple[list[int], int]:
        """A random expression's tokens and value; each node divides the remaining operators between its operands
        uniformly at random."""
        if size == 0:
            value = _under(next(chance), MODULUS)
            return [value], value
        operator = _under(next(chance), 3)
        left_size = _under(next(chance), size) if size > 1 else 0
        left, a = self._expression(left_size, chance)
        right, b = self._expression(size - 1 - left_size, chance)
        return [MODULUS + operator, *left, *right], (a + b, a - b, a * b)[operator] % MODULUS


@dataclass(frozen=True)
class RecallPuzzle(Puzzle):
    """A puzzle with n pairs `key value`, followed by queries `key <is> value`."""

    pairs: int = 16
    """Pairs in a row, with different keys."""
    queries: int = 8
    """Queries in a row, for different keys."""
    words: int = 64
    """Number of different keys, and of different values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.queries <= self.pairs <= self.words:
            raise DataError("puzzle:recall: allowed: queries <= pairs <= words")

    @cached_property
    def traits(self) -> Traits:
        """See `Puzzle.traits`."""
        return Traits(
            length=2 * self.pairs + 3 * self.queries + 1,
            vocabulary=2 * self.words + 2,
            answers=self.queries,
            chance=1 / self.words,
            levels=(1,),
            draws=self.words + 2 * self.pairs,
        )

    def rows(self, chances: Chances, level: int | None) -> PuzzleRows:
        """See `Puzzle.rows`."""
        words, values, asked = np.split(chances, [self.words, self.words + self.pairs], axis=1)
        key = shuffled(words)[:, : self.pairs]
        value = self.words + below(values, self.words)
        place = shuffled(asked)[:, : self.queries]
        tell = np.full_like(place, 2 * self.words)
        queries = np.stack([_pick(key, place), tell, _pick(value, place)], 2)  # [rows, q, 3]
        return _asked(self.end, np.stack([key, value], 2), queries)


KINDS: dict[str, type[Puzzle]] = {
    **{"hops": Hops, "a5": Alternating, "z60": Word},
    **{"arithmetic": Arithmetic, "recall": RecallPuzzle},
}
"""The puzzles by name."""


class PuzzleDataset(TokenDataset):
    """One split of a puzzle, with all difficulties or one; it has no token stream, and its sequences are generated when
    they are read."""

    def __init__(self, name: str, puzzle: Puzzle, seed: int, split: str, domains: Sequence[str], where: str) -> None:
        self.name, self.puzzle, self.seed, self.split = name, puzzle, seed, split
        self.directory = Path(where)
        self.domains = tuple(domains)
        self.vocab_size, self.eos_token_id = puzzle.traits.vocabulary, puzzle.end
        self.dtype = np.dtype("<u2")
        self.tokenizer_identity = None
        self.fingerprint = zlib.crc32(repr((name, puzzle, seed)).encode())
        self.num_documents = ROWS[split]
        self.num_tokens = ROWS[split] * puzzle.traits.length

    def select(self, domain: str) -> PuzzleDataset:
        """One difficulty of the split."""
        if domain not in self.domains:
            raise DataError(f"{self.directory}: no domain {domain!r}; allowed: {', '.join(self.domains)}")
        return PuzzleDataset(self.name, self.puzzle, self.seed, self.split, [domain], str(self.directory))

    def rows(self, numbers: Ids) -> PuzzleRows:
        """The sequences with the given numbers, all of one difficulty if one is selected."""
        level = None
        if self.split != "train":
            if len(self.domains) != 1:
                raise DataError(f"{self.directory}: held-out puzzles are read by difficulty: select a single domain")
            level = int(self.domains[0].rpartition("-")[2])
        digest = hashlib.blake2b(repr((self.name, self.seed, self.split, self.domains)).encode(), digest_size=8)
        chances = chances_of(np.frombuffer(digest.digest(), "<u8")[0], numbers, self.puzzle.traits.draws)
        return self.puzzle.rows(chances, level)


def is_puzzle(directory: str | Path) -> bool:
    """Whether `data.directory` names a puzzle."""
    return str(directory).startswith(PUZZLE)


def open_data(
    directory: str | Path,
    split: str = "train",
    verify: bool | Literal["cached"] = True,
    collections: Sequence[str] = (),
    tokenizer: str | None = None,
) -> TokenDataset:
    """Open a split of the puzzle or corpus that `data.directory` names, with the checks of `TokenDataset.open`.

    Args:
        directory: `data.directory` of the recipe.
        split: `train` or `val`.
        verify: See `TokenDataset.open`.
        collections: The collections of a mixture, read instead of the whole corpus.
        tokenizer: See `read_index`.
    """
    if collections:
        return open_mixture(directory, collections, split, verify)
    if is_puzzle(directory):
        return open_puzzle(str(directory), split)
    try:
        index = read_index(Path(directory), tokenizer=tokenizer)
    except NoCorpus as error:
        raise NoCorpus(f"data.directory={error}") from None
    kind = TargetDataset if index.targets_crc32 else TokenDataset
    return kind.open(directory, split, None, verify)


def has_split(directory: str | Path, split: str, collections: Sequence[str] = ()) -> bool:
    """Whether `data.directory`, or any collection of a mixture, has the named split."""
    if is_puzzle(directory):
        return split in ROWS
    places = [locate(directory, name) for name in collections] or [(Path(directory), None)]
    found = [(read_index(place).splits.get(split, {}), domain) for place, domain in places]
    return any(domains if domain is None else domain in domains for domains, domain in found)


def open_puzzle(where: str, split: str = "train") -> PuzzleDataset:
    """Open a split of the puzzle `puzzle:NAME?option=value&...`; every puzzle also has the option `seed`."""
    name, _, query = where.removeprefix(PUZZLE).partition("?")
    if name not in KINDS:
        raise DataError(f"{where}: no such puzzle; there are {', '.join(KINDS)}")
    if split not in ROWS:
        raise DataError(f"{where} has no split {split!r}: it has {', '.join(ROWS)}")
    kind = KINDS[name]
    options = {field.name for field in fields(kind)}
    given: dict[str, int] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in {*options, "seed"} or not value.isdecimal():
            raise DataError(
                f"{where}: {key}={value}: allowed options: {', '.join(sorted(options))}, seed, each with a whole number"
            )
        given[key] = int(value)
    seed = given.pop("seed", 0)
    try:
        puzzle = kind(**given)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    domains = [f"{name}-{level}" for level in puzzle.traits.levels] if split == "val" else [name]
    return PuzzleDataset(name, puzzle, seed, split, domains, where)


def chances_of(key: np.uint64, numbers: Ids, draws: int) -> Chances:
    """Random numbers `[rows, draws]`: hashes of a key and of the sequences' numbers."""
    row = mixed(mixed(numbers.astype(np.uint64) * GOLDEN + key) ^ key)
    return mixed(row[:, None] + GOLDEN * np.arange(1, draws + 1, dtype=np.uint64))


def below(chances: Chances, size: int) -> Ids:
    """Uniform numbers in `range(size)`."""
    return (((chances >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)


def shuffled(chances: Chances) -> Ids:
    """A permutation in every row."""
    return np.argsort(chances, axis=1, kind="stable")


@cache
def a5() -> Ids:
    """The multiplication table of the even permutations of five: `[60, 60]`, the first factor acts first."""
    even = [p for p in itertools.permutations(range(5)) if _inversions(p) % 2 == 0]
    number = {p: i for i, p in enumerate(even)}
    return np.array([[number[tuple(second[i] for i in first)] for second in even] for first in even])


def _inversions(permutation: tuple[int, ...]) -> int:
    return sum(a > b for a, b in itertools.combinations(permutation, 2))


def _asked(end: int, pairs: Ids, queries: Ids) -> PuzzleRows:
    """Make sequences of the pairs `[rows, n, 2]` followed by the queries `[rows, q, tokens]`, which end with their
    answers."""
    count, _, size = queries.shape
    tokens = np.concatenate([np.full((count, 1), end), pairs.reshape(count, -1), queries.reshape(count, -1)], 1)
    labels = np.full_like(tokens, UNASKED)
    answers = slice(2 * pairs.shape[1] + size, None, size)
    labels[:, answers] = tokens[:, answers]
    return PuzzleRows(tokens, labels)


def _pick(values: Ids, places: Ids) -> Ids:
    return np.take_along_axis(values, places, 1)


def _under(chance: int, size: int) -> int:
    return ((chance >> 32) * size) >> 32
