"""Batches as a pure function of (seed, step, rank layout): a run resumes from one integer, on any number of ranks."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fathom.data.collections import MixedDataset
from fathom.data.mixture import Mixture
from fathom.data.permutation import Permutation, scatter
from fathom.data.puzzles import PuzzleDataset
from fathom.data.shards import TokenDataset
from fathom.data.targets import NOT_TRAINED, TargetDataset
from fathom.errors import DataError

Packing = Literal["windows", "documents"]
IGNORED = NOT_TRAINED


@dataclass
class Batch:
    """Sequences for one forward pass; the model shifts the labels, as Hugging Face models do.

    The counts cover the global batch, i.e. all ranks and micro-batches, so they need no reduction across ranks.
    """

    input_ids: Tensor
    """Token ids, int64 [rows, T]."""
    labels: Tensor
    """The same ids, or -100 for tokens without a loss; may share memory with `input_ids`."""
    position_ids: Tensor | None
    """Positions that restart with each document, with `packing="documents"`; else None."""
    num_targets: int
    """Predicted tokens of the global batch: the `num_items_in_batch` of a Hugging Face loss."""
    num_bytes: int | None = None
    """In evaluation, the bytes of text behind those tokens, i.e. the denominator of bits per byte."""

    def to(self, device: torch.device | str) -> Batch:
        """Copy to a device, without blocking if the memory is pinned."""
        input_ids = self.input_ids.to(device, non_blocking=True)
        shared = self.labels is self.input_ids
        labels = input_ids if shared else self.labels.to(device, non_blocking=True)
        positions = None if self.position_ids is None else self.position_ids.to(device, non_blocking=True)
        return Batch(input_ids, labels, positions, self.num_targets, self.num_bytes)

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory, from which a GPU can copy in the background."""
        input_ids = self.input_ids.pin_memory()
        labels = input_ids if self.labels is self.input_ids else self.labels.pin_memory()
        positions = None if self.position_ids is None else self.position_ids.pin_memory()
        return Batch(input_ids, labels, positions, self.num_targets, self.num_bytes)

    def split(self, rows: int) -> list[Batch]:
        """Split into micro-batches of `rows` sequences that share this batch's memory and its global counts."""
        pieces = []
        for start in range(0, len(self.input_ids), rows):
            part = slice(start, start + rows)
            input_ids = self.input_ids[part]
            labels = input_ids if self.labels is self.input_ids else self.labels[part]
            positions = None if self.position_ids is None else self.position_ids[part]
            pieces.append(Batch(input_ids, labels, positions, self.num_targets, self.num_bytes))
        return pieces


