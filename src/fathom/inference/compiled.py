"""Compiled decoding: the step of one layer is compiled, for every layer of every trip.

A program of the whole model holds each layer as often as a token passes through it, and takes minutes to compile.
Layers that are alike, apart from their weights, share a program here, one for one row and one for several. What lies
between layers (masks, what a trip is fed, the head) runs as it is written, so a step may look at its numbers: it ends
once no token goes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fathom.models.walk import Exchange

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

STEP = "fathom_step"
"""`attend`, as configurations name it."""


@dataclass
class OneBank:
    """The keys and values of one visit, as its layer sees them. It names no layer, so that one program serves all."""

    keys: Tensor
    """`[rows, places, H_kv, D]`"""
    values: Tensor
    place: Tensor
    """Where the new ones go, `[n, T]`, in the first n rows."""
    read: Tensor
    """As many numbers as places are read: a length that may change."""

    @classmethod
    def of(cls, cache: Cache | Exchange, index: int) -> OneBank:
        """A visit's bank in a batch's slab, or in slots."""
        if isinstance(cache, Exchange):
            keys, values = cache.store.cache.layers[index].stored
            place, end, seen = cache.placement.slot, cache.placement.end, cache.placement.seen
            assert place is not None
            if isinstance(seen, slice):  # one trip's places, which lie evenly apart, are the bank
                capacity, end = cache.store.table.capacity, end // seen.step
                keys, values = (x[:, seen.start : capacity : seen.step] for x in (keys, values))
                # What is discarded goes where the row's next token will, or has been and is about to be repeated.
                place = torch.where(place < capacity, place // seen.step, end - 1)
        else:
            bank = cache.layers[index]
            keys, values = bank.keys.transpose(1, 2), bank.values.transpose(1, 2)
            place, end = bank.slab.filled.unsqueeze(1), bank.slab.most + 1
        return cls(keys, values, place, torch.empty(end))

    def update(self, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Write the new ones, `[n, H_kv, T, D]`, and return all that are read; the index is that of any layer."""
        rows = torch.arange(len(self.place), device=key.device).unsqueeze(1)
        seen = []
        for stored, new in ((self.keys, key), (self.values, value)):
            stored[rows, self.place] = new.transpose(1, 2)
            seen.append(stored[: len(self.place), : len(self.read)].transpose(1, 2))
        return seen[0], seen[1]


def attend(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, **rest: object
) -> tuple[Tensor, None]:
    """Attention of one new token for each row, `[n, H, 1, D]`. The queries that share a key are rows of one product:
    transformers' own, when it is compiled, copies each key for each of them."""
    packed = query.reshape(len(query), key.shape[1], -1, query.shape[3])  # [n, H_kv, H / H_kv, D]
    out = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(len(query), 1, query.shape[1], -1), None


AttentionInterface.register(STEP, attend)


class Compiled:
    """A model whose decoding is compiled, and the room of the batches for which it is.

    Args:
        model: Its weights are shared; it stays as it is, since prompts are of all lengths.
        rows: Most rows of a batch.
        tokens: Most tokens of a row, prompt included.
    """

    def __init__(self, model: PreTrainedModel, rows: int, tokens: int) -> None:
        self.model, self.rows, self.tokens = model, rows, tokens
        self.step = self._twin().forward

    def _twin(self) -> PreTrainedModel:
        """The same model, whose layers are compiled for one new token of each row."""
        weights = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        twin = copy.deepcopy(self.model, weights)
        attending = copy.copy(twin.config)
        if attending._attn_implementation == "sdpa":
            attending._attn_implementation = STEP
        layers = twin.base_model.layers
        # Layers that are not alike, in what they read or in their kind of attention, have programs of their own.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit
        # Nothing changes a Linear between steps, so none is looked at before each.
        unguarded: dict[str, str | int | bool | Callable[..., object]] = {
            "guard_filter_fn": torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe
        }
        run = torch.compile(_run, fullgraph=True, options=unguarded)
        for index, layer in enumerate(layers):
            layer.self_attn.config = attending
            layer.forward = partial(self._layer, run, layer, index)
        return twin

    def _layer(
        self,
        run: Callable[..., object],
        layer: nn.Module,
        index: int,
        *state: Tensor,
        attention_mask: Tensor,
        past_key_values: Cache | Exchange,
        bank: int | None = None,
        **kwargs: object,
    ) -> object:
        """Call a layer by its program. Rows and places read may change from step to step; all else is constant."""
        one = OneBank.of(past_key_values, index if bank is None else bank)
        rows = len(state[0])
        if rows > 1 and self.rows > 2:  # of one row, and of two where there are no more, it is constant too
            for tensor in _tensors((*state, *kwargs.values(), attention_mask, one.place)):
                if len(tensor) == rows:
                    torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(attention_mask, 3)
        torch._dynamo.mark_dynamic(one.read, 0)
        return run(layer, *state, attention_mask=attention_mask, past_key_values=one, **kwargs)


def _run(layer: nn.Module, *state: Tensor, **kwargs: object) -> object:
    return type(layer).forward(layer, *state, **kwargs)


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from _tensors(value)
