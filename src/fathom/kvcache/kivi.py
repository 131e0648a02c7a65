"""Stores entries as integers of 8 or 4 bits after KIVI (arXiv 2402.02750), in plain torch. The code is:

    code = round((x − least) / step),     step = (most − least) / (2^bits − 1)

`least` and `most` are those of a group: for keys, one channel over 32 entries, because some channels of all keys are
large; for values, 32 channels of one entry. The last 32 to 63 entries stay as they are. An entry is rounded once, when
it leaves them, and again at each compression: to the same numbers if its group is the same.

`quantized.py` stores keys in this form without their rotation. `whole.py` uses it for caches that are not compressed
(`full_int8`, `full_int4`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

GROUP = 32
"""Numbers that share a step, and the fewest last entries in full precision."""
ENTRIES, CHANNELS = 2, 3
"""Dimensions of `[B, H_kv, n, D]`."""
Packed = tuple[Tensor, Tensor, Tensor]
"""Codes, the least number of each group, and its step."""


def pack(x: Tensor, bits: int, dim: int) -> Packed:
    """Quantise `[B, H, n, D]` to codes of `bits`, in groups along `dim`; two codes of 4 bits share a byte."""
    groups = x.float().unflatten(dim, (-1, gcd(GROUP, x.shape[dim])))
    least, most = groups.aminmax(dim=dim + 1, keepdim=True)
    least = least.half()  # the step below is that of `most` as it is, so numbers that were packed get the same codes
    step = ((most - least.float()) / (2**bits - 1)).half().clamp(min=1e-7)
    codes = ((groups - least.float()) / step.float()).round().clamp(0, 2**bits - 1)
    codes = codes.to(torch.uint8).view(x.shape)
    return (codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4), least, step


def unpack(packed: Packed, bits: int, dim: int, dtype: torch.dtype) -> Tensor:
    """`[B, H, n, D]` again."""
    codes, least, step = packed
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    size = codes.shape[dim] // least.shape[dim]
    numbers = codes.unflatten(dim, (-1, size)) * step.float() + least.float()
    return numbers.view(codes.shape).to(dtype)


class Kivi(DynamicLayer):
    """The keys and values of one layer, quantised; `update` returns all of them in the dtype of the new ones."""

    bits: ClassVar[int]
    is_compileable = False

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.packed: tuple[Packed, Packed] | None = None

    def get_seq_length(self) -> int:
        """Number of entries."""
        if not self.is_initialized:
            return 0
        return self.keys.shape[2] + (0 if self.packed is None else self.packed[1][0].shape[2])

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: object,
        dtype: torch.dtype | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values `[B, H_kv, q, D]`; returns all entries, of which the new ones are not rounded yet.

        Keys may come in float32, so that numbers that were packed before get the same codes; what stays unpacked is in
        the values' dtype. `dtype` is that of the keys to return.
        """
        if not self.is_initialized:
            self.lazy_initialization(value_states, value_states)
            self.dtype = value_states.dtype  # which transformers 5.24 leaves out
            self.keys, self.values = key_states[:, :, :0].to(self.dtype), value_states[:, :, :0]
        old = self._unpacked(dtype or self.dtype)
        recent = torch.cat([self.keys, key_states], dim=2), torch.cat([self.values, value_states], dim=2)
        self.keys, self.values = recent[0].to(self.dtype), recent[1]
        whole = max(0, recent[0].shape[2] // GROUP - 1) * GROUP
        if whole:
            self._pack(*(x[:, :, :whole] for x in recent))
            self.keys, self.values = (x[:, :, whole:].to(self.dtype, copy=True) for x in recent)
        if old is None:
            return recent
        return torch.cat([old[0], recent[0]], dim=2), torch.cat([old[1], recent[1]], dim=2)

    def _unpacked(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if self.packed is None:
            return None
        keys, values = self.packed
        return unpack(keys, self.bits, ENTRIES, dtype), unpack(values, self.bits, CHANNELS, self.dtype)

    def _pack(self, keys: Tensor, values: Tensor) -> None:
        new = pack(keys, self.bits, ENTRIES), pack(values, self.bits, CHANNELS)
        if self.packed is not None:
            new = tuple(  # type: ignore[assignment]
                tuple(torch.cat(pair, dim=2) for pair in zip(was, now, strict=True))
                for was, now in zip(self.packed, new, strict=True)
            )
        self.packed = new

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
        if self.packed is not None:
            self.packed = tuple(tuple(map(change, one)) for one in self.packed)  # type: ignore[assignment]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: sequence i of the batch is replaced by sequence `beam_idx[i]`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._each(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, max_length: int) -> None:
        """Raise `NotImplementedError` if entries are to be removed: quantised codes belong to groups of entries."""
        if max_length:
            raise NotImplementedError("quantized cache entries cannot be removed one by one: use method 'full'")

    def offload(self) -> None:
        """Move all entries to the CPU."""
        self._each(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move all entries back."""
        self._each(lambda x: x.to(self.device, non_blocking=True))

    def reset(self) -> None:
        """Forget all entries."""
        self.__init__()  # type: ignore[misc]


class Int8(Kivi):
    """8 bits a number."""

    bits = 8


class Int4(Kivi):
    """4 bits a number."""

    bits = 4
