"""The compressed cache of a model, one memory per layer; it accepts unbroken sequences, padded on the left only.

Layers that read an earlier layer's keys (Gemma 3n, Gemma 4) read its compressed entries, since transformers hands on
what `update` returned. `schedule.py` decides when a layer's memory is compressed, and `memory.py` whether tokens can be
removed (`crop`). `models/trips/slots.py` adds a memory for each loop iteration (`with_banks`). Layers whose sliding
window is smaller than N keep their own cache (`left_alone` in `rope.py`).

Models whose tokens halt or whose iterations read one another are refused (`refuse` in `rope.py`); their cache is in
`models/trips/slot_cache.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .accounting import cache_bytes
from .memory import GUESSES, Memory
from .method import Method
from .padded import Padded
from .padding_check import left_padding, padded_left, real_tokens, unbroken
from .schedule import Schedule
from .states import State


# Called by the compiler itself: an error raised in traced code would only trigger a fallback to eager mode.
@torch.compiler.assume_constant_result
def refuse_compiling() -> None:
    """Raise a `RuntimeError`, because a cache that grows was called under torch.compile."""
    raise RuntimeError(
        "a compressed cache that grows cannot run under torch.compile: its length is part of the program, so every "
        "token would compile again; build it with static=True, or run the model that was not compiled"
    )


class MemoryCache(Cache):
    """A transformers cache whose layers are memories of one method.

    A hook on the model (`watch`) checks what the layers cannot see: padding and packed rows.

    Args:
        method: The compression rule.
        layers: One memory per layer of the model; a model of several trips adds its banks.
    """

    layers: list[CacheLayerMixin]

    def __init__(self, method: Method, layers: Sequence[CacheLayerMixin]) -> None:
        super().__init__(layers=list(layers))
        self.method, self.watched = method, False
        self.offset = 0

    @property
    def memory(self) -> Memory:
        """The memory of the first compressed layer; the other compressed layers differ only in their entries."""
        return next(layer for layer in self.layers if isinstance(layer, Memory))

    @property
    def schedule(self) -> Schedule:
        """The method's schedule."""
        return self.method.schedule

    @property
    def seen(self) -> int:
        """The number of tokens seen so far, padding included, which is also the mask column of the next token."""
        return self.memory.seen

    @property
    def entries(self) -> int:
        """The number of entries that a layer stores, at most the window."""
        return self.memory.entries

    @property
    def compressions(self) -> int:
        """Compressions so far."""
        return self.memory.compressions

    @property
    def pads(self) -> tuple[int, ...]:
        """The number of padding tokens to the left of each sequence; empty if no sequence has any."""
        return getattr(self.memory, "pads", ())

    def pad(self, pads: Sequence[int], method_for: Callable[[int], Method] | None = None) -> None:
        """Prepare an empty cache for sequences with padding on their left.

        Args:
            pads: The padding of each row, in tokens.
            method_for: The method of rows with this padding, if they differ.
        """
        self.layers = [Padded(layer, pads, method_for) if isinstance(layer, Memory) else layer for layer in self.layers]

    def reset(self) -> None:
        """Delete all entries, and forget the padding."""
        self.layers = [layer.emptied() if isinstance(layer, Padded) else layer for layer in self.layers]
        super().reset()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """See transformers' `Cache.update`; raises an error if no hook checks the attention mask."""
        if not self.watched:
            raise RuntimeError(
                "this model is not the one that the cache was built from, so nothing checks the mask: give build_cache "
                "the model that is run, or call fathom.kvcache.watch(model) once"
            )
        if torch.compiler.is_compiling() and not self.is_compileable:
            refuse_compiling()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def states(self) -> Cache:
        """The recurrent states as a separate cache, under the indices of their layers."""
        return Cache(layers=[layer.state if isinstance(layer, Memory) else layer for layer in self.layers])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See transformers."""
        return self.states.get_conv_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """See transformers."""
        return self.states.update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """See transformers."""
        return self.states.get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """See transformers."""
        return self.states.update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """See transformers."""
        return self.states.has_previous_state(layer_idx, state_idx)

    def cuts(self, length: int) -> list[int]:
        """The lengths of the chunks into which the next `length` tokens are split."""
        cuts = self.memory.cuts(length)
        if not self.method.rope.by_token:
            return cuts
        whole = cuts[:1] if self.seen == 0 else []
        return whole + [1] * (length - sum(whole))

    def make_room(self, length: int) -> None:
        """Prepare for the next `length` tokens; only static memories need this, since growing memories make room when
        tokens are written."""
        if torch.compiler.is_compiling():
            refuse_compiling()

    def admit(self, attention_mask: object) -> None:
        """Read the padding from the attention mask `[B, seen + q]` of the first pass, and refuse padding anywhere but
        on the left."""
        if attention_mask is None:
            return
        real = real_tokens(attention_mask)
        if self.seen == 0 and not real.any(1).all():
            raise ValueError(
                "a sequence of the first forward pass is all padding: give at least one token of each sequence"
            )
        if self.seen == 0 and (pads := left_padding(real)) != self.pads:
            if self.pads:
                self.reset()
            if pads:
                self.pad(pads)
        padded_left(real, self.pads)

    def continues(self, positions: Tensor | None, length: int) -> Tensor:
        """The positions of the next tokens in their sequences, `[B, length]`, negative in padding.

        Those given, `[B, length]`, must follow the tokens seen; a constant offset is allowed.
        """
        places = self.seen + torch.arange(length) - torch.tensor(self.pads or (0,)).unsqueeze(1)
        if positions is None:
            offsets = {0}
        else:
            positions, real = positions.cpu(), places >= 0
            unbroken(positions, real)
            apart, real = torch.broadcast_tensors(positions - places, real)
            offsets = set(apart[real].unique().tolist())
        if self.seen == 0 and len(offsets) == 1:
            self.offset = offsets.pop()
        elif not offsets <= {self.offset}:
            raise ValueError(
                f"position_ids do not continue the {self.seen} tokens in the cache: pass none, or the true positions; "
                "before generate, prefill the prompt without its last token"
            )
        return places + self.offset

    def mask(self, length: int) -> Tensor:
        """The attention mask for the next tokens in a left-padded batch, `[B, seen + length]`: each sequence sees its
        stored entries, which are the last columns."""
        assert isinstance(self.memory, Padded)
        end = self.seen + length
        return torch.arange(end) >= end - torch.tensor(self.memory.lengths(length)).unsqueeze(1)

    def activate_past_recording(self) -> None:
        """Raise `NotImplementedError` if assisted decoding would have to undo tokens that the cache cannot undo."""
        if any(isinstance(layer, State) for layer in self.layers):
            raise NotImplementedError(GUESSES)
        super().activate_past_recording()

    def branch(self) -> MemoryCache:
        """An independent copy of this cache to continue from: one context, read once, serves any number of questions.

        Nothing is copied: both share their tensors until each reads tokens of its own.
        """
        new = copy.copy(self)
        new.layers = [
            layer.branch() if isinstance(layer, (Memory, State)) else copy.copy(layer) for layer in self.layers
        ]
        return new

    def take_over(self, own: Cache) -> None:
        """Turn the caller's own empty cache object into this cache, so that the caller holds the entries that are
        read."""
        own.__class__, own.__dict__ = type(self), vars(self)

    def memory_bytes(self) -> int:
        """Current bytes of all layers."""
        return cache_bytes(self)
