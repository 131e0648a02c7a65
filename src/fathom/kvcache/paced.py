"""A memory that is compressed after a fixed number of forward passes, as kvpress's `DecodingPress` does. The entries
are:

    prompt of T tokens                →  what the prompt's own method leaves, or all of them
    after each `interval` passes      →  `target` entries, if there are more

Its length depends on how tokens come, so it is no function of the tokens seen. Entries keep their tokens' positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fathom.models.axes.numerics import widen

from .memory import Memory
from .method import Held, Method


class Paced(Method):
    """The settings that a `PacedMemory` needs of its method."""

    prompt: int
    """The tokens of the prompt."""
    first: Method | None
    """The method of the prompt; None leaves it whole."""
    interval: int
    """Forward passes between two compressions; a question that is read at once is one."""
    target: int
    """The entries that a compression leaves."""
    buffer: int
    """The passes whose queries a compression sees, in addition to the latest."""


class PacedMemory(Memory):
    """The keys and values of one layer, compressed after a fixed number of forward passes."""

    method: Paced

    @property
    def entries(self) -> int:
        """Stored entries."""
        return self.keys.shape[2] if self.is_initialized else 0

    @property
    def compressions(self) -> int:
        """Compressions so far."""
        return self.made

    def _forget(self) -> None:
        super()._forget()
        self.made = self.passes = 0
        self.recent: tuple[Tensor, ...] = ()  # queries of the passes since the last compression, without rotation

    def cuts(self, length: int) -> list[int]:
        """The lengths of the chunks of `length` tokens: a single chunk, unless the prompt ends within them."""
        left = self.method.prompt - self.seen
        return [left, length - left] if 0 < left < length else [length]

    def found(self, query_length: int) -> int:
        """The number of entries that are stored when the next tokens arrive."""
        return self.entries

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that `update` will return for `query_length` new tokens, and the position of the first
        key."""
        return self.entries + query_length, self.seen - self.entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append rotated keys and values `[B, H_kv, q, D]`, and return all of them; `observe` then compresses."""
        self._admit(key_states, value_states)
        self.seen += key_states.shape[2]
        keys, values = self._append(key_states, value_states)
        keys = keys.view_as(keys)
        keys.memory = self  # type: ignore[attr-defined]  # see observe.py
        return keys, values

    def observe(self, queries: Tensor, module: nn.Module | None = None) -> None:
        """Count a forward pass, and compress if the prompt or an interval ends with this pass, or if the pass has
        `target` tokens or more."""
        method, length = self.method, queries.shape[2]
        bare = self.rotation.turn(widen(queries.detach()), length - self.seen, -1)
        if self.seen <= method.prompt:
            first = method.first
            self.recent = () if first is None else (*self.recent, bare)
            if first is not None and self.seen == method.prompt:
                self._keep(first.compress, module)
            return
        self.recent, self.passes = (*self.recent, bare), self.passes + 1
        if self.passes >= method.interval or length >= method.target:
            self._keep(method.compress if self.entries > method.target else None, module)
        elif method.buffer < len(self.recent):
            self.recent = self.recent[len(self.recent) - method.buffer :]

    def _keep(self, compress: Callable[..., tuple[Tensor, Tensor]] | None, module: nn.Module | None) -> None:
        """Keep the entries that a method chooses, and count forward passes from 0 again."""
        if compress is not None:
            seen = torch.cat(self.recent, dim=2)
            held = Held(self.keys, self.values, seen, self.rotation, module, self.seen - self.entries)
            self.keys, self.values = compress(held, self.keys[:, :, :0], 0)
            self.made += 1
        self.recent, self.passes = (), 0

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._each_row(change)
        self.recent = tuple(map(change, self.recent))
