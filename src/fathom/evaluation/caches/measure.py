"""Measurements of a cache: loss by position, needles by compressions, bytes, peak memory and speed.

A model reads a text with a cache as it would when serving: in the chunks that the cache allows, each token once.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from fathom.evaluation.caches.results import Load
from fathom.evaluation.clock import Clock
from fathom.kvcache import MemoryCache, cache_bytes, chunks
from fathom.kvcache.prefill import PROBED, continues
from fathom.kvcache.rope import keeps
from fathom.models import FathomForCausalLM
from fathom.models.axes.cache_name import passed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 512
"""Most tokens of a row that are read at once."""
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

NewCache = Callable[[], Cache]


def read(
    model: PreTrainedModel, ids: Tensor, cache: Cache, keep: int = 0, width: int = CHUNK
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read a text `[B, T]` piece by piece; yields each piece's ids and logits `[B, c, V]`.

    Args:
        model: Any causal language model.
        ids: The text, or its continuation after what the cache has seen.
        cache: The cache to fill.
        keep: Logits of this many last positions of each piece; 0 for all.
        width: Maximum tokens of a row in a piece; the cache may allow fewer.
    """
    ids = ids.to(model.device)
    for chunk in chunks(ids, cache):
        for piece in _pieces(model, chunk, cache, width):
            with torch.no_grad():
                yield piece, model(piece, use_cache=True, logits_to_keep=keep, **passed(model, cache)).logits


def _pieces(model: PreTrainedModel, chunk: Tensor, cache: Cache, width: int) -> tuple[Tensor, ...]:
    """The pieces in which a model reads a chunk `[B, T]`: after the first, single tokens where a class of transformers
    would forget its state (Mamba, RecurrentGemma)."""
    if isinstance(cache, MemoryCache) or isinstance(model, FathomForCausalLM) or continues(model, PROBED // 2):
        return chunk.split(width, dim=1)
    first = 1 if cache_bytes(cache) else min(width, chunk.shape[1])
    return chunk.split([first] + [1] * (chunk.shape[1] - first), dim=1)


def scorer(model: PreTrainedModel, new_cache: NewCache, width: int = CHUNK) -> Callable[[Tensor, Tensor], Tensor]:
    """Make a `Scorer` for `needles.recall`, which maps ids `[B, T]` and n candidate tokens to the candidates' logits
    `[B, T, n]`."""

    def score(ids: Tensor, tokens: Tensor) -> Tensor:
        tokens = tokens.to(model.device)
        pieces = read(model, ids, new_cache(), width=width)
        return torch.cat([logits[..., tokens].float() for _, logits in pieces], dim=1)

    return score


def losses(model: PreTrainedModel, ids: Tensor, cache: Cache, width: int = CHUNK) -> np.ndarray:
    """The loss in nats of every predicted token of texts `[B, T]`, as an array `[B, T - 1]`."""
    found, start = [], 0
    targets = ids.to(model.device)
    for piece, logits in read(model, ids, cache, width=width):
        stop = start + piece.shape[1]
        target = targets[:, start + 1 : stop + 1]
        found.append(F.cross_entropy(logits[:, : target.shape[1]].float().mT, target, reduction="none"))
        start = stop
    return torch.cat(found, dim=1).double().cpu().numpy()


def stretches(nats: np.ndarray, width: int) -> list[list[float]]:
    """The sums of each sequence's losses over segments of `width` positions; a shorter last segment is left out."""
    rows, count = nats.shape[0], nats.shape[1] // width
    return nats[:, : count * width].reshape(rows, count, width).sum(2).tolist()


def loads(
    model: PreTrainedModel,
    ids: Tensor,
    new: Callable[[int], Cache],
    lengths: Sequence[int],
    decode: int,
    width: int = CHUNK,
) -> Iterator[Load]:
    """Read texts `[B, T]` up to each length, measure the cache, and decode `decode` tokens one by one.

    Each length has a new cache: a preallocated one must not have the size for the longest text while a short one is
    timed.
    """
    clock = Clock(model.device)
    for length in sorted(lengths):
        cache, peak = new(length + decode), Peak(model)
        seconds = clock.seconds(partial(consume, model, ids[:, :length], cache, width))
        held = cache_bytes(cache)
        entries = max((layer.get_mask_sizes(0)[0] for layer in cache.layers if keeps(layer)), default=0)
        steps = ids[:, length : length + decode].split(1, dim=1)
        spent = [1000 * clock.seconds(partial(consume, model, step, cache, 1)) for step in steps]
        p50, p90 = np.percentile(spent, (50, 90))
        times = {"p50": float(p50), "p90": float(p90), "max": max(spent)}
        yield Load(length, entries, held, peak.bytes(), len(ids) * length / seconds, times, clock.words)


def consume(model: PreTrainedModel, ids: Tensor, cache: Cache, width: int) -> None:
    """Run the model over a text to fill the cache, and discard the logits."""
    for _ in read(model, ids, cache, keep=1, width=width):
        pass


class Peak:
    """Measures peak memory from its creation on, above the memory in use then: that of the GPU, or of this process on
    Linux."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.device: torch.device = model.device
        self.cuda = self.device.type == "cuda"
        self.before: int | None = None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
            return
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
            RESET.write_text("5")  # resets the peak
            self.before = _status("VmRSS")

    def bytes(self) -> int | None:
        """The peak memory so far, in bytes above the memory in use at the start."""
        if self.before is None:
            return None
        return (torch.cuda.max_memory_allocated(self.device) if self.cuda else _status("VmHWM")) - self.before


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
