"""Sequences of a dataset, read by number: windows of its text, packed whole documents, or generated puzzles.

With `packing: windows` a row is one text. With `documents`, `position_ids` restart at each document, whose first token
is not predicted; `models/modeling.py` makes the masks that stop attention there. `targets.py` packs conversations and
refuses those that are too long; `batches.py` chooses the rows of a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fathom.data.permutation import scatter
from fathom.data.puzzles import PuzzleDataset
from fathom.data.shards import TokenDataset
from fathom.data.targets import NOT_TRAINED, TargetDataset
from fathom.errors import DataError

Packing = Literal["windows", "documents"]
Ids = NDArray[np.int64]
IGNORED = NOT_TRAINED


class Rows(Protocol):
    """The interface through which an evaluation or a run counts and reads the sequences of a dataset."""

    def targets(self, numbers: Ids) -> int:
        """The number of predicted tokens in some sequences."""

    def size(self, numbers: Ids) -> int:
        """The number of bytes of text that the predicted tokens of some sequences stand for."""

    def read(self, numbers: Ids) -> tuple[Ids, Ids, Ids | None]:
        """Read some sequences: their tokens, labels and, if documents are separate, positions, each `[rows, T]`."""


def rows_of(dataset: TokenDataset, length: int, packing: Packing, seed: int = 0, overlap: int = 0) -> Rows:
    """The rows of a dataset.

    Args:
        dataset: The tokens.
        length: Tokens per row.
        packing: Whether documents of a text are separate.
        seed: Seed of the rows of whole documents.
        overlap: Tokens that a window of a text shares with the one before.
    """
    if packing not in ("windows", "documents"):
        raise DataError(f"packing {packing!r} is not one of windows, documents")
    if length < 2:
        raise DataError(f"sequence_length must be at least 2, not {length}: the first token is not predicted")
    if isinstance(dataset, PuzzleDataset):
        if length != (own := dataset.puzzle.traits.length):
            raise DataError(f"data.sequence_length={length}: allowed: {own}, the length of {dataset.directory}")
        return _Puzzles(dataset)
    if isinstance(dataset, TargetDataset):
        if packing != "documents":  # conversations must not attend to one another
            raise DataError(f"data.packing={packing}: allowed: documents, because {dataset.directory} has a loss mask")
        return _Documents(dataset, length, seed)
    return _Windows(dataset, length, length - overlap, packing == "documents")


@dataclass(frozen=True)
class _Windows:
    """Windows of a text, `stride` tokens apart; the last one may be cut short."""

    dataset: TokenDataset
    length: int
    stride: int
    documents: bool

    def _spans(self, numbers: Ids) -> Iterator[tuple[int, int, Ids]]:
        """Start and end of each window, and the positions inside it at which documents begin, if documents are
        separate."""
        nothing = np.empty(0, np.int64)
        for start in (numbers * self.stride).tolist():
            stop = min(start + self.length, self.dataset.num_tokens)
            yield start, stop, self.dataset.document_ends(start, stop) if self.documents else nothing

    def targets(self, numbers: Ids) -> int:
        """The number of predicted tokens: all but the first of each window and, if documents are separate, of each
        document."""
        return sum(stop - start - 1 - len(inside) for start, stop, inside in self._spans(numbers))

    def size(self, numbers: Ids) -> int:
        """See `Rows.size`."""
        before = self.dataset.bytes_before
        edges = ([start, *inside.tolist(), stop] for start, stop, inside in self._spans(numbers))
        return sum(before(b) - before(a + 1) for places in edges for a, b in itertools.pairwise(places))

    def read(self, numbers: Ids) -> tuple[Ids, Ids, Ids | None]:
        """See `Rows.read`; a window that is cut short is filled with EOS tokens that have no labels."""
        tokens = np.full((len(numbers), self.length), self.dataset.eos_token_id, np.int64)
        labels = np.full_like(tokens, IGNORED)
        positions = np.tile(np.arange(self.length), (len(numbers), 1))
        for row, (start, stop, inside) in enumerate(self._spans(numbers)):
            self.dataset.read(start, tokens[row, : stop - start])
            labels[row, : stop - start] = tokens[row, : stop - start]
            for boundary in (inside - start).tolist():
                labels[row, boundary] = IGNORED
                positions[row, boundary:] = np.arange(self.length - boundary)
        return tokens, labels, positions if self.documents else None


@dataclass(frozen=True)
class _Documents:
    """Sequences that are packed from whole documents with a loss mask."""

    dataset: TargetDataset
    length: int
    seed: int

    def _documents(self, numbers: Ids) -> list[Ids]:
        packed = self.dataset.packed(self.length, self.seed)
        return [packed.row(number) for number in numbers.tolist()]

    def targets(self, numbers: Ids) -> int:
        """See `Rows.targets`."""
        return sum(map(self.dataset.count_targets, self._documents(numbers)))

    def size(self, numbers: Ids) -> int:
        """See `Rows.size`."""
        return sum(map(self.dataset.target_bytes, self._documents(numbers)))

    def read(self, numbers: Ids) -> tuple[Ids, Ids, Ids]:
        """See `Rows.read`."""
        tokens, labels, positions = (np.empty((len(numbers), self.length), np.int64) for _ in range(3))
        for row, documents in enumerate(self._documents(numbers)):
            self.dataset.fill(documents, tokens[row], labels[row], positions[row])
        return tokens, labels, positions


@dataclass(frozen=True)
class _Puzzles:
    """The sequences of a puzzle; each answer counts as one byte of text."""

    dataset: PuzzleDataset

    def targets(self, numbers: Ids) -> int:
        """See `Rows.targets`."""
        if self.dataset.split == "train":
            return len(numbers) * self.dataset.puzzle.traits.answers
        return int((self.dataset.rows(numbers).labels != IGNORED).sum())

    size = targets

    def read(self, numbers: Ids) -> tuple[Ids, Ids, Ids | None]:
        """See `Rows.read`."""
        rows = self.dataset.rows(numbers)
        return rows.tokens, rows.labels, rows.positions


def windows_of(dataset: TokenDataset, sequence_length: int, max_tokens: int | None = None) -> Ids:
    """The numbers of the sequences that an evaluation reads: `evaluation_windows` of a text, else evenly spread
    sequences of the dataset."""
    if isinstance(dataset, TargetDataset):
        total = len(dataset.packed(sequence_length, 0))
    elif isinstance(dataset, PuzzleDataset):
        total = dataset.num_documents
    else:
        return evaluation_windows(dataset.num_tokens, sequence_length, max_tokens)
    return _spread(total, total if max_tokens is None else max_tokens // sequence_length)


def evaluation_windows(num_tokens: int, sequence_length: int, max_tokens: int | None = None) -> Ids:
    """The numbers of the windows that `evaluation_batches` reads, in order; they depend only on the three arguments.

    If `max_tokens` is smaller than the dataset, the windows are divided into as many stretches as windows are needed,
    with equal lengths up to one window. A hash of the stretch's number picks one window of each stretch.
    """
    stride = sequence_length - 1
    total = -(-(num_tokens - 1) // stride)
    return _spread(total, total if max_tokens is None else max_tokens // stride)


def _spread(total: int, wanted: int) -> Ids:
    count = min(total, max(1, wanted))
    edges = np.arange(count + 1, dtype=np.int64) * total // count
    return edges[:-1] + scatter(np.arange(count), np.diff(edges))
