"""The table of a slot cache: the token and iteration at each stored position, and the positions that an iteration
reads.

One table serves all layers. A `SlotTable` grows, and stores slots one after another in each row of the batch, without
padding. The positions of a `FixedTable` (`fixed_table.py`) are fixed, so that decoding can be compiled. Both inherit
from `Table`.

Under SAME and DUO an iteration reads only some of the slots. It looks them up in an index of positions, `[B, trip,
token]`, and gathers them, or reads every position under a mask; `gathering_pays` decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..axes.host import to_host
from ..axes.roles import View

SPARE = 8
"""A full buffer grows by 1/SPARE of its size."""
EMPTY = -1
"""Sentinel for unused positions: the token and the last trip of no slot, and its place."""
COPYING = 1.5
"""The cost of copying the keys and values of a place, in readings of it by one query. Measured on CPUs; on a GPU, whose
time is bytes, a copy that does not stay in its cache is a reading and a writing: 2."""
EXTRA = ("bias", "document")
"""Tags that a table holds only once a pass brings them: for most models every pass would read zeros."""


def with_spare(places: int) -> int:
    """A buffer size with spare room: `places` plus 1/SPARE of it, so that buffers grow rarely."""
    return places + places // SPARE


def gathering_pays(queries: int, found: int, stored: int, copied: bool) -> bool:
    """Whether copying only the slots that a pass reads is cheaper than attending to all stored slots under a mask.

    A single query is limited by memory bandwidth, so gathering pays if about 2.5 positions are stored for each one that
    is read. The many queries of a prompt read for longer than copying takes.

    Args:
        queries: Reading slots of each row.
        found: Positions of each row that they read.
        stored: All positions of each row.
        copied: Whether reading all of them copies too, as it does for a part of the batch's rows.
    """
    return (queries + COPYING) * found < (queries + COPYING * copied) * stored


@dataclass
class Tags:
    """The token, iteration and other tags of slots along a query or key axis, `[B, N]` each, or `[1, N]` if all
    sequences agree."""

    token: Tensor
    """The token's column, counted from the first token in the cache."""
    trip: Tensor
    live: Tensor | None = None
    """False if there is nothing to read."""
    bias: Tensor | None = None
    """Bias on the logit of every query that reads the slot."""
    document: Tensor | None = None
    """Slots of other documents are not read."""
    halt: Tensor | None = None
    """The last trip that the slot's token made."""
    living: list[int] | None = None
    """Number of live slots of each row; None if the host does not know it."""


