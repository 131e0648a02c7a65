"""The cache layer that all compression methods share.

Keys have *virtual absolute* positions: with T tokens seen and p entries held, entry s has position s + T − p. For new
keys this is the true position, by which the model rotated them. So models and `generate` need no change, and distances
stay below N.

In half precision a key that is rotated again at each compression wears down: after 200 of them it is 6 % off in bf16.
So after the first compression keys are stored without their rotation, and rotated when they are read.

`method.py` compresses, `schedule.py` decides when, and `rope.py` rotates. Static memories (`static.py`) store keys
rotated, quantised ones (`quantized.py`) without their rotation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from fathom.models.axes.numerics import widen

from .method import Held, Method
from .rope import Still, Turn
from .schedule import LARGEST_MASK, UNTOUCHED, Once, Schedule
from .states import State

GUESSES = (
    "assisted and speculative decoding take tokens back, which this cache cannot: call generate without "
    "assistant_model and prompt_lookup_num_tokens, or use method 'full'"
)


class Memory(CacheLayerMixin):
    """The keys and values of one layer: at most N entries, however many tokens were seen."""

    is_sliding = False
    bares = True
    """Whether keys in half precision are stored without their rotation."""
    keys: Tensor
    values: Tensor

    def __init__(self, method: Method, layer: int = 0) -> None:
        super().__init__()
        self.method, self.layer = method, layer
        self.state: State | None = None
        """What a layer that also mixes tokens by a state keeps beside its entries."""
        self._forget()

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that only the recurrent state has: before 5.21, transformers' Falcon-H1 takes its state
        tensors from the layer itself."""
        state = self.__dict__.get("state")
        if state is not None and not name.startswith("__"):
            return getattr(state, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def schedule(self) -> Schedule:
        """The method's schedule."""
        return self.method.schedule

    @property
    def entries(self) -> int:
        """The number of stored entries, at most the window."""
        return self.schedule.entries(self.seen)

    @property
    def compressions(self) -> int:
        """Compressions so far."""
        return self.schedule.compressions(self.seen)

    def cuts(self, length: int) -> list[int]:
        """The lengths of the chunks into which the next `length` tokens are split.

        None crosses a compression, and no mask is large: a first chunk needs none, later ones have few tokens.
        """
        keys = max(1, min(self.schedule.window, self.seen + length))
        chunks, most = self.schedule.cuts(self.seen, length), max(1, LARGEST_MASK // keys)
        first = chunks[:1] if self.seen == 0 else []
        later = (range(0, chunk, most) for chunk in chunks[len(first) :])
        return first + [min(most, steps.stop - at) for steps in later for at in steps]

    @property
    def rotation(self) -> Still:
        """The rotation of this layer's keys."""
        return self.method.rope.plan[self.layer]

    def _forget(self) -> None:
        self.seen = 0
        self.first: Tensor | None = None  # the sinks' keys before any compression, if keys are stored rotated
        self.queries: Tensor | None = None
        self.full = False  # N entries that wait for the queries of the last token
        self.bare = False  # whether the stored keys are without their rotation

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with no entries."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """The number of tokens seen, which is also the position of the next token."""
        return self.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that `update` will return for `query_length` new tokens, and the position of the first
        key."""
        self.schedule.fit(self.seen, query_length)
        held = self.found(query_length)
        return held + query_length, self.seen - held

    def found(self, query_length: int) -> int:
        """The number of entries that are stored when the next tokens arrive, after any compression that they cause."""
        return self.schedule.survivors if self._is_due(query_length) else self.entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Compress if compression is due, append rotated keys and values `[B, H_kv, q, D]`, and return all keys and
        values.

        With an eager schedule, N entries are returned for attention to read, and what is stored is compressed.
        """
        length = key_states.shape[2]
        self.schedule.fit(self.seen, length)
        self._admit(key_states, value_states)
        if self._is_due(length) or self.full:
            self._compress()
        made = self.compressions
        self.seen += length
        keys, values = self._append(key_states, value_states)
        self.full = self.schedule.eager and self.compressions > made
        if self.method.observed:
            keys = keys.view_as(keys)  # a view, since the stored tensor must not refer back to the memory
            keys.memory = self  # type: ignore[attr-defined]  # for the attention function, see observe.py
        elif self.full:
            self._compress()
        return keys, values

    def _admit(self, keys: Tensor, values: Tensor) -> None:
        """Initialise with the first tokens, and refuse another batch size afterwards."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if len(keys) != len(self.keys):
            raise ValueError(
                f"the cache holds {len(self.keys)} sequences, the input has {len(keys)}: for beam search, call "
                "cache.batch_repeat_interleave(num_beams) between prefill and generate"
            )

    def take(self, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """Compress a whole prompt that was read into another cache, given its keys and values and what the method needs
        of its queries."""
        self.lazy_initialization(keys, values)
        self.seen, self.queries = keys.shape[2], queries
        self.full = self.schedule.eager
        self._append(keys, values)
        self._compress()

    def observe(self, queries: Tensor, module: nn.Module | None = None) -> None:
        """Pass the queries `[B, H, q, D]` of the last tokens, and their attention module, to the method if it needs
        them."""
        if self.schedule.ended(self.seen) and not self.full:
            return
        start = (self.schedule.window if self.full else self.entries) - queries.shape[2]
        self.queries = self.method.note(self.queries, queries.detach(), start, self.rotation).clone()
        if self.full:
            self._compress(module)

    def _is_due(self, length: int) -> bool:
        return not self.schedule.eager and length > 0 and self.schedule.compressions(self.seen + 1) > self.compressions

    @property
    def wears(self) -> bool:
        """Whether keys in half precision would lose accuracy by being rotated again at each further compression."""
        rotates = self.bares and self.method.moves and isinstance(self.rotation, Turn) and self.dtype.itemsize <= 2
        return rotates and not self.schedule.ended(self.seen)

    def _compress(self, module: nn.Module | None = None) -> None:
        keys, values = self._compressed(*self._read(), module)
        self.bare = self.wears
        self._replace(keys, values)
        self.queries, self.full = None, False

    def _compressed(self, keys: Tensor, values: Tensor, module: nn.Module | None = None) -> tuple[Tensor, Tensor]:
        made, first = self.compressions - self.full, self.first
        if first is None:
            sinks = keys[:, :, : self.schedule.sinks]  # copied, since a view would keep the whole window in memory
            first = self.rotation.turn(sinks, -self.method.moved(made), 0) if self.bare else sinks.clone()
        self.first = None if self.wears or self.schedule.ended(self.seen) else first
        return self.method.compress(Held(keys, values, self.queries, self.rotation, module), first, made)

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        return self._rotated(self.dtype), self.values

    def _rotated(self, dtype: torch.dtype) -> Tensor:
        """The keys rotated as attention sees them, `[B, H_kv, p, D]`; keys that survived a compression are stored
        unrotated."""
        if not self.bare:
            return self.keys
        keys, left = self.keys.to(dtype), self.schedule.survivors
        placed = self.rotation.place(keys[:, :, :left], self.seen - keys.shape[2])
        return torch.cat([placed, keys[:, :, left:]], dim=2)

    def _read(self) -> tuple[Tensor, Tensor]:
        return self._rotated(torch.promote_types(self.dtype, torch.float32)), self.values

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        if self.bare:
            old, new = keys.tensor_split([self.schedule.survivors], dim=2)
            old = self.rotation.turn(widen(old), keys.shape[2] - self.seen, -1)
            keys = torch.cat([old, new], dim=2).to(self.dtype)
        self.keys, self.values = keys, values

    def reset(self) -> None:
        """Forget all entries."""
        self.keys = self.values = None  # type: ignore[assignment]  # as transformers has it before the first update
        self.is_initialized = False
        if self.state is not None:
            self.state.reset()
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: sequence i of the batch is replaced by sequence `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        if self.is_initialized:  # also before its first token, which comes later in a sequence with more padding
            self._each_row(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.is_initialized:
            self._each_row(lambda x: x.repeat_interleave(repeats, dim=0))

    def _each_row(self, change: Callable[[Tensor], Tensor]) -> None:
        self._replace(*map(change, self._read()))
        self.first = None if self.first is None else change(self.first)
        self.queries = None if self.queries is None else change(self.queries)
        if self.state is not None:
            self.state.each(change)

    @property
    def adds(self) -> bool:
        """Whether tokens after the prompt are stored uncompressed, so that they can be removed again."""
        return type(self) is Memory and self.state is None and isinstance(self.schedule, Once)

    @property
    def is_croppable(self) -> bool:
        """Whether guesses can be removed again; transformers 5.24 asks after the prompt."""
        return self.adds

    @property
    def prompt(self) -> int | float:
        """The number of tokens after which no compression follows: infinity in a cache that is compressed again and
        again."""
        if not isinstance(self.schedule, Once):
            return math.inf
        return 0 if self.schedule.window == UNTOUCHED else self.schedule.window

    def gives_back(self, count: int) -> bool:
        """Whether the last `count` tokens can be removed, because no compression has read them."""
        return self.adds and self.seen - count >= self.prompt

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, which is possible after a prompt that is compressed once; `tokens_to_remove` is
        negative."""
        if tokens_to_remove > 0:  # once a cache's new length: taking it for a number of tokens would lose others
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        count = -tokens_to_remove
        if count and not self.gives_back(count):
            raise NotImplementedError(
                "a compressed cache cannot remove tokens: reset() it and prefill the shorter text, or keep a branch() "
                "of the cache from before the tokens that may have to be removed"
            )
        if count:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        self.keys, self.values, self.seen = self.keys[:, :, :-count], self.values[:, :, :-count], self.seen - count

    def activate_past_recording(self) -> None:
        """Raise `NotImplementedError` if assisted decoding would have to undo tokens that the cache cannot undo."""
        if not self.adds:
            raise NotImplementedError(GUESSES)

    def branch(self) -> Memory:
        """An independent copy of this memory, to continue from. Tensors are shared, because none is changed in
        place."""
        new = copy.copy(self)
        new.state = None if self.state is None else self.state.branch()
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> Memory:
        memo[id(self.method)] = self.method  # one matrix for all layers, including copies
        memo[id(self)] = new = copy.copy(self)
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new
