"""Compression matrices that depend only on the schedule, built once per dtype and device and shared by all caches.

`Linear` in `method.py` applies a matrix to keys, without their rotation, and to values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from .method import Linear

# shared by all methods, because a server builds a cache for every request
_MATRICES: dict[tuple[Callable[..., Tensor], int, int, torch.dtype, torch.device], Tensor] = {}
BLOCK = 1 << 18
"""Entries of a matrix that are computed at a time."""


class Fixed(Linear):
    """A linear compression whose matrix depends only on the schedule."""

    @staticmethod
    @abstractmethod
    def rows(i: Tensor, kept: int, compressed: int) -> Tensor:
        """Rows `i` of the compression matrix C, `[rows, M]`, in float64."""

    @classmethod
    def build(cls, kept: int, compressed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Build the compression matrix C, `[L, M]`. A few rows at a time are computed in float64, so that little more
        memory than C is needed."""
        c = torch.empty(kept, compressed, dtype=dtype)
        for i in torch.arange(kept).split(max(1, BLOCK // compressed)):
            c[i[0] : i[-1] + 1] = cls.rows(i, kept, compressed)
        return c

    def matrix(self, like: Tensor) -> Tensor:
        """The compression matrix C, `[L, M]`, in the dtype and on the device of `like`."""
        kept, compressed = self.schedule.kept, self.schedule.compressed
        key = (self.build, kept, compressed, like.dtype, like.device)
        if key not in _MATRICES:
            if len(_MATRICES) > 16:
                _MATRICES.clear()
            with torch.inference_mode(False):  # training may use it later
                _MATRICES[key] = self.build(kept, compressed, like.dtype).to(like.device)
        return _MATRICES[key]

    def reduce(self, x: Tensor) -> Tensor:
        """C x."""
        return self.matrix(x) @ x
