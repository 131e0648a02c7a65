"""Training under compression: the recursion that a compressed cache computes, as an attention function for any
transformers model. The recursion is:

    group 0 = tokens 0 … N−1:     plain causal attention
    each next F tokens:           memory = compress(memory); attend to memory ++ group, causal at the bottom right

Layers are independent given their keys and values, so computing all groups of a layer before the next layer gives the
same as the cache, token by token. Keys are rotated by their true positions, as in the cache. Nothing here holds state,
so activation checkpointing recomputes it exactly.

`padding_check.py` refuses packed documents and padding on the left. `training/kvcache.py` reads the recipe keys
`kvcache.*`.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from types import TracebackType
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from .build import config_of, make_method
from .method import Held, Method
from .observe import backend
from .rope import left_alone
from .schedule import LARGEST_MASK, SINKS
from .watch import decoder_of, watch

NAME = "fathom_kvcache"
PATIENCE = 8
"""Training passes without a row longer than the window before a warning is given."""


class Compression(AbstractContextManager["Compression"]):
    """Attention under compression for a model, active until `stop()` or the end of a `with` block."""

    def __init__(self, model: PreTrainedModel, method: Method) -> None:
        self.model, self.method = model, method
        self._before: str = model.config._attn_implementation
        self.name = self._before
        """The backend that attends within a group."""
        if self.name == NAME:
            raise ValueError("this model already compresses in training: call stop() of the first compression")
        if self.name not in ("sdpa", "eager"):
            raise ValueError(
                f"compression in training runs on sdpa and eager attention, this model uses {self.name!r}: "
                "call model.set_attn_implementation('sdpa') first"
            )
        self._masks: dict[tuple[int, int, int | None, torch.dtype, torch.device], Tensor] = {}
        self._longest, self._calls = 0, 0  # longest sequence and forward passes before the first compression
        self._layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "scaling")]
        if method.observed and any(getattr(layer, "is_kv_shared_layer", False) for layer in self._layers):
            raise ValueError(
                f"{method.name} looks at queries, and later layers of this model read keys that an earlier layer's "
                "queries select: train under a method without queries, such as freqkv, drop or key_norm"
            )
        for layer in self._layers:
            # Set without nn.Module's bookkeeping, so that a learned matrix is not registered in every layer.
            object.__setattr__(layer, "kvcache_compression", self)
        method.rope.ask(decoder_of(model))
        watch(model)
        model.set_attn_implementation(NAME)

    def stop(self) -> None:
        """Restore the model's own attention."""
        self.model.set_attn_implementation(self._before)
        for layer in self._layers:
            vars(layer).pop("kvcache_compression", None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, **kwargs: object
    ) -> Tensor:
        """The attention that a compressed cache would compute: queries `[B, H, T, D]`, keys and values `[B, H_kv, T,
        D]` to `[B, T, H, D]`."""
        method, schedule = self.method, self.method.schedule
        if module.training and not torch.compiler.is_compiling():
            self._look_out_for_compressions(query.shape[2])
        layer = cast("int", module.layer_idx) % len(method.rope.plan)
        sees = left_alone(config_of(self.model), layer, schedule.window)
        if sees is not None:
            return self._windowed(module, query, key, value, sees, scaling=scaling, **kwargs)
        rotation = method.rope.plan[layer]
        keys, values = key[:, :, :0], value[:, :, :0]
        outputs: list[Tensor] = []
        stop, noted = 0, None
        for i, length in enumerate(schedule.cuts(0, query.shape[2])):
            if i:
                held = Held(keys, values, noted, rotation)
                keys, values = method.compress(held, key[:, :, : schedule.sinks], i - 1)
            start, stop = stop, stop + length
            if method.observed:
                noted = method.note(None, query[:, :, start:stop].detach() * scaling, keys.shape[2], rotation)
            keys = torch.cat([keys, key[:, :, start:stop]], dim=2) if i else key[:, :, :stop]
            values = torch.cat([values, value[:, :, start:stop]], dim=2) if i else value[:, :, :stop]
            group, past = query[:, :, start:stop], keys.shape[2] - length
            # A causal kernel needs no mask if the memory's entries get queries of zeros: always on a GPU, whose fastest
            # kernels take none, elsewhere where a mask would be large.
            maskless = self.name == "sdpa" and (query.is_cuda or length * keys.shape[2] > LARGEST_MASK)
            if past > 0 and length > 1 and maskless:
                group = torch.cat([query.new_zeros(*query.shape[:2], past, query.shape[3]), group], dim=2)
            mask = self._mask(group.shape[2], keys.shape[2], query)
            out = backend(self.name, module)(module, group, keys, values, mask, scaling=scaling, **kwargs)[0]
            outputs.append(out[:, -length:])
        return torch.cat(outputs, dim=1)

    def _windowed(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sees: int, **kwargs: object
    ) -> Tensor:
        """Attention of a sliding-window layer, which attends to the last `sees` tokens and keeps its own cache;
        computed in pieces, so no mask is T × T."""
        outputs: list[Tensor] = []
        for start in range(0, query.shape[2], sees):
            stop, first = min(start + sees, query.shape[2]), max(0, start - sees + 1)
            mask = self._mask(stop - start, stop - first, query, sees)
            parts = query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop]
            outputs.append(backend(self.name, module)(module, *parts, mask, **kwargs)[0])
        return torch.cat(outputs, dim=1)

    def _look_out_for_compressions(self, length: int) -> None:
        """Warn once if the first training sequences are too short to be compressed, because such sequences do not tune
        the model for compression."""
        if self._longest > self.method.schedule.window:
            return
        self._longest, self._calls = max(self._longest, length), self._calls + 1
        window, freed = self.method.schedule.window, self.method.schedule.freed
        if self._longest <= window and self._calls == PATIENCE * len(self._layers):
            warnings.warn(
                f"the longest row so far has {self._longest} tokens and the window {window}, so nothing was "
                f"compressed or tuned: train on sequences of more than {window} tokens, at best {window + 3 * freed}",
                stacklevel=2,
            )

    def _mask(self, queries: int, keys: int, like: Tensor, sees: int | None = None) -> Tensor | None:
        if self.name == "sdpa" and (queries == keys or queries == 1) and sees in (None, keys):
            return None  # as transformers does, so that the first window is bitwise the stock model's
        place = (queries, keys, sees, like.dtype, like.device)
        if place not in self._masks:
            with torch.inference_mode(False):  # a cached tensor, which training may use later
                visible = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=like.device).tril(keys - queries)
                if sees is not None:
                    visible = visible.triu(keys - queries - sees + 1)
                if self.name == "eager":  # it adds its mask
                    lowest = torch.finfo(like.dtype).min
                    visible = torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, lowest)
            self._masks[place] = visible
        return self._masks[place]