@dataclass(frozen=True)
class BatchPlan:
    """The order in which a run reads a dataset.

    The token stream is split into windows of `sequence_length`. Epoch e shuffles them with a permutation that depends
    only on (seed, e). Epochs follow each other without a gap, and step s takes the rows `[s * rows_per_step, (s + 1) *
    rows_per_step)` of this endless list. Every rank takes a contiguous slice of the step's rows, and every micro-batch
    a slice of the rank's. The data of a step are therefore the same for any number of ranks.

    In a mixture, the number of a row determines its collection and how many rows of that collection precede it. Every
    collection is split, shuffled and restarted separately.

    A row of conversations holds whole conversations, epochs shuffle rows, and the labels are the assistant's messages.
    A mixture may contain collections of conversations.
    """

    dataset: TokenDataset
    """The tokens."""
    sequence_length: int
    """Tokens per row."""
    rows_per_step: int
    """Rows of the global batch."""
    seed: int
    """Seed of the shuffles."""
    packing: Packing = "windows"
    """`windows`: rows are read as one text. `documents`: position_ids restart at each document of a row, and the first
    token of a document is not predicted."""
    mixture: Mixture | None = None
    """Shares of the collections of a `MixedDataset`; None reads a dataset unmixed."""

    def __post_init__(self) -> None:
        _require_shape(self.sequence_length, self.packing)
        _require_rows(self.dataset, self.sequence_length)
        for part in self._parts:
            _require_documents(part, self.packing)
        if self.rows_per_step < 1:
            raise DataError(f"rows_per_step must be at least 1, not {self.rows_per_step}")
        if isinstance(self.dataset, MixedDataset) != (self.mixture is not None):
            raise ValueError(
                "dataset and mixture do not fit: a MixedDataset needs a mixture, other data sets take none"
            )
        for part in self._parts:
            if part.num_tokens < self.sequence_length and not isinstance(part, TargetDataset):
                raise DataError(
                    f"{part.directory}: a context of {self.sequence_length} tokens is longer than the split "
                    f"{part.split!r} ({part.num_tokens} tokens)"
                )

    @property
    def _parts(self) -> list[TokenDataset]:
        return list(self.dataset.collections.values()) if isinstance(self.dataset, MixedDataset) else [self.dataset]

    @property
    def num_windows(self) -> int:
        """Rows in one epoch; for a mixture, the sum over its collections."""
        return sum(map(self._windows_of, self._parts))

    def _windows_of(self, part: TokenDataset) -> int:
        if isinstance(part, TargetDataset):
            return len(part.packed(self.sequence_length, self.seed))
        return part.num_tokens // self.sequence_length

    def windows(self, step: int) -> NDArray[np.int64]:
        """The windows of the global batch of a step, in order."""
        return _shuffled(self._rows(step), self.num_windows, self.seed)

    def starts(self, step: int) -> NDArray[np.int64]:
        """The stream positions at which the rows of the global batch begin, in order; not for conversations."""
        if self.mixture is None:
            return self.windows(step) * self.sequence_length
        firsts = np.cumsum([0, *(part.num_tokens for part in self._parts)])
        collections, windows = self._placed(step)
        return np.asarray(firsts[collections] + windows * self.sequence_length)

    def _placed(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For every row of a mixture's global batch: its collection, and the window of that collection."""
        assert self.mixture is not None
        collections, numbers = self.mixture.places(self._rows(step))
        for number, part in enumerate(self._parts):
            here = collections == number
            if here.any():
                numbers[here] = _shuffled(numbers[here], self._windows_of(part), self.seed, number)
        return collections, numbers

    def epochs(self, steps: int) -> dict[str, float]:
        """Epochs of each collection of a mixture after `steps` steps, by name."""
        if self.mixture is None:
            return {}
        counts = self.mixture.counts(steps * self.rows_per_step)
        windows = map(self._windows_of, self._parts)
        return {name: had / each for name, had, each in zip(self.dataset.domains, counts, windows, strict=True)}

    def _rows(self, step: int) -> NDArray[np.int64]:
        return np.arange(step * self.rows_per_step, (step + 1) * self.rows_per_step)

    def batch(self, step: int, rank: int = 0, world_size: int = 1, micro_batch: int | None = None) -> list[Batch]:
        """The micro-batches of one rank at one step.

        Args:
            step: The step, from 0.
            rank: The data-parallel rank.
            world_size: Number of ranks.
            micro_batch: Rows per forward pass; by default all rows of the rank.
        """
        rows, micro_batch = self._layout(rank, world_size, micro_batch)
        return self._rank_batch(step, rank * rows, rows).split(micro_batch)

    def prefetch(
        self,
        start_step: int,
        stop_step: int,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int | None = None,
        depth: int = 2,
    ) -> Iterator[tuple[int, list[Batch]]]:
        """Yield `(step, batch(step, ...))` for a range of steps; a thread reads ahead.

        Args:
            start_step: The first step.
            stop_step: The step after the last.
            rank: The data-parallel rank.
            world_size: Number of ranks.
            micro_batch: Rows per forward pass; by default all rows of the rank.
            depth: How many steps to read ahead, into pinned memory if CUDA is available.
        """
        rows, micro_batch = self._layout(rank, world_size, micro_batch)
        return self._prefetch(range(start_step, stop_step), rank * rows, rows, micro_batch, depth)

    def _prefetch(
        self, steps: range, first: int, rows: int, micro_batch: int, depth: int
    ) -> Iterator[tuple[int, list[Batch]]]:
        ready: queue.Queue[tuple[int, Batch] | BaseException | None] = queue.Queue(depth)
        stopped = threading.Event()
        pin = torch.cuda.is_available()

        def put(item: tuple[int, Batch] | BaseException | None) -> None:
            while not stopped.is_set():
                try:
                    return ready.put(item, timeout=0.1)
                except queue.Full:
                    continue

        def read_ahead() -> None:
            try:
                for step in steps:
                    batch = self._rank_batch(step, first, rows)
                    put((step, batch.pin_memory() if pin else batch))
                    if stopped.is_set():
                        return
                put(None)
            except BaseException as error:  # raised again in the consumer
                put(error)

        threading.Thread(target=read_ahead, name="fathom-prefetch", daemon=True).start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                step, batch = item
                yield step, batch.split(micro_batch)
        finally:
            stopped.set()

    def _layout(self, rank: int, world_size: int, micro_batch: int | None) -> tuple[int, int]:
        """Rows per rank and rows per micro-batch."""
        if not 0 <= rank < world_size:
            raise DataError(f"rank {rank} is outside a world of {world_size}")
        if self.rows_per_step % world_size:
            raise DataError(f"{self.rows_per_step} rows per step cannot be shared equally by {world_size} ranks")
        rows = self.rows_per_step // world_size
        micro_batch = rows if micro_batch is None else micro_batch
        if micro_batch < 1 or rows % micro_batch:
            raise DataError(f"{rows} rows per rank cannot be cut into micro-batches of {micro_batch}")
        return rows, micro_batch

    def _rank_batch(self, step: int, first: int, rows: int) -> Batch:
        if isinstance(self.dataset, PuzzleDataset):
            mine = self.windows(step)[first : first + rows]
            return _puzzle_batch(self.dataset, mine, self.rows_per_step * self.dataset.puzzle.traits.answers)
        if isinstance(self.dataset, TargetDataset):
            packed = self.dataset.packed(self.sequence_length, self.seed)
            wanted = [packed.row(window) for window in self.windows(step).tolist()]
            num_targets = self.dataset.count_targets(np.concatenate(wanted))
            return _target_batch(self.dataset, wanted[first : first + rows], self.sequence_length, num_targets)
        if any(isinstance(part, TargetDataset) for part in self._parts):
            return self._mixed_batch(step, first, rows)
        starts = self.starts(step)
        length = self.sequence_length
        tokens = np.empty((rows, length), np.int64)
        for row, start in enumerate(starts[first : first + rows].tolist()):
            self.dataset.read(start, tokens[row])
        input_ids = torch.from_numpy(tokens)
        if self.packing == "windows":
            return Batch(input_ids, input_ids, None, self.rows_per_step * (length - 1))
        # The count covers the global batch, so boundaries in the rows of all ranks are looked up; this reads only the
        # index.
        boundaries = [self.dataset.document_ends(start, start + length) - start for start in starts.tolist()]
        num_targets = sum(length - 1 - len(inside) for inside in boundaries)
        labels, positions = _separate(tokens, boundaries[first : first + rows])
        return Batch(input_ids, torch.from_numpy(labels), torch.from_numpy(positions), num_targets)

    def _mixed_batch(self, step: int, first: int, rows: int) -> Batch:
        """A batch in which some rows are text and others whole conversations."""
        tokens, labels, positions = (np.empty((rows, self.sequence_length), np.int64) for _ in range(3))
        num_targets = 0
        for number, (collection, window) in enumerate(
            zip(*(part.tolist() for part in self._placed(step)), strict=True)
        ):
            part, row = self._parts[collection], number - first
            here = slice(row, row + 1) if 0 <= row < rows else None
            if isinstance(part, TargetDataset):
                documents = part.packed(self.sequence_length, self.seed).row(window)
                num_targets += part.count_targets(documents)
                if here is not None:
                    part.fill(documents, tokens[row], labels[row], positions[row])
                continue
            start = window * self.sequence_length
            inside = part.document_ends(start, start + self.sequence_length) - start
            num_targets += self.sequence_length - 1 - len(inside)
            if here is not None:
                part.read(start, tokens[row])
                labels[here], positions[here] = _separate(tokens[here], [inside])
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions), num_targets)


