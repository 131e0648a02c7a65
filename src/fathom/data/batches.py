"""Batches as a pure function of (seed, step, rank layout): a run resumes from one integer, on any number of ranks.

`training/build.py` makes a run's plan, whose rows per step are `train.tokens_per_step` divided by the length of a row
(`rows_per_step` in `../recipe.py`); it refuses sizes that ranks and micro-batches do not divide, and has each loss
divided by `Batch.num_targets`.

`rows.py` cuts windows, separates documents and spreads a sample (`max_tokens`); `targets.py` packs conversations.
`permutation.py` computes the order of an epoch, `mixture.py` the collection of a row.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fathom.data.collections import MixedDataset
from fathom.data.mixture import Mixture
from fathom.data.permutation import Permutation
from fathom.data.rows import IGNORED, Ids, Packing, Rows, rows_of, windows_of
from fathom.data.shards import TokenDataset
from fathom.data.targets import TargetDataset
from fathom.errors import DataError


@dataclass
class Batch:
    """Sequences for one forward pass; the model shifts the labels, as Hugging Face models do.

    The counts cover the global batch, i.e. all ranks and micro-batches, so they need no reduction across ranks.
    """

    input_ids: Tensor
    """Token ids, int64 [rows, T]."""
    labels: Tensor
    """`input_ids`, or -100 for tokens without a loss."""
    position_ids: Tensor | None
    """Positions that restart with each document, with `packing="documents"`; else None."""
    num_targets: int
    """Predicted tokens of the global batch: the `num_items_in_batch` of a Hugging Face loss."""
    num_bytes: int | None = None
    """In evaluation, the bytes of text behind those tokens, i.e. the denominator of bits per byte."""

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `change` applied to each of its tensors; the counts are unchanged."""
        positions = None if self.position_ids is None else change(self.position_ids)
        return Batch(change(self.input_ids), change(self.labels), positions, self.num_targets, self.num_bytes)

    def to(self, device: torch.device | str) -> Batch:
        """Copy to a device, without blocking if the memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory, from which a GPU can copy in the background."""
        return self._each(Tensor.pin_memory)

    def split(self, rows: int) -> list[Batch]:
        """Split into micro-batches of `rows` sequences that share this batch's memory and its global counts."""
        parts = [slice(start, start + rows) for start in range(0, len(self.input_ids), rows)]
        return [self._each(operator.itemgetter(part)) for part in parts]


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
        for part in self._parts:
            rows_of(part, self.sequence_length, self.packing)  # refuses rows that do not fit
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

    @cached_property
    def _readers(self) -> list[Rows]:
        return [rows_of(part, self.sequence_length, self.packing, self.seed) for part in self._parts]

    @property
    def num_windows(self) -> int:
        """The number of sequences in one epoch; for a mixture, the sum over its collections."""
        return sum(map(self._windows_of, self._parts))

    def _windows_of(self, part: TokenDataset) -> int:
        if isinstance(part, TargetDataset):
            return len(part.packed(self.sequence_length, self.seed))
        return part.num_tokens // self.sequence_length

    def windows(self, step: int) -> NDArray[np.int64]:
        """The indices of the windows in a step's global batch, in order."""
        return _shuffled(self._rows(step), self.num_windows, self.seed)

    def _placed(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The collection of every sequence in a step's global batch, and the index of its window in this collection."""
        if self.mixture is None:
            windows = self.windows(step)
            return np.zeros_like(windows), windows
        collections, numbers = self.mixture.places(self._rows(step))
        for number, part in enumerate(self._parts):
            here = collections == number
            if here.any():
                numbers[here] = _shuffled(numbers[here], self._windows_of(part), self.seed, number)
        return collections, numbers

    def epochs(self, steps: int) -> dict[str, float]:
        """How many epochs of each collection of a mixture were read after `steps` steps, by the collection's name."""
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
        pin = torch.cuda.is_available()

        def read(step: int) -> Batch:
            batch = self._rank_batch(step, first, rows)
            return batch.pin_memory() if pin else batch

        pool, ahead = ThreadPoolExecutor(1, thread_name_prefix="fathom-prefetch"), deque[Future[Batch]]()
        try:
            for step in steps:
                for later in steps[step - steps.start + len(ahead) : step - steps.start + depth + 1]:
                    ahead.append(pool.submit(read, later))
                yield step, ahead.popleft().result().split(micro_batch)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _layout(self, rank: int, world_size: int, micro_batch: int | None) -> tuple[int, int]:
        """The number of sequences per rank, and per micro-batch."""
        if not 0 <= rank < world_size:
            raise DataError(f"rank={rank}: allowed: from 0 to below world_size={world_size}")
        if self.rows_per_step % world_size:
            raise DataError(f"{self.rows_per_step} sequences per step cannot be divided among {world_size} ranks")
        rows = self.rows_per_step // world_size
        micro_batch = rows if micro_batch is None else micro_batch
        if micro_batch < 1 or rows % micro_batch:
            raise DataError(f"{rows} sequences per rank cannot be divided into micro-batches of {micro_batch}")
        return rows, micro_batch

    def _rank_batch(self, step: int, first: int, rows: int) -> Batch:
        collections, windows = self._placed(step)
        mine = slice(first, first + rows)
        tokens, labels, positions = (np.empty((rows, self.sequence_length), np.int64) for _ in range(3))
        num_targets, separate = 0, False
        for number, reader in enumerate(self._readers):
            num_targets += reader.targets(windows[collections == number])
            here = collections[mine] == number
            if here.any():
                tokens[here], labels[here], places = reader.read(windows[mine][here])
                if places is not None:
                    positions[here], separate = places, True
        return _batch(tokens, labels, positions if separate else None, num_targets)


def _batch(tokens: Ids, labels: Ids, positions: Ids | None, num_targets: int, num_bytes: int | None = None) -> Batch:
    places = None if positions is None else torch.from_numpy(positions)
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), places, num_targets, num_bytes)


def _shuffled(rows: NDArray[np.int64], size: int, *key: int) -> NDArray[np.int64]:
    """Map the numbers of training sequences to shuffled windows: each epoch contains each of the `size` windows once,
    in an order of its own."""
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
    """Yield batches of a dataset's windows in order; each window begins with the last token of the text's preceding
    window.

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
    rows = rows_of(dataset, sequence_length, packing, overlap=1)
    if batch_size < 1 or not 0 <= rank < world_size:
        raise DataError(
            f"batch_size={batch_size}, rank {rank} of {world_size}: allowed: a batch_size of 1 or more, a rank of 0 or "
            "more and below the number of ranks"
        )
    if dataset.num_tokens < 2:
        raise DataError(f"{dataset.directory}: the split {dataset.split!r} needs two tokens or more, to predict one")
    windows = windows_of(dataset, sequence_length, max_tokens)
    size = batch_size * world_size
    batches = (windows[first : first + size] for first in range(0, len(windows), size))
    return (_evaluated(rows, batch, batch_size, rank, dataset.eos_token_id) for batch in batches)


def _evaluated(rows: Rows, windows: Ids, batch_size: int, rank: int, eos: int) -> Batch:
    """A rank's part of an evaluation batch; missing sequences are filled with EOS tokens that have no labels."""
    mine = windows[rank * batch_size : (rank + 1) * batch_size]
    tokens, labels, positions = rows.read(np.resize(mine if len(mine) else windows, batch_size))
    tokens[len(mine) :], labels[len(mine) :] = eos, IGNORED
    return _batch(tokens, labels, positions, rows.targets(windows), rows.size(windows))
