"""Memories in fixed buffers of N entries, so that decoding can be compiled: one graph for any number of tokens and
compressions. The number of entries p is:

    p = T                          while T < N           entries that the next token finds, after T tokens,
      = S + L + (T − N) mod F      after it              and where its own is written

No shape and no number in the graph depends on T, which is a tensor. The compressions themselves are one operator at the
start of the graph, `make_room`, which does nothing at most tokens; it runs the method's own code, uncompiled.

With a static cache `inference/generate.py` batches prompts of equal length only. `refuse_static` in `build.py` refuses
methods with queries, quantised entries, states, sliding layers, and attention other than `sdpa` and `eager`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .cache import MemoryCache
from .memory import Memory
from .method import Method

_CACHES: WeakValueDictionary[int, StaticCache] = WeakValueDictionary()
"""By number. A graph reads the number from a tensor, so it serves every cache of its model."""
_NUMBERS = count()


class StaticMemory(Memory):
    """The keys and values of one layer in buffers of N entries, which are written in place."""

    is_compileable = True
    bares = False
    place: Tensor
    """The number of tokens seen, for the graph; `seen` is the same number for Python."""

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers."""
        self.dtype, self.device = key_states.dtype, key_states.device
        sizes = (*key_states.shape[:2], self.schedule.window)
        self.keys, self.values = (x.new_zeros(*sizes, x.shape[3]) for x in (key_states, value_states))
        self.place = torch.zeros((), dtype=torch.long, device=self.device)
        for buffer in (self.keys, self.values, self.place):
            torch._dynamo.mark_static_address(buffer)
        self.is_initialized = True

    def held(self) -> Tensor:
        """p, the number of entries that are stored when the next token arrives."""
        after = self.place - self.schedule.window
        return torch.where(after < 0, self.place, self.schedule.survivors + after % self.schedule.freed)

    def get_seq_length(self) -> int:
        """Number of tokens seen: a tensor, as in transformers' static caches."""
        return self.place if self.is_initialized else 0  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask sizes: all N entries of the buffers, and the position of the first; the causal mask hides entries
        that are still unused."""
        return self.schedule.window, self.place - self.held() if self.is_initialized else 0  # type: ignore[return-value]

    def get_max_length(self) -> int:
        """The size of the buffers, which do not limit the length of a text."""
        return self.schedule.window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[B, H_kv, q, D]` behind the stored entries; `make_room` must have made room before."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        at = self.held() + torch.arange(key_states.shape[2], device=self.device)
        self.keys.index_copy_(2, at, key_states.detach())
        self.values.index_copy_(2, at, value_states.detach())
        self.place += key_states.shape[2]
        return self.keys, self.values

    @torch.no_grad()
    def make_room(self, length: int, keys: Tensor, values: Tensor) -> None:
        """Compress the buffers in place if the next `length` tokens make a compression due."""
        self.schedule.fit(self.seen, length)
        if self._is_due(length):
            for buffer, x in zip((keys, values), self._compressed(keys, values), strict=True):
                buffer[:, :, : self.schedule.survivors] = x
        self.seen += length

    def branch(self) -> StaticMemory:
        """An independent copy of this memory to continue from, with buffers of its own."""
        return copy.deepcopy(self)


class StaticCache(MemoryCache):
    """A cache of static memories. Prompts are read by the model itself, tokens by the model or its compiled form."""

    def __init__(self, method: Method, layers: Sequence[StaticMemory]) -> None:
        super().__init__(method, layers)
        self._enter()

    def _enter(self) -> None:
        number = next(_NUMBERS)
        self.number = torch.tensor(number)
        _CACHES[number] = self

    def admit(self, attention_mask: object) -> None:
        """Refuse padding, also in the 4-D masks `[B, 1, q, N]` that `generate` makes for a cache that compiles."""
        mask = attention_mask.get("full_attention") if isinstance(attention_mask, Mapping) else attention_mask
        if isinstance(mask, Tensor) and mask.ndim == 4:
            length = mask.shape[2]
            last = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, -1]  # what the last token sees
            mask = last[:, : self.memory.found(length) + length]
        super().admit(mask)

    def pad(self, pads: Sequence[int], *args: object) -> None:
        """Raise a `ValueError` if there is padding, because all sequences must be compressed at the same tokens."""
        if pads:
            raise ValueError("a static cache needs sequences of equal length: leave out static, or pass one at a time")

    def make_room(self, length: int) -> None:
        """Compress all layers in place if the next `length` tokens make a compression due."""
        buffers = [buffer for layer in self.layers for buffer in (layer.keys, layer.values)]
        if not torch.compiler.is_compiling():
            _make_room(self.layers, buffers, length)
        elif not self.memory.is_initialized:
            _refuse_prompt()
        else:
            torch.ops.fathom.make_room(self.number, buffers, length)

    def branch(self) -> StaticCache:
        """An independent copy of this cache to continue from, with buffers of its own."""
        new = super().branch()
        new._enter()
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> StaticCache:
        return self.branch()


def _make_room(layers: Sequence[StaticMemory], buffers: Sequence[Tensor], length: int) -> None:
    for layer, keys, values in zip(layers, buffers[::2], buffers[1::2], strict=True):
        layer.make_room(length, keys, values)


@torch.library.custom_op("fathom::make_room", mutates_args=("buffers",), tags=(torch.Tag.cudagraph_unsafe,))
def _make_room_in_graph(number: Tensor, buffers: list[Tensor], length: int) -> None:
    _make_room(_CACHES[int(number)].layers, buffers, length)


# Called by the compiler itself, as in cache.py.
@torch.compiler.assume_constant_result
def _refuse_prompt() -> None:
    raise RuntimeError("a static cache is empty: prefill it with the uncompiled model, then compile the decoding step")