def _shuffled(rows: NDArray[np.int64], size: int, *key: int) -> NDArray[np.int64]:
    """Rows of an endless list as windows: each epoch contains each of the `size` windows once, in its own order."""
    epochs, places = np.divmod(rows, size)
    windows = np.empty_like(rows)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        windows[here] = Permutation(size, *key, epoch)(places[here])
    return windows


def evaluation_batches(
    dataset: TokenDataset,
    sequence_length: int,
    batch_size: int,
    max_tokens: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    packing: Packing = "windows",
) -> Iterator[Batch]:
    """Yield windows of a dataset in order; each begins with the last token of the window before it in the text.

    All windows together predict every token but the first exactly once. `max_tokens` takes a sample that is spread over
    the whole dataset (`evaluation_windows`). All ranks yield the same number of batches of equal shape: rows beyond the
    end are EOS with all labels -100.

    Args:
        dataset: The dataset; `TokenDataset.select` gives one domain.
        sequence_length: Tokens per row.
        batch_size: Rows per batch and rank.
        max_tokens: Predict about this many tokens, in whole windows and at least one window; by default all.
        rank: The rank whose batches to yield.
        world_size: Number of ranks that share the windows.
        packing: See `BatchPlan`.
    """
    _require_shape(sequence_length, packing)
    if batch_size < 1 or not 0 <= rank < world_size:
        raise DataError(f"cannot evaluate {batch_size} rows at a time as rank {rank} of {world_size}")
    if dataset.num_tokens < 2:
        raise DataError(f"{dataset.directory}: the split {dataset.split!r} has nothing to predict")
    _require_rows(dataset, sequence_length)
    if isinstance(dataset, PuzzleDataset):
        return _puzzle_batches(dataset, batch_size, windows_of(dataset, sequence_length, max_tokens), rank, world_size)
    if isinstance(dataset, TargetDataset):
        _require_documents(dataset, packing)
        chosen = windows_of(dataset, sequence_length, max_tokens)
        return _target_batches(dataset, sequence_length, batch_size, chosen, rank, world_size)
    windows = evaluation_windows(dataset.num_tokens, sequence_length, max_tokens)
    return _evaluation_batches(dataset, sequence_length, batch_size, windows, rank, world_size, packing)


