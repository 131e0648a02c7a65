"""Checks that a cache layer cannot make: padding, packed rows, and positions that jump.

A layer gets keys and values only. So a hook on the decoder checks the arguments of every call, and refuses those that
would put something other than the text into the memory.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from .memory import MemoryCache
from .rope import Rope, refuse

_ROPES: WeakKeyDictionary[nn.Module, Rope] = WeakKeyDictionary()
"""Rotary embeddings of decoders that were run with a compressed cache."""


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that makes masks and positions, also behind a PEFT wrapper."""
    find = getattr(model, "get_decoder", None)
    return model if find is None else find()


def watch(model: nn.Module) -> None:
    """Check every call of `model` that carries a compressed cache; once per model."""
    decoder = decoder_of(model)
    if _check not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_check, with_kwargs=True)


def _check(decoder: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
    if len(args) > 1:
        kwargs = {**inspect.signature(decoder.forward).bind_partial(*args).arguments, **kwargs}
    cache = kwargs.get("past_key_values")
    training = getattr(decoder.config, "_attn_implementation", None) == "fathom_kvcache"
    if training and isinstance(cache, MemoryCache):
        raise ValueError("this model compresses in its attention function: stop() that before you use a cache")
    if not training and not isinstance(cache, MemoryCache):
        return
    whole_rows(kwargs.get("attention_mask"))
    positions = kwargs.get("position_ids")
    if positions is not None:
        unbroken(positions)
    if isinstance(cache, MemoryCache):
        turns_keys_as(decoder, cache)
        cache.watched = True
        cache.continues(positions)


def turns_keys_as(decoder: nn.Module, cache: MemoryCache) -> None:
    """Refuse a cache that was built for a model with other rotary angles: it would rotate keys wrongly."""
    if decoder not in _ROPES:
        refuse(decoder.config, cache.schedule.window)
        _ROPES[decoder] = Rope(decoder.config)
    if not _ROPES[decoder].turns_as(cache.method.rope):
        raise ValueError(
            "this cache was built for other rotary angles than this model's: build one with build_cache(model, …)"
        )


def whole_rows(attention_mask: object) -> None:
    """Refuse padding: zeros would leave the mask after a compression, while what they wrote stays in the memory."""
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        raise ValueError("compression makes its own causal mask: pass no attention_mask, or a [batch, length] of ones")
    if not attention_mask.bool().all():
        raise ValueError(
            "attention_mask has zeros, and compression would mix padding into the memory: batch rows of equal length; "
            "where the prompt itself contains pad_token_id, pass attention_mask=torch.ones_like(input_ids)"
        )


def unbroken(positions: Tensor) -> None:
    """Refuse packed rows and gaps."""
    if not (positions.diff(dim=-1) == 1).all():
        raise ValueError(
            "position_ids restart or jump within a row: compression takes one unbroken text per row, so do not pack "
            "documents (join them with EOS under running positions instead)"
        )
