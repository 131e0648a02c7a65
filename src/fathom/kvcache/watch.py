"""Forward hooks for what a cache layer cannot do: split long inputs, observe queries, and refuse padding, packed
sequences and gaps.

A layer gets keys and values only. So a hook on the decoder looks at the arguments of every forward pass with a
compressed cache. It refuses those that would put something other than the text into the memory, reads all but the last
piece of an input that crosses a compression, and joins the hidden states of the pieces afterwards.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.utils import ModelOutput

from fathom.models.axes.cache_name import CACHE, cache_among

from .cache import MemoryCache
from .observe import observed_backend
from .padding_check import padded_right, real_tokens, unbroken, whole_mask
from .rope import Rope, refuse
from .states import STATES, family, has_states

_ROPES: WeakKeyDictionary[PreTrainedModel, Rope] = WeakKeyDictionary()
"""Rotary embeddings of decoders that were run with a compressed cache."""
if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLICED = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}
"""Arguments with one value for each token, and the dimension of the tokens."""


@dataclass
class Pass:
    """The state of a running forward pass."""

    earlier: list[ModelOutput] = field(default_factory=list)
    """Outputs of the pieces before the last."""
    shows: bool = False
    """Whether its attention shows queries to memories."""


class _Passes(threading.local):
    """The forward passes that a thread has begun in each decoder, the innermost last."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[PreTrainedModel, list[Pass]] = WeakKeyDictionary()


_UNDER_WAY = _Passes()
_SHOWING: WeakKeyDictionary[PreTrainedModel, tuple[str, int]] = WeakKeyDictionary()
"""The attention backend to return to, and the passes of all threads that show their queries."""
_LOCK = threading.Lock()


def decoder_of(model: nn.Module) -> PreTrainedModel:
    """The decoder module, which makes masks and positions, also if the model is in a PEFT wrapper."""
    find = getattr(model, "get_decoder", None)
    return cast("PreTrainedModel", model if find is None else find())


def watch(model: nn.Module) -> None:
    """Add hooks to the decoder of `model` for forward passes with a compressed cache; a second call has no effect."""
    decoder = decoder_of(model)
    if _before not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before, with_kwargs=True)
        decoder.register_forward_hook(_after, always_call=True)


