"""The table of a slot cache: the token and trip of each stored place, and which places a trip reads.

One table serves all layers. A table grows, its slots one after another in each row of the batch, padding left out; or
it is fixed, with a place for every trip of every token, so that shapes never change and decoding can be compiled.

Under SAME and DUO a trip reads some of the slots only. It finds them by an index of the places, `[B, trip, token]`, and
copies them out, or reads every place under a mask: `gathering_pays` says which. At fixed places under DUO and ALL those
of trips that were not made are masked; under SAME they repeat what the token's last trip left, so that a trip reads its
own places as they stand, every so many in the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .host import to_host
from .roles import View

SPARE = 8
"""A full buffer grows by 1/SPARE of its size."""
EMPTY = -1
"""Sentinel for unused positions: the token and the last trip of no slot, and its place."""
COPYING = 1.5
"""What copying the keys and values of a place costs, in readings of it by one query. Measured on CPUs; on a GPU, whose
time is bytes, a copy that does not stay in its cache is a reading and a writing: 2."""


def with_spare(places: int) -> int:
    """So many and, as full buffers grow, 1/SPARE more."""
    return places + places // SPARE


def gathering_pays(queries: int, found: int, stored: int, copied: bool) -> bool:
    """Whether to copy out the slots that a pass reads, in place of reading all that are stored under a mask.

    One query reads as fast as memory gives, so that about 2.5 places must be stored for each that is read; the many of
    a prompt read for longer than it takes to copy.

    Args:
        queries: Slots of each row that read.
        found: Places of each row that they read.
        stored: Places of each row in all.
        copied: Whether reading all copies them too, as it does for some rows of the batch.
    """
    return (queries + COPYING) * found < (queries + COPYING * copied) * stored


@dataclass
class Tags:
    """The slots along an axis of queries or keys; every tensor is `[B, N]`, or `[1, N]` where rows agree."""

    token: Tensor
    """The token's column, counted from the first token that the cache saw."""
    trip: Tensor
    live: Tensor | None = None
    """False where there is nothing to read."""
    bias: Tensor | None = None
    """Added to the logit of every query that reads the slot."""
    document: Tensor | None = None
    """Slots of other documents are not read."""
    halt: Tensor | None = None
    """The last trip that the slot's token made."""
    living: list[int] | None = None
    """How many slots of each row are live; None where the host does not know it."""


