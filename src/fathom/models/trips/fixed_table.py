"""A slot table with a fixed position for every iteration of every token, so that shapes never change and decoding
compiles.

Iteration k of token t has position t · trips + k, whether it was made or not. Under DUO and ALL the positions of
iterations that were not made are masked. Under SAME they hold a copy of the token's last iteration at the end of a
forward pass, so that an iteration reads its own positions with a constant stride.

Compiled decoding computes halted tokens too (`_stored` in `walk.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..axes.roles import View
from .slot_table import EMPTY, Placement, Table, Tags


class FixedTable(Table):
    """The table of a static slot cache: how many iterations each token has made.

    Args:
        tokens: Maximum tokens of each row.
        trips: Maximum iterations of a token.
        rows: Rows of the batch.
        view: Which slots a slot may read.
        device: Device of the table's tensors.
    """

    def __init__(self, tokens: int, trips: int, rows: int, view: View, device: torch.device) -> None:
        super().__init__(rows, tokens, tokens * trips, view, device)
        self.tokens, self.trips = tokens, trips
        self.deepest = trips - 1
        self.columns = torch.zeros((), dtype=torch.long, device=device)
        """Tokens seen, padding included."""

    def emptied(self, rows: int, device: torch.device) -> FixedTable:
        """A new, empty table of fixed positions, of the same size."""
        return FixedTable(self.tokens, self.trips, rows, self.view, device)

    def open(self, columns: Tensor) -> None:
        """Refuse more tokens than the static cache has room for."""
        if not torch.compiler.is_compiling() and int(columns) > self.tokens:
            raise ValueError(f"this static cache has room for {self.tokens} tokens of this model, no more")

    def place(self, query: Tags, batch: Tensor | None, rows: list[int] | None = None) -> Placement:
        """See `SlotTable.place`."""
        slot = query.token * self.trips + query.trip
        if query.live is not None:
            slot = torch.where(query.live, slot, self.capacity)
        slot = slot.expand(len(self.count) if batch is None else len(batch), -1)
        placement = Placement(batch, slot, 0, self.capacity)
        self._write(query, placement)
        return placement

    def narrow(self, placement: Placement, query: Tags, trip: int, alone: bool) -> Placement:
        """See `SlotTable.narrow`. Copies only the tokens of a longer forward pass under SAME that has not ended."""
        if self.view is not View.SAME:
            return placement
        seen: Tensor | slice = slice(trip, placement.end, self.trips)
        if not alone:
            last = self._rows(self.halt, placement)[:, : placement.end // self.trips].clamp(min=0, max=trip)
            seen = self._across(torch.arange(last.shape[1], device=last.device) * self.trips + last, placement)
        return replace(placement, seen=seen)

    def tags(self, placement: Placement) -> Tags:
        """See `SlotTable.tags`. Live are the iterations up to each token's last, and those that the pass itself
        stores."""
        assert placement.slot is not None
        if isinstance(placement.seen, Tensor):
            place = placement.seen % (self.capacity + 1)
        else:
            places = torch.arange(placement.end, device=self.halt.device).unsqueeze(0)
            place = places if placement.seen is None else places[:, placement.seen]
        token, trip = place // self.trips, place % self.trips
        halt = self._rows(self.halt, placement)
        halt = halt.gather(1, token.expand(len(halt), -1))  # [B', N]
        if placement.seen is None:
            own = placement.slot.clamp(max=placement.end)  # discarded slots go behind all that is read
            live = torch.nn.functional.pad(trip <= halt, (0, 1)).scatter(1, own, True)[:, :-1]
        else:
            live = halt != EMPTY
        return Tags(token, trip, live, self._extra("bias", placement), None, halt)

    def repeats(self, rows: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of all iterations after the first of tokens `[B, M]` in rows `[B, 1]`, and the position that
        each is to copy: itself, or the token's last iteration. Both are `[B, (trips - 1) M]`."""
        trip = torch.arange(1, self.trips, device=token.device).unsqueeze(1)
        last = self.halt[rows, token].clamp(min=0).unsqueeze(1)  # [B', 1, M]
        token = token.unsqueeze(1)
        places = (token * self.trips + each for each in (trip, torch.minimum(trip, last)))
        to, of = (place.flatten(1) for place in places)
        return to, of

    def crop(self, columns: Tensor) -> None:
        """Forget all tokens from a column on; the stored slots keep their positions."""
        later = torch.arange(self.tokens, device=self.halt.device) >= columns
        self.halt = self.halt.masked_fill(later, EMPTY)
        self.count, self.columns = (self.halt + 1).sum(1), columns.clone()
