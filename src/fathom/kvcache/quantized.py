"""A memory whose entries are stored by one of transformers' quantised layers.

Only the layer's public interface is used: `update` returns everything dequantised, and after a compression a new layer
gets the remaining entries. Each compression therefore quantises them once more. Keys are stored without their rotation,
and keys that stay with their neighbours are rounded to the same numbers again.
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from fathom.models.axes.numerics import widen

from .kivi import Kivi
from .memory import Memory
from .method import Method
from .whole import backend_layer


class QuantizedMemory(Memory):
    """A `Memory` that stores its entries through a quantisation backend, which must be installed (`fp8` needs only a
    newer transformers, `int8` and `int4` of kivi.py nothing)."""

    bares = False

    def __init__(self, method: Method, backend: str, layer: int = 0) -> None:
        self.backend = backend_layer(backend)
        super().__init__(method, layer)

    def _forget(self) -> None:
        super()._forget()
        self.store: DynamicLayer = self.backend()

    def branch(self) -> QuantizedMemory:
        """An independent copy of this memory, to continue from."""
        new = cast(QuantizedMemory, super().branch())
        new.store = copy.copy(self.store)
        return new

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._all(keys, values, self.dtype)

    def _all(self, keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Store rotated keys and values; returns all keys and values, of which the new keys are not quantised."""
        bare, new = self._bare(keys).to(self.dtype), keys.shape[2]
        held, held_values = self.store.update(bare, values, dtype=dtype)
        if held.shape[2] == new:
            return keys, values  # a first chunk is read as it came
        old = self.rotation.place(held[:, :, : held.shape[2] - new], self.seen - held.shape[2])
        return torch.cat([old, keys.to(old.dtype)], dim=2), held_values

    def _bare(self, keys: Tensor) -> Tensor:
        return self.rotation.turn(widen(keys), keys.shape[2] - self.seen, -1)

    def _read(self) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(self.dtype, torch.float32)
        return self._all(self.keys, self.values, wide)  # these are empty, and stay so

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.store = type(self.store)()
        bare = self._bare(keys)
        self.store.update(bare if isinstance(self.store, Kivi) else bare.to(self.dtype), values)
        self.keys, self.values = (x[:, :, :0].to(self.dtype, copy=True) for x in (keys, values))