@dataclass
class Placement:
    """Where the slots of one pass go."""

    batch: Tensor | None
    """Rows of the batch, `[B']`; None for all."""
    slot: Tensor | None
    """Places, `[B', M]`; None if all rows continue at `start`. Slots not to be kept go to the last place."""
    start: int
    end: int
    """The pass reads the places before this one."""
    counts: list[int] | None = None
    """Slots of each row once these are stored; None where the host does not know it."""
    seen: Tensor | slice | None = None
    """The places that the pass reads: a range, or `[B', N]`, counted over all rows; None for all before `end`."""
    found: Tensor | None = None
    """False where `seen` only fills a rectangle, `[B', N]`; None where it never does."""

    def shape(self, rows: int, query: Tags) -> tuple[int, int]:
        """B' and M, of a table of `rows` rows."""
        known = self.batch if self.batch is not None else self.slot
        return rows if known is None else len(known), query.token.shape[1]

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Put `[B', M, ...]` into `[B, capacity, ...]`."""
        if self.slot is None:
            buffer[:, self.start : self.end] = new
        else:
            rows = torch.arange(len(self.slot), device=buffer.device) if self.batch is None else self.batch
            buffer[rows.unsqueeze(1), self.slot] = new.to(buffer.dtype)

    def read(self, buffer: Tensor) -> Tensor:
        """The part of a buffer that the pass reads, `[B', N, ...]`."""
        if isinstance(self.seen, Tensor):
            # By one axis: half the time of an index for rows and one for places.
            return buffer.flatten(0, 1).index_select(0, self.seen.flatten()).unflatten(0, self.seen.shape)
        places = slice(self.end) if self.seen is None else self.seen
        if self.batch is not None:
            return buffer[self.batch, places]
        return buffer[:, places] if self.slot is None else buffer[: len(self.slot), places]


class SlotTable:
    """Token, trip and bias of every stored slot, and how far each row is filled."""

    whole = False
    """Whether a pass leaves no token out while another goes on, so that its shapes stay."""

    def __init__(self, capacity: int = 0, view: View = View.ALL) -> None:
        self.capacity, self.view = capacity, view
        self.columns: int | Tensor = 0
        """Tokens seen, padding included; a tensor where places are fixed."""
        self.deepest = 0
        """The latest trip that any token made."""
        self.even = True
        """Whether all rows hold the same slots, so that no place has to be masked."""
        self.padded = False
        """Whether some columns of some rows may be padding."""
        self.end = 0
        self.count: Tensor | None = None  # [B]
        self.counts: list[int] | None = None
        """`count` on the host; None where it is not known."""
        self.halt: Tensor | None = None  # [B, columns]
        self.token = self.trip = self.bias = self.document = None
        self.index: Tensor | None = None
        """Where each slot stands, `[B, trip, column]`, or `EMPTY`; None until a pass wants to know."""
        self.order: Tensor | None = None
        """How the last `crop` moved the slots, for the layers to follow."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that belongs to a row of the batch, by name."""
        names = ("count", "halt", "token", "trip", "bias", "document", "index")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def select(self, rows: Tensor) -> None:
        """Reorder, repeat or drop rows of the batch."""
        self.counts = None
        for name, tensor in self.tensors().items():
            setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    def open(self, batch: int, columns: int | Tensor, device: torch.device) -> None:
        """Make room for tokens that are about to be seen."""
        assert isinstance(columns, int)
        if self.count is None:
            self.count, self.counts = torch.zeros(batch, dtype=torch.long, device=device), [0] * batch
            self.halt = torch.full((batch, 0), EMPTY, dtype=torch.long, device=device)
        assert self.halt is not None
        more = (0, columns - self.halt.shape[1])
        self.halt = torch.nn.functional.pad(self.halt, more, value=EMPTY)
        if self.index is not None:
            self.index = torch.nn.functional.pad(self.index, more, value=EMPTY)

    def place(self, query: Tags, batch: Tensor | None, rows: list[int] | None = None) -> Placement:
        """Where the slots of a pass go; nothing is kept until `commit`.

        Args:
            query: The slots.
            batch: Their rows of the batch, `[B']`; None for all.
            rows: The same on the host.
        """
        assert self.count is not None
        new = query.token.shape[1]
        if self.even and query.live is None and batch is None:
            counts = None if self.counts is None else [count + new for count in self.counts]
            placement = Placement(None, None, self.end, self.end + new, counts)
            self._grow(placement.end)
        else:
            count = self.count if batch is None else self.count[batch]
            live = torch.ones_like(query.token, dtype=torch.bool) if query.live is None else query.live
            live = live.expand(len(count), new)
            counts, end = self._counted(query, live, rows)
            self._grow(end)
            slot = torch.where(live, count.unsqueeze(1) + live.cumsum(1) - 1, self.capacity)
            placement = Placement(batch, slot, 0, end, counts)
        self._write(query, placement, ("token", "trip", "bias", "document"))
        return placement

    def _write(self, query: Tags, placement: Placement, names: Sequence[str]) -> None:
        """Keep some of the tags of a pass' slots."""
        assert self.count is not None
        shape = placement.shape(len(self.count), query)
        for name in names:
            value = getattr(query, name)
            if value is None and getattr(self, name) is None:
                continue
            if getattr(self, name) is None:
                fill = EMPTY if name == "token" else 0
                setattr(self, name, value.new_full((len(self.count), self.capacity + 1), fill))
            buffer = getattr(self, name)
            value = buffer.new_zeros(shape) if value is None else value.expand(shape)
            placement.write(buffer, value)

    def _counted(self, query: Tags, live: Tensor, rows: list[int] | None) -> tuple[list[int], int]:
        """Slots of each row once these are kept, and where reading ends; reads from the device what is not known."""
        assert self.count is not None
        counts = list(self.counts) if self.counts is not None else to_host(self.count)
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
        if self.token is not None and end <= self.token.shape[1] - 1:
            return
        self.resize(max(self.capacity, with_spare(end)))

    def resize(self, capacity: int) -> None:
        """Give every row room for so many slots, and a place for what is thrown away."""
        self.capacity = capacity
        for name in ("token", "trip", "bias", "document"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, grown(tensor, capacity, self.end, EMPTY if name == "token" else 0))

    def note(self, query: Tags, placement: Placement, deepest: int) -> None:
        """Record the trips that the tokens of a pass have made; `deepest` is the latest trip in it."""
        assert self.halt is not None
        rows, live = self._members(query, placement)
        place = (rows.unsqueeze(1) * self.halt.shape[1] + query.token).expand_as(live)
        trip = torch.where(live, query.trip, EMPTY)  # the maximum below ignores it
        self.halt.view(-1).scatter_reduce_(0, place.flatten(), trip.flatten(), "amax")
        self.deepest = max(self.deepest, deepest)
        self.padded = self.padded or (deepest == 0 and query.live is not None)
        if self.index is not None:
            self._point(query, placement)

    def _point(self, query: Tags, placement: Placement) -> None:
        """Add the slots of a pass to the index."""
        assert self.index is not None
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
        """An index of the slots that are counted."""
        assert self.count is not None and self.halt is not None and self.token is not None and self.trip is not None
        trips, columns = self.deepest + 1, self.halt.shape[1]
        place = torch.arange(self.token.shape[1], device=self.token.device)
        at = torch.where(place < self.count.unsqueeze(1), self.trip * columns + self.token, trips * columns)
        index = self.token.new_full((len(self.count), trips * columns + 1), EMPTY)
        index.scatter_(1, at, place.expand_as(at))
        return index[:, :-1].unflatten(1, (trips, columns)).contiguous()

    def narrow(self, placement: Placement, query: Tags, trip: int, alone: bool) -> Placement:
        """The same placement, without the places that a pass of `trip` cannot see, if copying the others pays.

        Args:
            placement: The pass'.
            query: Its slots.
            trip: Their trip.
            alone: Whether the call has one token of each row; one that is left of several does not count.
        """
        assert self.halt is not None
        found = self.halt.shape[1] * (1 if self.view is View.SAME else trip + 1)
        copied = placement.batch is not None
        if self.view is View.ALL or not gathering_pays(query.token.shape[1], found, placement.end, copied):
            return placement
        if self.index is None:
            self.index = self._indexed()
            self._point(query, placement)
        index = self.index[:, : trip + 1]
        if placement.batch is not None:
            index = index[placement.batch]
        # A later trip of a token stands behind the earlier ones, so that the last up to this one has the largest place.
        index = index.amax(1) if self.view is View.SAME else index.flatten(1)
        holes = self.padded or (trip > 0 and self.view is View.DUO)
        return replace(placement, seen=self._across(index, placement), found=index != EMPTY if holes else None)

    def _across(self, place: Tensor, placement: Placement) -> Tensor:
        """Places `[B', N]` of a pass' rows, counted over all rows."""
        rows = torch.arange(len(place), device=place.device) if placement.batch is None else placement.batch
        return place.clamp(min=0) + rows.unsqueeze(1) * (self.capacity + 1)

    def commit(self, query: Tags, placement: Placement) -> None:
        """Count the slots that a pass has written."""
        assert self.count is not None
        rows, live = self._members(query, placement)
        self.count.index_add_(0, rows, live.sum(1))
        self.counts = placement.counts
        self.end = max(self.end, placement.end)
        self.even = self.even and placement.slot is None

    def _members(self, query: Tags, placement: Placement) -> tuple[Tensor, Tensor]:
        """Rows of the batch `[B']`, and which slots of theirs are kept `[B', M]`."""
        assert self.count is not None
        shape = placement.shape(len(self.count), query)
        rows = torch.arange(shape[0], device=self.count.device) if placement.batch is None else placement.batch
        live = torch.ones((), dtype=torch.bool, device=rows.device) if query.live is None else query.live
        return rows, live.expand(shape)

    def tags(self, placement: Placement) -> Tags:
        """The slots that a pass can see, its own included."""
        assert self.count is not None and self.halt is not None and self.token is not None and self.trip is not None
        token, trip = placement.read(self.token), placement.read(self.trip)
        batch, live = placement.batch, None
        if isinstance(placement.seen, Tensor):
            live = placement.found
        elif placement.slot is not None:
            count = (self.count if batch is None else self.count[batch]) + (placement.slot < self.capacity).sum(1)
            live = torch.arange(placement.end, device=token.device) < count.unsqueeze(1)
        return Tags(
            token,
            trip,
            live,
            None if self.bias is None else placement.read(self.bias),
            None if self.document is None else placement.read(self.document),
            (self.halt if batch is None else self.halt[batch]).gather(1, token.clamp(min=0)),
        )

    def crop(self, columns: int | Tensor) -> None:
        """Forget the tokens from a column on."""
        assert isinstance(columns, int)
        assert self.count is not None and self.halt is not None and self.token is not None
        within = torch.arange(self.token.shape[1], device=self.token.device) < self.count.unsqueeze(1)
        keep = within & (self.token < columns)
        order = (~keep).to(torch.int8).argsort(dim=1, stable=True)
        for name in ("token", "trip", "bias", "document"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, tensor.gather(1, order))
        self.token = self.token.masked_fill(~keep.gather(1, order), EMPTY)
        self.count = keep.sum(1)
        self.counts = to_host(self.count)
        self.halt, self.index = self.halt[:, :columns], None
        # At least 1 as long as there are columns, if only of padding: an `end` of 0 means that nothing was seen.
        self.columns, self.end, self.order = columns, max(*self.counts, min(columns, 1)), order

    def absorb(self, other: SlotTable) -> None:
        """Take in another table's rows below these. All rows then end at one column, as padding on the left would do.

        The other table is used up.
        """
        assert self.count is not None and other.count is not None and self.halt is not None
        assert other.halt is not None and self.token is not None and other.token is not None
        mine, theirs = len(self.count), len(other.count)
        for table in (self, other):
            table._end_at(max(self.columns, other.columns))
        capacity = max(self.capacity, other.capacity)
        for name in ("token", "trip", "bias", "document"):
            fill, pair = EMPTY if name == "token" else 0, (getattr(self, name), getattr(other, name))
            like = next((x for x in pair if x is not None), None)
            if like is None:
                continue
            rows = (mine, self.end), (theirs, other.end)
            parts = [
                grown(like.new_full((n, end + 1), fill) if x is None else x, capacity, end, fill)
                for x, (n, end) in zip(pair, rows, strict=True)
            ]
            setattr(self, name, torch.cat(parts))
        self.count, self.halt = torch.cat((self.count, other.count)), torch.cat((self.halt, other.halt))
        self.capacity, self.deepest = capacity, max(self.deepest, other.deepest)
        self.settle()

    def clear(self) -> None:
        """Forget everything."""
        self.__init__(view=self.view)  # type: ignore[misc]

    def settle(self) -> None:
        """After rows came or went: drop columns that are padding in every row, and recount the slots of each."""
        assert self.count is not None and self.halt is not None and self.token is not None and self.trip is not None
        made = self.halt != EMPTY
        used, full = to_host(torch.stack([made.any(0), made.all(0)]))
        self.padded = used != full
        self._end_at(self.columns - used.index(True) if any(used) else self.columns)
        self.counts = to_host(self.count)
        self.end = max(self.counts)
        alike = [(x[:, : self.end] == x[:1, : self.end]).all() for x in (self.token, self.trip)]
        self.even = min(self.counts) == self.end and all(to_host(torch.stack(alike)))

    def _end_at(self, columns: int) -> None:
        """Renumber columns so that there are `columns` of them, ending where they ended."""
        assert self.token is not None and self.halt is not None
        by, self.index = columns - self.columns, None
        self.token = torch.where(self.token == EMPTY, EMPTY, self.token + by)
        self.halt = torch.nn.functional.pad(self.halt, (by, 0), value=EMPTY)  # a negative pad crops
        self.columns = columns


