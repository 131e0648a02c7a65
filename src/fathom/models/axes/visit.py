"""A visit (one layer in one loop iteration) and an iteration's output, from which mechanisms learn what is being
run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Visit:
    """One layer in one iteration."""

    index: int
    """Position in the whole plan, the unrolled depth."""
    layer: int
    trip: int
    kept: bool
    """Whether a later visit reads this one."""
    sources: tuple[int, ...]
    """Indices of earlier visits whose (key, mixed value) the mixer reads, oldest first."""
    bank: int
    """The cache layer that holds the keys and values which its attention reads."""
    borrows: bool = False
    """Whether these are those of the layer's first visit, so that it makes none of its own."""


Plan = tuple[tuple[Visit, ...], ...]
"""The visits of a forward pass, by trip."""


@dataclass
class Out:
    """The output of a loop iteration: the un-normed residual stream and, computed on demand, the head's input."""

    residual: Tensor
    """`[B, T, hidden_size]`"""
    norm: Callable[[Tensor], Tensor]
    head: nn.Module | None = None
    """The projection to logits, which only recurrences that feed on them need."""
    embedding: nn.Embedding | None = None
    embedding_scale: float = 1.0
    trip: int = 0
    last: bool = True
    """Whether no trip can follow."""
    positions: Tensor | None = None
    """The tokens' positions, `[1 or B, T]`; of all tokens of the call, so only the first trip's are one for each."""
    norms_embedding: bool = False
    """Whether the final norm also norms the embeddings."""
    _entry: Tensor | None = None
    _hidden: Tensor | None = field(default=None, repr=False)

    @property
    def hidden(self) -> Tensor:
        """The residual stream after the final norm, `[B, T, hidden_size]`."""
        if self._hidden is None:
            self._hidden = self.norm(self.residual)
        return self._hidden

    @property
    def entry(self) -> Tensor:
        """The input of the recurrence's `entry_layer` in the first iteration, `[B, T, hidden_size]`."""
        if self._entry is None:
            raise ValueError("only the first iteration has an entry, and only if the recurrence sets entry_layer")
        return self._entry

    @property
    def projection(self) -> nn.Module:
        """The head of a recurrence that needs one."""
        if self.head is None:
            raise ValueError("this recurrence reads logits: call the model with its head (FathomForCausalLM does)")
        return self.head

    @property
    def tables(self) -> tuple[nn.Module, Tensor]:
        """The head, and the input embeddings `[vocab_size, hidden_size]` before scaling and norm."""
        head, table = self.projection, self.embedding
        assert table is not None
        # The weight of a sharded or offloaded table exists only while the table is called, and an adapter's table is
        # not its weight.
        called = not isinstance(table, nn.Embedding) or table.weight.is_meta or table._forward_pre_hooks
        if called or "forward" in vars(table):
            rows = table(torch.arange(table.weight.shape[0], device=self.residual.device))
        else:
            rows = table.weight
        return head, rows

    def of(self, residual: Tensor) -> Out:
        """A copy of this iteration's output with the residual stream of other tokens."""
        return replace(self, residual=residual, _entry=None, _hidden=None)