def named(decoder: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward pass, all by name."""
    return {**inspect.signature(decoder.forward).bind_partial(*args).arguments, **kwargs} if args else kwargs


def _before(
    decoder: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]] | None:
    given = named(decoder, args, kwargs)
    cache = cache_among(given)
    training = getattr(decoder.config, "_attn_implementation", None) == "fathom_kvcache"
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if not isinstance(cache, MemoryCache):
        if training and mask is not None:
            padded_right(real_tokens(mask))
        if training and positions is not None:
            unbroken(positions)
        return None
    if training:
        raise ValueError("this model compresses in training: call stop() of that compression before you use a cache")
    if torch.compiler.is_compiling():
        cache.make_room(tokens_of(given).shape[1])  # what is checked below was checked when the prompt was read
        return None
    turns_keys_as(decoder, cache)
    if not cache.watched:
        cache.method.rope.ask(decoder)
        cache.watched = True
    rows, length = tokens_of(given).shape[:2]
    whole_mask(mask, (rows, cache.seen + length), bool(cache.pads))
    cache.admit(mask)
    places = cache.continues(positions, length)
    now = Pass()
    if positions is None and has_states(decoder.config):  # some count from 0 in each pass
        given = {**given, "position_ids": places.clamp(min=0).to(tokens_of(given).device)}
    given = _read_all_but_the_last(decoder, cache, given, now)
    if cache.is_compileable:  # a mask that `generate` made may be of another piece
        given = {**given, "attention_mask": None}
    tokens = tokens_of(given)
    cache.make_room(tokens.shape[1])
    if cache.method.observed:
        now.shows = True
        show(decoder)
    if cache.pads:
        places = places[:, -tokens.shape[1] :].clamp(min=0).to(tokens.device)
        given = {**given, "attention_mask": _masks(decoder, cache, tokens), "position_ids": places}
    _UNDER_WAY.of.setdefault(decoder, []).append(now)
    return (), given


def show(decoder: PreTrainedModel) -> None:
    """Switch the decoder to the attention backend that shows queries to memories, which changes nothing else."""
    with _LOCK:
        plain, passes = _SHOWING.get(decoder, (decoder.config._attn_implementation, 0))
        if not passes:
            decoder.config._attn_implementation = observed_backend(decoder)
        _SHOWING[decoder] = plain, passes + 1


def hide(decoder: PreTrainedModel) -> None:
    """Restore the decoder's attention backend, unless another forward pass still needs the one that `show` has set."""
    with _LOCK:
        plain, passes = _SHOWING.pop(decoder)
        if passes > 1:
            _SHOWING[decoder] = plain, passes - 1
        else:
            decoder.config._attn_implementation = plain


def _masks(decoder: PreTrainedModel, cache: MemoryCache, tokens: Tensor) -> object:
    """The attention masks for the next tokens of a padded batch: compressed layers see their memory, other layers all
    tokens that are no padding."""
    length, config = tokens.shape[1], family(decoder.config)
    memory = cache.mask(length).to(tokens.device)
    if not (any(cache.is_sliding) or has_states(config)):
        return memory
    text = (torch.arange(cache.seen + length) >= torch.tensor(cache.pads).unsqueeze(1)).to(tokens.device)
    new = text[:, -length:]
    masks: dict[str, object] = dict.fromkeys(STATES, None if new.all() else new)
    like = tokens.new_empty(*tokens.shape[:2], 1, dtype=decoder.dtype)
    given = {"inputs_embeds": like, CACHE: cache, "position_ids": None}
    masks["full_attention"] = create_causal_mask(config, attention_mask=memory, **given)
    if any(cache.is_sliding):
        masks["sliding_attention"] = create_sliding_window_causal_mask(config, attention_mask=text, **given)
    return masks


def tokens_of(given: dict[str, Any]) -> Tensor:
    """The tokens of a forward pass, or their embeddings: `[B, T, …]`."""
    ids = given.get("input_ids")
    return cast("Tensor", given["inputs_embeds"] if ids is None else ids)


def _after(decoder: PreTrainedModel, args: tuple[object, ...], output: Any) -> Any:
    """Restore the attention backend, and join the hidden states of all pieces of an input; also called after an
    error."""
    if torch.compiler.is_compiling() or not (under_way := _UNDER_WAY.of.get(decoder)):
        return None
    now = under_way.pop()
    if now.shows:
        hide(decoder)
    return joined([*now.earlier, output]) if now.earlier and output is not None else None


def _read_all_but_the_last(
    decoder: PreTrainedModel, cache: MemoryCache, given: dict[str, Any], now: Pass
) -> dict[str, Any]:
    """Read all pieces of an input but the last, and return the arguments for the last piece."""
    length = tokens_of(given).shape[1]
    cuts = cache.cuts(length)
    if len(cuts) < 2:
        return given
    sliced = {name: dim for name, dim in SLICED.items() if isinstance(given.get(name), Tensor)}
    for start, part in zip(accumulate(cuts, initial=0), cuts, strict=False):
        parts = {name: given[name].narrow(dim, start, part) for name, dim in sliced.items()}
        piece = {**given, **parts, "attention_mask": None}
        if start + part < length:
            now.earlier.append(decoder(**{**piece, "return_dict": True, "use_cache": True}))
    return piece


def joined(outputs: list[ModelOutput]) -> ModelOutput:
    """The output of a decoder for a whole input, joined from the outputs for the input's pieces."""
    last = outputs[-1]
    if not isinstance(last, ModelOutput):
        raise ValueError("an input during which the cache is compressed needs return_dict=True")
    if getattr(last, "attentions", None):
        raise ValueError(
            "attention weights before and after a compression of the cache differ in shape: read the input in "
            "pieces (fathom.kvcache.chunks)"
        )
    for name, value in last.items():
        parts = [getattr(output, name) for output in outputs]
        if isinstance(value, Tensor) and name == "last_hidden_state":
            last[name] = torch.cat(parts, dim=1)
        elif name == "hidden_states" and value is not None:
            last[name] = tuple(torch.cat(layer, dim=1) for layer in zip(*parts, strict=True))
        elif name == "recurrence_state" and value:
            last[name] = {key: _along_tokens([part[key] for part in parts], outputs) for key in value}
    return last


def _along_tokens(parts: list[Any], outputs: list[ModelOutput]) -> Any:
    """Join a recurrence's state over pieces of an input: values per token are concatenated, and of other values the
    last piece's is taken."""
    lengths = [output.last_hidden_state.shape[1] for output in outputs]
    if all(isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == n for x, n in zip(parts, lengths, strict=True)):
        return torch.cat(parts, dim=1)
    return parts[-1]


def turns_keys_as(decoder: PreTrainedModel, cache: MemoryCache) -> None:
    """Refuse a cache that was built for a model with other rotary angles, because it would rotate keys wrongly."""
    if decoder not in _ROPES:
        refuse(decoder.config, cache.schedule.window)
        _ROPES[decoder] = Rope(decoder.config)
    if not _ROPES[decoder].turns_as(cache.method.rope):
        raise ValueError(
            "this cache was built for a model with other RoPE angles: build one with build_cache(model, …)"
        )
