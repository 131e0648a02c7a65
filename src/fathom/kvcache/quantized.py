"""A memory whose entries are stored by one of transformers' quantised layers.

Only the layer's public interface is used: `update` returns everything dequantised, and after a compression a new layer
gets the remaining entries. Each compression therefore quantises them once more.
"""

from __future__ import annotations

import copy

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .memory import Memory
from .method import Method
from .whole import backend_layer


class QuantizedMemory(Memory):
    """A `Memory` through a backend that must be installed (`fp8` needs only a newer transformers)."""

    bares = False

    def __init__(self, method: Method, backend: str, layer: int = 0) -> None:
        self.backend = backend_layer(backend)
        super().__init__(method, layer)

    def _forget(self) -> None:
        super()._forget()
        self.store: DynamicLayer = self.backend()

    def branch(self) -> QuantizedMemory:
        """An independent continuation of this memory."""
        new = copy.copy(self)
        new.store = copy.copy(self.store)
        return new

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = self.store.update(keys, values)
        return stored

    def _read(self) -> tuple[Tensor, Tensor]:
        return self._append(self.keys, self.values)  # these are empty, and stay so

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.store = type(self.store)()
        self.store.update(keys, values)
        self.keys, self.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
