"""Caches a batch of sequences of different lengths, padded on the left, with one memory for each amount of padding.

A row is compressed when *its* memory is full, so rows of different lengths are compressed at different tokens, as if
each were alone. Padding is never stored. What attention sees is a rectangle, with zeros to the left of shorter rows:

    row 0   · · k₁ k₂ k₃      p = 3 entries
    row 1   k₁ k₂ k₃ k₄ k₅    p = 5
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from .memory import Memory
from .method import Method


class Padded(Memory):
    """The cache layer of a left-padded batch.

    Args:
        empty: The memory of a row, without entries.
        pads: The padding of each row, in tokens.
        method_for: The method of rows with this padding; by default that of `empty`.
    """

    def __init__(self, empty: Memory, pads: Sequence[int], method_for: Callable[[int], Method] | None = None) -> None:
        super().__init__(empty.method, empty.layer)
        self.empty, self.pads, self.state = empty, tuple(pads), empty.state
        empty.state = None  # here are the states of all rows
        self.memories = {pad: empty.branch() for pad in sorted(set(pads))}
        """By padding."""
        for pad, memory in self.memories.items():
            memory.method = empty.method if method_for is None else method_for(pad).for_layer(*empty.method.place)

    def emptied(self) -> Memory:
        """The memory that a reset leaves, for sequences without padding."""
        self.empty.state = self.state
        return self.empty

    def _rows(self, pad: int) -> list[int]:
        return [row for row, own in enumerate(self.pads) if own == pad]

    def _real(self, pad: int, length: int) -> int:
        """How many of a sequence's next `length` tokens are no padding."""
        return max(0, min(length, self.seen + length - pad))

    @property
    def entries(self) -> int:
        """The number of entries of the sequence that stores most."""
        return max(memory.entries for memory in self.memories.values())

    @property
    def compressions(self) -> int:
        """Compressions of the longest row."""
        return max(memory.compressions for memory in self.memories.values())

    def lengths(self, query_length: int) -> list[int]:
        """The number of keys, without padding, that each sequence has after `query_length` further columns."""
        found = {pad: memory.get_mask_sizes(self._real(pad, query_length))[0] for pad, memory in self.memories.items()}
        return [found[pad] for pad in self.pads]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The width of the rectangular tensor, at least the query length, and the position of its first column."""
        width = max(query_length, *self.lengths(query_length))  # a narrower one would be read as causal from its start
        return width, self.seen + query_length - width

    def cuts(self, length: int) -> list[int]:
        """The lengths of the chunks into which `length` tokens are split, so that no chunk crosses a compression of any
        sequence."""
        ends = {self.seen, self.seen + length}
        for pad, memory in self.memories.items():
            end = max(self.seen, pad)
            for chunk in memory.cuts(self._real(pad, length)):
                ends.add(end := end + chunk)
        return [b - a for a, b in pairwise(sorted(ends))]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append the tokens that are no padding to each sequence, and return all entries as a rectangular tensor `[B,
        H_kv, width, D]`."""
        length = key_states.shape[2]
        width, _ = self.get_mask_sizes(length)
        keys, values = (x.new_zeros(*x.shape[:2], width, x.shape[3]) for x in (key_states, value_states))
        for pad, memory in self.memories.items():
            rows, skipped = self._rows(pad), length - self._real(pad, length)
            own = memory.update(key_states[rows, :, skipped:], value_states[rows, :, skipped:])
            for rectangle, x in zip((keys, values), own, strict=True):
                rectangle[rows, :, width - x.shape[2] :] = x
        self.seen, self.is_initialized = self.seen + length, True
        if self.method.observed:
            keys.memory, keys.lengths = self, self.lengths(0)  # type: ignore[attr-defined]  # see observe.py
        return keys, values

    def observe(self, queries: Tensor, module: nn.Module | None = None) -> None:
        """Pass the queries `[B, H, q, D]` that are no padding to each sequence's memory."""
        for pad, memory in self.memories.items():
            count = min(queries.shape[2], self.seen - pad)
            if count > 0:
                memory.observe(queries[self._rows(pad), :, -count:], module)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        chosen: list[int] = indices.tolist()
        for pad in list(self.memories):
            rows = self._rows(pad)
            own = [rows.index(row) for row in chosen if self.pads[row] == pad]
            if own:
                self.memories[pad].batch_select_indices(torch.tensor(own))
            else:
                del self.memories[pad]
        self.pads = tuple(self.pads[row] for row in chosen)
        if self.state is not None:
            self.state.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(torch.arange(len(self.pads)).repeat_interleave(repeats))

    @property
    def adds(self) -> bool:
        """Whether every sequence stores tokens after the prompt uncompressed, so that they can be removed again."""
        return all(memory.adds for memory in self.memories.values())

    def gives_back(self, count: int) -> bool:
        """Whether the last `count` tokens of every sequence can be removed."""
        return all(memory.gives_back(count) for memory in self.memories.values())

    def _give_back(self, count: int) -> None:
        for memory in self.memories.values():
            memory.crop(-count)
        self.seen -= count

    def offload(self) -> None:
        """Move all entries to the CPU."""
        for memory in self.memories.values():
            memory.offload()

    def prefetch(self) -> None:
        """Move all entries back."""
        for memory in self.memories.values():
            memory.prefetch()

    def branch(self) -> Padded:
        """An independent copy of this memory, to continue from."""
        new = copy.copy(self)
        new.empty = self.empty.branch()
        new.state = None if self.state is None else self.state.branch()
        new.memories = {pad: memory.branch() for pad, memory in self.memories.items()}
        return new
