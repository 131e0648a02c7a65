"""The slot cache, which stores keys and values of each (token, iteration) pair, in one cache layer per model layer.

It serves recurrences whose iterations read one another or whose tokens halt. Keys and values of every slot that was
made are stored one after another in each row of the batch, so a token with three iterations takes three positions. A
static cache has a fixed position for every iteration of every token. All layers share a table of what is stored where.
`get_seq_length` counts tokens, because positions and masks of `generate` depend on it. Padding is never stored.
A cache that was filled by another model is refused (`with_slots`).

`slot_table.py` decides whether an iteration copies the slots that it reads, and `fixed_table.py` is the table of a
static cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from ..axes.roles import View
from .fixed_table import FixedTable
from .slot_table import Placement, SlotTable, grown, without


def _stored(which: int, words: str) -> property:
    """A property with a layer's keys or values in transformers' shape; the only value that transformers assigns to it
    is None."""

    def read(layer: SlotLayer) -> Tensor | None:
        return None if layer.stored is None else layer.stored[which][:, : layer.table.end].transpose(1, 2)

    def write(layer: SlotLayer, value: Tensor | None) -> None:
        assert value is None

    return property(read, write, doc=words)


class GrowingLayer(CacheLayerMixin):
    """A cache layer that grows without a maximum and keeps every token."""

    is_sliding = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of tokens to which a forward pass attends, and the position of the first."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length


class SlotLayer(GrowingLayer):
    """The cache of one layer of the model, with a position for each slot (token, iteration). The last position of the
    buffers takes discarded slots.

    transformers calls every layer of a cache in turn; the first layer acts for all layers of its `family`.

    Args:
        table: The table that all layers share.
        family: The layers of the cache, this one included.
    """

    is_croppable = True

    @property
    def is_compileable(self) -> bool:
        """Whether shapes never change."""
        return isinstance(self.table, FixedTable)

    def __init__(self, table: SlotTable | FixedTable, family: list[SlotLayer]) -> None:
        super().__init__()
        self.table, self.family = table, family
        self.stored: tuple[Tensor, Tensor] | None = None  # [B, capacity + 1, H_kv, D] each

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers; `[B, H_kv, T, D]` determines heads, width, dtype and device."""
        places = (len(self.table.count), self.table.capacity + 1)
        self.stored = tuple(  # type: ignore[assignment]
            states.new_zeros((*places, states.shape[1], states.shape[3])) for states in (key_states, value_states)
        )
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Raises a `TypeError`: storing needs the iteration of each token, which only the model's own code knows (see
        `exchange`)."""
        raise TypeError("only the model that made this cache can write to it")

    def exchange(self, placement: Placement, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of a pass, `[B', H_kv, M, D]`; returns the keys and values that the pass
        attends to."""
        if self.stored is None:
            self.lazy_initialization(*new)
        self.fit()
        assert self.stored is not None
        keys, values = self.stored
        placement.write(keys, new[0].transpose(1, 2))
        placement.write(values, new[1].transpose(1, 2))
        return placement.read(keys).transpose(1, 2), placement.read(values).transpose(1, 2)

    def fit(self) -> None:
        """Enlarge the buffers to the table's capacity. A layer outside a loop falls behind while other layers make
        iterations."""
        assert self.stored is not None
        places = self.stored[0].shape[1]
        if places <= self.table.capacity:
            keys, values = (grown(x, self.table.capacity, min(self.table.end, places - 1)) for x in self.stored)
            self.stored = keys, values

    keys = _stored(0, "What is stored, `[B, H_kv, slots, D]`; spare room is left out.")
    values = _stored(1, "As `keys`.")

    def get_seq_length(self) -> int:
        """The number of tokens (not slots) in the cache; a tensor if positions are fixed, as in transformers' static
        caches."""
        return self.table.columns  # type: ignore[return-value]

    @property
    def first(self) -> bool:
        """Whether this is the cache's first layer, which acts for all layers when transformers calls each in turn."""
        return self.family[0] is self

    def change(self, how: Callable[[Tensor], Tensor]) -> None:
        """Apply a function to the stored keys and values of all layers."""
        for layer in self.family:
            if layer.stored is not None:
                layer.fit()
                layer.stored = how(layer.stored[0]), how(layer.stored[1])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the batch's sequences for beam search, or keep only some."""
        if self.first:
            self.table.select(beam_idx)
            self.change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        count = self.table.count
        self.reorder_cache(torch.arange(len(count), device=count.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end; as in transformers, `tokens_to_remove` is their negative number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if not self.first or not tokens_to_remove or not self.table.columns:
            return
        if isinstance(self.table, FixedTable):
            self.table.crop((self.table.columns + tokens_to_remove).clamp(min=0))
        else:
            order = self.table.crop(max(0, self.table.columns + tokens_to_remove))[:, :, None, None]
            self.change(lambda x: x.gather(1, order.expand_as(x)))

    def reset(self) -> None:
        """Forget all slots."""
        if self.first:
            count = self.table.count
            empty_slots(self.family, len(count), count.device)


def empty_slots(layers: list[SlotLayer], rows: int, device: torch.device) -> None:
    """Empty all layers, and prepare them for this number of sequences."""
    table = layers[0].table.emptied(rows, device)
    for layer in layers:
        layer.table, layer.stored, layer.is_initialized = table, None, False


def with_slots(
    cache: Cache, layers: int, trips: int, view: View, rows: int, device: torch.device
) -> SlotTable | FixedTable:
    """Turn an empty cache into a slot cache for this number of sequences, in place; returns its table. Idempotent."""
    if cache.layers and isinstance(first := cache.layers[0], SlotLayer):
        if isinstance(first.table, FixedTable) and first.table.trips < trips:
            raise ValueError(f"this static cache has room for {first.table.trips} iterations of a token, not {trips}")
        if first.stored is None and (len(first.table.count), first.table.count.device) != (rows, device):
            empty_slots(first.family, rows, device)
        return first.table
    for layer in cache.layers:
        own = type(layer).__module__ != DynamicLayer.__module__  # such a layer stores in a form of its own
        if not isinstance(layer, DynamicLayer | StaticLayer) or hasattr(layer, "_quantize") or own:
            raise ValueError(
                f"this model cannot store its keys in a {type(layer).__name__}: use a dynamic or static cache"
            )
        if layer.is_initialized and int(layer.get_seq_length()) > 0:
            raise ValueError("this cache was filled by another model; start from an empty cache")
    if getattr(cache, "offloading", False):
        raise ValueError("the cache of this recurrence cannot be offloaded")
    # A layer with a window reports the window's width, not the cache's length; without other layers the slots grow.
    whole = [layer for layer in cache.layers if not isinstance(layer, StaticSlidingWindowLayer)]
    static = [layer.max_cache_len for layer in whole if isinstance(layer, StaticLayer)]
    table = FixedTable(max(static), trips, rows, view, device) if static else SlotTable(rows, view, device)
    family: list[SlotLayer] = []
    family.extend(SlotLayer(table, family) for _ in range(layers))
    cache.layers = family
    cache.layer_class_to_replicate = None
    return table


def repeat_last(cache: Cache, token: Tensor) -> None:
    """For view SAME in a static cache: copy each token's last iteration into the positions of iterations that it did
    not make."""
    rows = torch.arange(len(token), device=token.device).unsqueeze(1)
    to, of = cache.layers[0].table.repeats(rows, token)
    for layer in cache.layers:
        for stored in layer.stored:
            stored[rows, to] = stored[rows, of]


def merge_slots(cache: Cache, other: Cache) -> None:
    """Append the sequences of another slot cache to this one; the other cache must not be used afterwards."""
    mine, theirs = cache.layers[0].table, other.layers[0].table
    capacity = max(mine.capacity, theirs.capacity)
    for layer, added in zip(cache.layers, other.layers, strict=True):
        layer.fit()
        added.fit()
        for i, new in enumerate(added.stored):  # one after the other, so that at most one tensor exists twice
            stored = list(layer.stored)
            stored[i] = grown(stored[i], capacity, mine.end, more=len(new))
            stored[i][-len(new) :, : theirs.end] = new[:, : theirs.end]
            layer.stored = tuple(stored)
        added.stored = None
    mine.absorb(theirs)


def drop_row(cache: Cache, row: int) -> None:
    """Remove a sequence from a slot cache that holds several; the last sequence moves to its index.

    Only the last row is copied. The memory of a row is freed when others are merged, or by `trim_slots`.
    """
    cache.layers[0].change(lambda x: without(x, row))
    cache.layers[0].table.drop(row)


def trim_slots(cache: Cache, capacity: int) -> None:
    """Free the memory of removed sequences, and of positions beyond `capacity` that no sequence uses."""
    table, first = cache.layers[0].table, cache.layers[0]
    capacity = max(table.end, min(capacity, table.capacity))
    if capacity == table.capacity and first.stored[0].untyped_storage().nbytes() == first.stored[0].nbytes:
        return
    for layer in cache.layers:
        layer.fit()
        for i in range(2):  # so that at most one tensor exists twice
            stored = list(layer.stored)
            stored[i] = grown(stored[i], capacity, table.end)
            layer.stored = tuple(stored)
    table.resize(capacity)
