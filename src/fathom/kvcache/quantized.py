"""A memory whose entries are stored by one of transformers' quantised layers.

The layer is used by its public contract alone: `update` returns everything dequantised, and a fresh layer takes the
survivors of a round. So error from quantising is added once per round to what was there.
"""

from __future__ import annotations

import transformers.cache_utils as backends
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .memory import Memory
from .method import Method

BACKENDS = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}


class QuantizedMemory(Memory):
    """As `Memory`, through a backend that must be installed (`fp8` needs none, but a newer transformers)."""

    def __init__(self, method: Method, backend: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"quantized must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if not hasattr(backends, BACKENDS[backend]):
            raise ValueError(f"this transformers has no {backend} cache layer: upgrade it, or take another backend")
        self.backend = backend
        super().__init__(method)

    def _forget(self) -> None:
        super()._forget()
        self.store: DynamicLayer = getattr(backends, BACKENDS[self.backend])()

    def _append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored: tuple[Tensor, Tensor] = self.store.update(keys, values)
        return stored

    def _read(self) -> tuple[Tensor, Tensor]:
        return self._append(self.keys, self.values)  # which are empty, and stay so

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        self.store = type(self.store)()
        self.store.update(keys, values)
        self.keys, self.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