class FixedTable(SlotTable):
    """A table of fixed places: that of trip k of token t is t · trips + k, whether it was made or not.

    Under SAME the places of trips that were not made hold what the token's last one left, once a call is over.

    A pass may be of the first rows alone, if `columns` says of each of them how many tokens it has, `[B', 1]`.
    """

    def __init__(self, tokens: int, trips: int, view: View = View.ALL) -> None:
        super().__init__(tokens * trips, view)
        self.tokens, self.trips, self.even, self.deepest = tokens, trips, False, trips - 1

    def open(self, batch: int, columns: int | Tensor, device: torch.device) -> None:
        """Make the table if there is none; refuse more tokens than it has room for."""
        if self.count is None:
            self.count = torch.zeros(batch, dtype=torch.long, device=device)
            self.halt = torch.full((batch, self.tokens), EMPTY, dtype=torch.long, device=device)
            self.columns = torch.zeros((), dtype=torch.long, device=device)
        if not torch.compiler.is_compiling() and max(to_host(torch.as_tensor(columns).flatten())) > self.tokens:
            raise ValueError(f"a static cache has room for {self.tokens} tokens of this model, no more")

    def place(self, query: Tags, batch: Tensor | None, rows: list[int] | None = None) -> Placement:
        """As `SlotTable.place`."""
        assert self.count is not None and isinstance(self.columns, Tensor)
        slot = query.token * self.trips + query.trip
        if query.live is not None:
            slot = torch.where(query.live, slot, self.capacity)
        if self.columns.ndim == 0:  # all rows take part, and may agree
            slot = slot.expand(len(self.count) if batch is None else len(batch), -1)
        placement = Placement(batch, slot, 0, self.end or self.capacity)
        self._write(query, placement, ("bias",))
        return placement

    def narrow(self, placement: Placement, query: Tags, trip: int, alone: bool) -> Placement:
        """As `SlotTable.narrow`. Copied are only the tokens of a longer call under SAME: it has yet to end."""
        assert self.halt is not None
        if self.view is not View.SAME:
            return placement
        seen: Tensor | slice = slice(trip, placement.end, self.trips)
        if not alone:
            last = self._rows(self.halt, placement)[:, : placement.end // self.trips].clamp(min=0, max=trip)
            seen = self._across(torch.arange(last.shape[1], device=last.device) * self.trips + last, placement)
        return replace(placement, seen=seen)

    def tags(self, placement: Placement) -> Tags:
        """As `SlotTable.tags`; live are the trips up to each token's last, and what the pass itself stores."""
        assert self.halt is not None and placement.slot is not None
        if isinstance(placement.seen, Tensor):
            place = placement.seen % (self.capacity + 1)
        else:
            places = torch.arange(placement.end, device=self.halt.device).unsqueeze(0)
            place = places if placement.seen is None else places[:, placement.seen]
        token, trip = place // self.trips, place % self.trips
        halt = self._rows(self.halt, placement)
        halt = halt.gather(1, token.expand(len(halt), -1))  # [B', N]
        if placement.seen is None:
            own = placement.slot.clamp(max=placement.end)  # what is thrown away goes behind all that is read
            live = torch.nn.functional.pad(trip <= halt, (0, 1)).scatter(1, own, True)[:, :-1]
        else:
            live = halt != EMPTY
        return Tags(token, trip, live, None if self.bias is None else placement.read(self.bias), None, halt)

    @staticmethod
    def _rows(x: Tensor, placement: Placement) -> Tensor:
        """The rows of a pass."""
        assert placement.slot is not None
        return x[: len(placement.slot)] if placement.batch is None else x[placement.batch]

    def repeats(self, rows: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """The places of trips after the first of the tokens in some columns, `[B, M]`, of rows `[B, 1]`, and what each
        repeats: its own trip, or the token's last. Both are `[B, (trips - 1) M]`."""
        assert self.halt is not None
        trip = torch.arange(1, self.trips, device=token.device).unsqueeze(1)
        last = self.halt[rows, token].clamp(min=0).unsqueeze(1)  # [B', 1, M]
        token = token.unsqueeze(1)
        places = (token * self.trips + each for each in (trip, torch.minimum(trip, last)))
        to, of = (place.flatten(1) for place in places)
        return to, of

    def crop(self, columns: int | Tensor) -> None:
        """As `SlotTable.crop`; nothing moves."""
        assert self.halt is not None
        columns = torch.as_tensor(columns, device=self.halt.device)
        later = torch.arange(self.tokens, device=self.halt.device) >= columns
        self.halt = self.halt.masked_fill(later, EMPTY)
        self.count, self.columns = (self.halt + 1).sum(1), columns.clone()

    def clear(self) -> None:
        """As `SlotTable.clear`."""
        self.__init__(self.tokens, self.trips, self.view)  # type: ignore[misc]

    def take(self, first: int, other: SlotTable) -> tuple[Tensor, Tensor]:
        """Copy the rows of a growing table over those from `first` on, each moved to begin at column 0.

        Returns where their slots go: rows `[n, 1]` and places `[n, end]`.
        """
        assert self.halt is not None and self.count is not None and other.halt is not None and other.count is not None
        assert other.token is not None and other.trip is not None
        device, made = self.halt.device, other.halt != EMPTY  # [n, columns]
        rows = torch.arange(first, first + len(made), device=device).unsqueeze(1)
        begins = made.to(torch.int8).argmax(1, keepdim=True)
        column = torch.arange(made.shape[1], device=device) - begins
        halt = torch.full((len(made), self.tokens + 1), EMPTY, dtype=torch.long, device=device)
        halt.scatter_(1, torch.where(column < 0, self.tokens, column), other.halt)
        self.halt[rows[:, 0]], self.count[rows[:, 0]] = halt[:, :-1], other.count
        within = torch.arange(other.end, device=device) < other.count.unsqueeze(1)
        place = (other.token[:, : other.end] - begins) * self.trips + other.trip[:, : other.end]
        place = torch.where(within, place, self.capacity)
        if other.bias is not None:
            if self.bias is None:
                self.bias = other.bias.new_zeros(len(self.count), self.capacity + 1)
            self.bias[rows, place] = other.bias[:, : other.end]
        return rows, place


def grown(buffer: Tensor, capacity: int, used: int, fill: int = 0, more: int = 0) -> Tensor:
    """A new buffer `[B + more, capacity + 1, ...]` with the first `used` places of the old one."""
    new = buffer.new_full((len(buffer) + more, capacity + 1, *buffer.shape[2:]), fill)
    new[: len(buffer), :used] = buffer[:, :used]
    return new