@dataclass
class Placement:
    """The positions where the slots of one pass are stored, and those that the pass reads."""

    batch: Tensor | None
    """Rows of the batch, `[B']`; None for all."""
    slot: Tensor | None
    """Positions, `[B', M]`; None if all rows continue at `start`. Discarded slots go to the last position."""
    start: int
    end: int
    """The pass reads the positions before this one."""
    counts: list[int] = field(default_factory=list)
    """Slots of each row once these are stored, for a table that grows."""
    seen: Tensor | slice | None = None
    """The positions that the pass reads: a range, or `[B', N]`, counted over all rows; None for all before `end`."""
    found: Tensor | None = None
    """False where `seen` only pads the rectangle, `[B', N]`; None if it has no padding."""

    def shape(self, rows: int, query: Tags) -> tuple[int, int]:
        """The number of sequences B' and of slots M in the pass, for a table of `rows` sequences."""
        known = self.batch if self.batch is not None else self.slot
        return rows if known is None else len(known), query.token.shape[1]

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Write the pass's tensors `[B', M, ...]` to their positions in a buffer `[B, capacity, ...]`."""
        if self.slot is None:
            buffer[:, self.start : self.end] = new
        else:
            rows = torch.arange(len(self.slot), device=buffer.device) if self.batch is None else self.batch
            buffer[rows.unsqueeze(1), self.slot] = new.to(buffer.dtype)

    def read(self, buffer: Tensor) -> Tensor:
        """Read the part of a buffer that the pass may attend to, `[B', N, ...]`."""
        if isinstance(self.seen, Tensor):
            # by one axis, which takes half the time of an index for rows and one for positions
            return buffer.flatten(0, 1).index_select(0, self.seen.flatten()).unflatten(0, self.seen.shape)
        places = slice(self.end) if self.seen is None else self.seen
        if self.batch is not None:
            return buffer[self.batch, places]
        return buffer[:, places]


class Table:
    """Base class of `SlotTable` and `FixedTable`: each sequence's number of slots, each token's last iteration, and
    optional tags.

    Args:
        rows: Rows of the batch.
        columns: Maximum tokens.
        capacity: Positions of each row; one more takes discarded slots.
        view: Which slots a slot may read.
        device: Device of the table's tensors.
    """

    def __init__(self, rows: int, columns: int, capacity: int, view: View, device: torch.device) -> None:
        self.capacity, self.view = capacity, view
        self.end = 0
        """A pass reads the places before this one."""
        self.deepest = 0
        """The latest trip that any token made."""
        self.count = torch.zeros(rows, dtype=torch.long, device=device)  # [B]
        self.halt = torch.full((rows, columns), EMPTY, dtype=torch.long, device=device)  # [B, columns]
        self.extra: dict[str, Tensor] = {}
        """The tags of `EXTRA` that passes have brought, `[B, capacity + 1]`."""

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to all tensors of the table that have one entry for each sequence of the batch."""
        self.count, self.halt = change(self.count), change(self.halt)
        self.extra = {name: change(tensor) for name, tensor in self.extra.items()}

    def select(self, rows: Tensor) -> None:
        """Select sequences of the batch by index: reorder, repeat or remove them."""
        self.each(lambda x: x.index_select(0, rows.to(x.device)))

    def note(self, query: Tags, placement: Placement, deepest: int) -> None:
        """Record the last iteration that each token of a pass has made; `deepest` is the largest of them."""
        rows, live = self._members(query, placement)
        place = (rows.unsqueeze(1) * self.halt.shape[1] + query.token).expand_as(live)
        trip = torch.where(live, query.trip, EMPTY)  # the maximum below ignores it
        self.halt.view(-1).scatter_reduce_(0, place.flatten(), trip.flatten(), "amax")
        self.deepest = max(self.deepest, deepest)

    def commit(self, query: Tags, placement: Placement) -> None:
        """Count the slots of a pass as stored, after the pass has written them."""
        rows, live = self._members(query, placement)
        self.count.index_add_(0, rows, live.sum(1))
        self.end = max(self.end, placement.end)

    def _members(self, query: Tags, placement: Placement) -> tuple[Tensor, Tensor]:
        """Which sequences of the batch take part, `[B']`, and which of their slots are kept, `[B', M]`."""
        shape = placement.shape(len(self.count), query)
        rows = torch.arange(shape[0], device=self.count.device) if placement.batch is None else placement.batch
        live = torch.ones((), dtype=torch.bool, device=rows.device) if query.live is None else query.live
        return rows, live.expand(shape)

    def _write(self, query: Tags, placement: Placement) -> None:
        """Write the tags (token, iteration and others) of a pass's slots into the table."""
        shape = placement.shape(len(self.count), query)
        for name in EXTRA:
            value = getattr(query, name)
            if value is not None and name not in self.extra:
                self.extra[name] = value.new_zeros(len(self.count), self.capacity + 1)
            if name in self.extra:
                buffer = self.extra[name]
                placement.write(buffer, buffer.new_zeros(shape) if value is None else value.expand(shape))

    def _extra(self, name: str, placement: Placement) -> Tensor | None:
        return placement.read(self.extra[name]) if name in self.extra else None

    @staticmethod
    def _rows(x: Tensor, placement: Placement) -> Tensor:
        """The rows of a pass."""
        return x if placement.batch is None else x[placement.batch]

    def _across(self, place: Tensor, placement: Placement) -> Tensor:
        """Convert positions `[B', N]` within the pass's sequences to indices into a buffer that is flattened over all
        sequences."""
        rows = torch.arange(len(place), device=place.device) if placement.batch is None else placement.batch
        return place.clamp(min=0) + rows.unsqueeze(1) * (self.capacity + 1)


class SlotTable(Table):
    """The table of a growing slot cache: each sequence's slots are stored one after another.

    Args:
        rows: Rows of the batch.
        view: Which slots a slot may read.
        device: Device of the table's tensors.
    """

    def __init__(self, rows: int, view: View, device: torch.device) -> None:
        super().__init__(rows, 0, 0, view, device)
        self.columns = 0
        """Tokens seen, padding included."""
        self.even = True
        """Whether all rows hold the same slots, so that no place has to be masked."""
        self.padded = False
        """Whether some columns of some rows may be padding."""
        self.counts = [0] * rows
        """`count` on the host."""
        self.token = torch.full((rows, 1), EMPTY, dtype=torch.long, device=device)  # [B, capacity + 1]
        self.trip = torch.zeros_like(self.token)
        self.index = self.halt.new_empty(rows, 0, 0)
        """Where each slot stands, `[B, trip, column]`, or `EMPTY`; without trips until a pass wants to know."""

    def emptied(self, rows: int, device: torch.device) -> SlotTable:
        """A new, empty table of the same kind."""
        return SlotTable(rows, self.view, device)

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """See `Table.each`."""
        super().each(change)
        self.token, self.trip, self.index = change(self.token), change(self.trip), change(self.index)

    def select(self, rows: Tensor) -> None:
        """See `Table.select`."""
        super().select(rows)
        self.counts = self.counts[:1] * len(rows) if self.even else [self.counts[i] for i in to_host(rows)]

    def open(self, columns: int) -> None:
        """Make room for new tokens."""
        more = (0, columns - self.halt.shape[1])
        self.halt = torch.nn.functional.pad(self.halt, more, value=EMPTY)
        if self.index.shape[1]:
            self.index = torch.nn.functional.pad(self.index, more, value=EMPTY)

    def place(self, query: Tags, batch: Tensor | None, rows: list[int] | None = None) -> Placement:
        """Decide where the slots of a pass will be stored, without counting them before `commit`.

        Args:
            query: The slots of the pass.
            batch: Their rows of the batch, `[B']`; None for all.
            rows: The same rows, on the host.
        """
        new = query.token.shape[1]
        if self.even and query.live is None and batch is None:
            placement = Placement(None, None, self.end, self.end + new, [count + new for count in self.counts])
            self._grow(placement.end)
        else:
            count = self.count if batch is None else self.count[batch]
            live = torch.ones_like(query.token, dtype=torch.bool) if query.live is None else query.live
            live = live.expand(len(count), new)
            counts, end = self._counted(query, live, rows)
            self._grow(end)
            slot = torch.where(live, count.unsqueeze(1) + live.cumsum(1) - 1, self.capacity)
            placement = Placement(batch, slot, 0, end, counts)
        self._write(query, placement)
        return placement

    def _write(self, query: Tags, placement: Placement) -> None:
        shape = placement.shape(len(self.count), query)
        placement.write(self.token, query.token.expand(shape))
        placement.write(self.trip, query.trip.expand(shape))
        super()._write(query, placement)

    def _counted(self, query: Tags, live: Tensor, rows: list[int] | None) -> tuple[list[int], int]:
        """Each sequence's number of slots after the pass is stored, and the end of the positions to read."""
        counts = list(self.counts)
        rows = list(range(len(counts))) if rows is None else rows
        living = query.living
        if query.live is None:
            living = [live.shape[1]] * len(rows)
        elif living is None or len(living) != len(rows):
            living = to_host(live.sum(1))
        for row, more in zip(rows, living, strict=True):
            counts[row] += more
        return counts, max(1, *(counts[row] for row in rows))

    def _grow(self, end: int) -> None:
        if end > self.capacity:
            self.resize(with_spare(end))

    def resize(self, capacity: int) -> None:
        """Resize the table to this number of slots for each sequence, plus one position for discarded slots."""
        self.capacity = capacity
        self.token, self.trip = grown(self.token, capacity, self.end, EMPTY), grown(self.trip, capacity, self.end)
        self.extra = {name: grown(tensor, capacity, self.end) for name, tensor in self.extra.items()}

    def note(self, query: Tags, placement: Placement, deepest: int) -> None:
        """See `Table.note`."""
        super().note(query, placement, deepest)
        self.padded = self.padded or (deepest == 0 and query.live is not None)
        if self.index.shape[1]:
            self._point(query, placement)

    def _point(self, query: Tags, placement: Placement) -> None:
        """Enter the new slots of a pass into the index from (iteration, token) to position."""
        rows, live = self._members(query, placement)
        if self.deepest >= self.index.shape[1]:
            more = (0, 0, 0, self.deepest + 1 - self.index.shape[1])
            self.index = torch.nn.functional.pad(self.index, more, value=EMPTY)
        new = placement.slot
        if new is None:
            new = torch.arange(placement.start, placement.end, device=rows.device)
        at = (rows.unsqueeze(1) * self.index.shape[1] + query.trip) * self.index.shape[2] + query.token
        new = torch.where(live, new, EMPTY)  # the maximum below ignores it
        self.index.view(-1).scatter_reduce_(0, at.expand_as(live).flatten(), new.flatten(), "amax")

    def _indexed(self) -> Tensor:
        """Build the index from (iteration, token) to the position of its slot."""
        trips, columns = self.deepest + 1, self.halt.shape[1]
        place = torch.arange(self.token.shape[1], device=self.token.device)
        at = torch.where(place < self.count.unsqueeze(1), self.trip * columns + self.token, trips * columns)
        index = self.token.new_full((len(self.count), trips * columns + 1), EMPTY)
        index.scatter_(1, at, place.expand_as(at))
        return index[:, :-1].unflatten(1, (trips, columns)).contiguous()

    def narrow(self, placement: Placement, query: Tags, trip: int, alone: bool) -> Placement:
        """Restrict a pass to gathering the positions that iteration `trip` may read, if that is cheaper than a mask.

        Args:
            placement: The placement of the pass.
            query: The slots of the pass.
            trip: Their iteration.
            alone: Whether the forward pass has one token per row; a single remaining one of several does not count.
        """
        found = self.halt.shape[1] * (1 if self.view is View.SAME else trip + 1)
        copied = placement.batch is not None
        if self.view is View.ALL or not gathering_pays(query.token.shape[1], found, placement.end, copied):
            return placement
        if not self.index.shape[1]:
            self.index = self._indexed()
            self._point(query, placement)
        index = self._rows(self.index[:, : trip + 1], placement)
        # A later trip of a token is stored behind the earlier ones, so the last trip up to this one has the largest
        # position.
        index = index.amax(1) if self.view is View.SAME else index.flatten(1)
        holes = self.padded or (trip > 0 and self.view is View.DUO)
        return replace(placement, seen=self._across(index, placement), found=index != EMPTY if holes else None)

    def commit(self, query: Tags, placement: Placement) -> None:
        """See `Table.commit`."""
        super().commit(query, placement)
        self.counts = placement.counts
        self.even = self.even and placement.slot is None

    def tags(self, placement: Placement) -> Tags:
        """The tags of the slots that a pass may read, including its own."""
        token, trip = placement.read(self.token), placement.read(self.trip)
        live = None
        if isinstance(placement.seen, Tensor):
            live = placement.found
        elif placement.slot is not None:
            count = self._rows(self.count, placement) + (placement.slot < self.capacity).sum(1)
            live = torch.arange(placement.end, device=token.device) < count.unsqueeze(1)
        halt = self._rows(self.halt, placement).gather(1, token.clamp(min=0))
        return Tags(token, trip, live, self._extra("bias", placement), self._extra("document", placement), halt)

    def crop(self, columns: int) -> Tensor:
        """Remove all tokens from a column on; returns the new order of the stored slots, `[B, capacity + 1]`."""
        within = torch.arange(self.token.shape[1], device=self.token.device) < self.count.unsqueeze(1)
        keep = within & (self.token < columns)
        order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
        self.token = self.token.gather(1, order).masked_fill(~keep.gather(1, order), EMPTY)
        self.trip = self.trip.gather(1, order)
        self.extra = {name: tensor.gather(1, order) for name, tensor in self.extra.items()}
        self.count = keep.sum(1)
        self.counts = to_host(self.count)
        self.halt, self.index = self.halt[:, :columns], self.index[:, :0]
        # At least 1 if there are columns, even if they are padding only, because an `end` of 0 means that nothing was
        # seen.
        self.columns, self.end = columns, max(*self.counts, min(columns, 1))
        return order

    def absorb(self, other: SlotTable) -> None:
        """Append another table's rows. All rows then end at the same column, as with left padding.

        The other table is consumed.
        """
        last = max(self.columns, other.columns)
        for table in (self, other):
            table._end_at(last)
        capacity = max(self.capacity, other.capacity)

        def joined(mine: Tensor, theirs: Tensor, fill: int = 0) -> Tensor:
            parts = ((mine, self.end), (theirs, other.end))
            return torch.cat([grown(x, capacity, end, fill) for x, end in parts])

        for name in {*self.extra, *other.extra}:
            like = self.extra.get(name, other.extra.get(name))
            assert like is not None
            mine, theirs = (t.extra.get(name, like.new_zeros(len(t.count), t.end)) for t in (self, other))
            self.extra[name] = joined(mine, theirs)
        self.token, self.trip = joined(self.token, other.token, EMPTY), joined(self.trip, other.trip)
        self.count, self.halt = torch.cat((self.count, other.count)), torch.cat((self.halt, other.halt))
        self.capacity, self.deepest = capacity, max(self.deepest, other.deepest)
        self.settle()

    def drop(self, row: int) -> None:
        """Remove a sequence from the table; the last sequence moves to its index."""
        self.each(lambda x: without(x, row))
        self.settle()

    def settle(self) -> None:
        """Update the table after sequences were added or removed: drop columns that are padding everywhere, and recount
        slots."""
        made = self.halt != EMPTY
        used, full = to_host(torch.stack([made.any(0), made.all(0)]))
        self.padded = used != full
        self._end_at(self.columns - used.index(True) if any(used) else self.columns)
        self.counts = to_host(self.count)
        self.end = max(self.counts)
        alike = [(x[:, : self.end] == x[:1, : self.end]).all() for x in (self.token, self.trip)]
        self.even = min(self.counts) == self.end and all(to_host(torch.stack(alike)))

    def _end_at(self, columns: int) -> None:
        """Change the number of columns by adding or removing some on the left, and renumber tokens accordingly."""
        by, self.index = columns - self.columns, self.halt.new_empty(len(self.halt), 0, 0)
        self.token = torch.where(self.token == EMPTY, EMPTY, self.token + by)
        self.halt = torch.nn.functional.pad(self.halt, (by, 0), value=EMPTY)  # negative padding crops
        self.columns = columns


def grown(buffer: Tensor, capacity: int, used: int, fill: int = 0, more: int = 0) -> Tensor:
    """A new buffer `[B + more, capacity + 1, ...]` that starts with the first `used` positions of the old one."""
    new = buffer.new_full((len(buffer) + more, capacity + 1, *buffer.shape[2:]), fill)
    new[: len(buffer), :used] = buffer[:, :used]
    return new


def without(rows: Tensor, row: int) -> Tensor:
    """Remove one row of a tensor; the last row moves to its index."""
    if row != len(rows) - 1:
        rows[row] = rows[-1]
    return rows[:-1]