def windows_of(dataset: TokenDataset, sequence_length: int, max_tokens: int | None = None) -> NDArray[np.int64]:
    """The windows of a dataset that `evaluation_batches` takes: `evaluation_windows`, or rows of whole documents."""
    if isinstance(dataset, TargetDataset):
        count = len(dataset.packed(sequence_length, 0))
        return _spread(count, count if max_tokens is None else max_tokens // sequence_length)
    if isinstance(dataset, PuzzleDataset):
        total = dataset.num_documents
        return _spread(total, total if max_tokens is None else max_tokens // sequence_length)
    return evaluation_windows(dataset.num_tokens, sequence_length, max_tokens)


def evaluation_windows(num_tokens: int, sequence_length: int, max_tokens: int | None = None) -> NDArray[np.int64]:
    """The windows of `evaluation_batches`, in order: a pure function of these three numbers.

    If `max_tokens` is smaller than the dataset, the windows are divided into as many stretches as windows are needed,
    with equal lengths up to one window. A hash of the stretch's number picks one window of each stretch.
    """
    stride = sequence_length - 1
    total = -(-(num_tokens - 1) // stride)
    return _spread(total, total if max_tokens is None else max_tokens // stride)


def _spread(total: int, wanted: int) -> NDArray[np.int64]:
    count = min(total, max(1, wanted))
    edges = np.arange(count + 1, dtype=np.int64) * total // count
    return edges[:-1] + scatter(np.arange(count), np.diff(edges))


def _evaluation_batches(
    dataset: TokenDataset,
    length: int,
    batch_size: int,
    windows: NDArray[np.int64],
    rank: int,
    world_size: int,
    packing: Packing,
) -> Iterator[Batch]:
    for first in range(0, len(windows), batch_size * world_size):
        spans = []
        for window in windows[first : first + batch_size * world_size].tolist():
            start = window * (length - 1)
            spans.append((start, min(start + length, dataset.num_tokens)))
        nothing = np.empty(0, np.int64)
        ends = [dataset.document_ends(start, stop) if packing == "documents" else nothing for start, stop in spans]
        # Every token is predicted except the first of each document (or of the window).
        num_targets = num_bytes = 0
        for (start, stop), inside in zip(spans, ends, strict=True):
            edges = [start, *inside.tolist(), stop]
            num_targets += stop - start - 1 - len(inside)
            num_bytes += sum(
                dataset.bytes_before(b) - dataset.bytes_before(a + 1) for a, b in itertools.pairwise(edges)
            )
        tokens = np.full((batch_size, length), dataset.eos_token_id, np.int64)
        labels = np.full((batch_size, length), IGNORED, np.int64)
        positions = np.broadcast_to(np.arange(length), tokens.shape).copy()
        mine = slice(rank * batch_size, (rank + 1) * batch_size)
        for row, ((start, stop), inside) in enumerate(zip(spans[mine], ends[mine], strict=True)):
            dataset.read(start, tokens[row, : stop - start])
            part = slice(row, row + 1)
            separated, positions[part] = _separate(tokens[part], [inside - start])
            labels[row, : stop - start] = separated[0, : stop - start]
        position_ids = torch.from_numpy(positions) if packing == "documents" else None
        yield Batch(torch.from_numpy(tokens), torch.from_numpy(labels), position_ids, num_targets, num_bytes)


def _puzzle_batches(
    dataset: PuzzleDataset, batch_size: int, windows: NDArray[np.int64], rank: int, world_size: int
) -> Iterator[Batch]:
    """Rows of one difficulty; rows without labels fill the last batch."""
    for first in range(0, len(windows), batch_size * world_size):
        wanted = windows[first : first + batch_size * world_size]
        mine = wanted[rank * batch_size : (rank + 1) * batch_size]
        padded = np.concatenate([mine, np.zeros(batch_size - len(mine), np.int64)])
        answers = int((dataset.rows(wanted).labels != IGNORED).sum())
        batch = _puzzle_batch(dataset, padded, answers)
        batch.labels[len(mine) :] = IGNORED
        batch.num_bytes = answers
        yield batch


def _puzzle_batch(dataset: PuzzleDataset, numbers: NDArray[np.int64], num_targets: int) -> Batch:
    rows = dataset.rows(numbers)
    positions = None if rows.positions is None else torch.from_numpy(rows.positions)
    return Batch(torch.from_numpy(rows.tokens), torch.from_numpy(rows.labels), positions, num_targets)


def _target_batches(
    dataset: TargetDataset, length: int, batch_size: int, windows: NDArray[np.int64], rank: int, world_size: int
) -> Iterator[Batch]:
    """Rows of whole documents; rows without labels fill the last batch."""
    packed = dataset.packed(length, 0)
    for first in range(0, len(windows), batch_size * world_size):
        wanted = [packed.row(window) for window in windows[first : first + batch_size * world_size].tolist()]
        documents = np.concatenate(wanted)
        mine = wanted[rank * batch_size : (rank + 1) * batch_size]
        mine += [np.empty(0, np.int64)] * (batch_size - len(mine))
        batch = _target_batch(dataset, mine, length, dataset.count_targets(documents))
        batch.num_bytes = dataset.target_bytes(documents)
        yield batch


def _target_batch(dataset: TargetDataset, rows: list[NDArray[np.int64]], length: int, num_targets: int) -> Batch:
    tokens, labels, positions = (np.empty((len(rows), length), np.int64) for _ in range(3))
    for row, documents in enumerate(rows):
        dataset.fill(documents, tokens[row], labels[row], positions[row])
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), torch.from_numpy(positions), num_targets)


def _require_documents(dataset: TokenDataset, packing: str) -> None:
    """Refuse `packing="windows"` for conversations, which must not attend to one another."""
    if isinstance(dataset, TargetDataset) and packing != "documents":
        raise DataError(f"data.packing={packing}: allowed: documents, for {dataset.directory} has a loss mask")


def _require_rows(dataset: TokenDataset, sequence_length: int) -> None:
    """Refuse a `sequence_length` other than the length of a puzzle's rows."""
    if isinstance(dataset, PuzzleDataset) and sequence_length != (length := dataset.puzzle.traits.length):
        raise DataError(f"data.sequence_length={sequence_length}: allowed: {length}, the row of {dataset.directory}")


def _separate(
    tokens: NDArray[np.int64], boundaries: list[NDArray[np.int64]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Labels and positions of rows in which a new document begins at each boundary."""
    labels = tokens.copy()
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
    for row, inside in enumerate(boundaries):
        labels[row, inside] = IGNORED
        for boundary in inside.tolist():
            positions[row, boundary:] = np.arange(tokens.shape[1] - boundary)
    return labels, positions


def _require_shape(sequence_length: int, packing: str) -> None:
    if packing not in ("windows", "documents"):
        raise DataError(f"packing {packing!r} is not one of windows, documents")
    if sequence_length < 2:
        raise DataError(f"sequence_length must be at least 2, not {sequence_length}: the first token is not predicted")