def compress_in_training(
    model: PreTrainedModel,
    method: str | Method = "freqkv",
    window: int | None = None,
    sinks: int = SINKS,
    ratio: float = 0.5,
    kept: int | None = None,
    **options: object,
) -> Compression:
    """Switch `model` to attention under compression until `stop()` or the end of a `with` block.

    Args:
        model: Any decoder of the supported families.
        method: A name, or a `Method` (pass a learned one to `build_cache` afterwards).
        window: N, maximum entries of a memory.
        sinks: S, first entries that are never compressed.
        ratio: Share of the window that a compression leaves.
        kept: L, entries that a compression leaves in addition to the sinks, instead of `ratio`.
        options: Options of the method.
    """
    return Compression(model, make_method(config_of(model), method, window, sinks, ratio, kept, **options))


def compressed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,  # by its place from kvpress's wrapper
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers; `compress_in_training` gives it the method."""
    compression: Compression | None = getattr(module, "kvcache_compression", None)
    if compression is None:
        raise RuntimeError(f"attn_implementation={NAME} has no schedule: set it by compress_in_training(model, …)")
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            "compression for training cannot be used with a cache: call stop(), and generate with build_cache(model, …)"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return compression.attend(module, query, key, value, scale, dropout=dropout, **kwargs), None


AttentionInterface.register(NAME, compressed_attention)
