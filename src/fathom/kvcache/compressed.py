"""Compressing prompts without any other change to the caller's code.

    with compressed(model, "tova", ratio=0.5):
        model.generate(ids)

Here `ratio` is a share of the *prompt*: a prompt of T tokens leaves `ratio · T` entries. In the caches of
`build_cache`, `ratio` is a share of a fixed window, and the cache is compressed whenever the window is full.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .build import METHODS, UntunedWarning, cache_of, config_of, untuned
from .cache import MemoryCache
from .method import Method
from .rope import Rope, refuse
from .rows import left_padding, real_tokens
from .schedule import SINKS, Once, Schedule
from .watch import decoder_of, named, watch


@contextmanager
def compressed(
    model: PreTrainedModel,
    method: str = "snapkv",
    ratio: float = 0.5,
    sinks: int = SINKS,
    while_decoding: bool = False,
    **options: object,
) -> Iterator[None]:
    """Compress every prompt that `model` reads into a new cache within the `with` block.

    Prompts of a batch may be padded on the left: each keeps the share of its own length.

    The prompt is read in full and compressed when the next token arrives. `past_key_values` of the model's output, or
    of `model.generate(…, return_dict_in_generate=True)`, is then the compressed cache. Its `.branch()` answers one of
    several questions about one context.

    Args:
        model: Any decoder of the supported families.
        method: A name of `METHODS`.
        ratio: The share of the prompt's entries to keep, sinks included.
        sinks: First entries that are never compressed.
        while_decoding: Compress again whenever the cache reaches the prompt's length. Otherwise the prompt is
            compressed once, and the answer's entries are added.
        options: Options of the method.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    config, decoder = config_of(model), decoder_of(model)
    kind = Schedule if while_decoding else Once
    Schedule.at(1 << 20, sinks, ratio)  # invalid values are refused here, not at the first prompt

    def compressible(length: int) -> bool:
        return length >= sinks + 2 and 0 < round(ratio * length) - sinks < length - sinks

    def new(length: int, attention_mask: object) -> MemoryCache | None:
        if not compressible(length):
            return None
        refuse(config, length)
        rope = Rope(config)

        def method_for(pad: int) -> Method:
            window = length - pad if compressible(length - pad) else 1 << 40  # shorter rows are left alone
            return METHODS[method](kind.at(window, sinks, ratio), rope, **options)

        if words := untuned(config, chosen := method_for(0)):
            warnings.warn(words, UntunedWarning, stacklevel=2)
        cache = cache_of(chosen, config, model)
        if attention_mask is not None and (pads := left_padding(real_tokens(attention_mask))):
            cache.pad(pads, method_for)
        return cache

    def replace(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        given = named(module, args, kwargs)
        cache = given.get("past_key_values")
        fresh = isinstance(cache, DynamicCache) and type(cache) is DynamicCache and cache.get_seq_length() == 0
        wanted = cache is None and given.get("use_cache", config.use_cache) is not False
        if not fresh and not (wanted and not module.training):
            return None
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        memory = None if tokens is None else new(tokens.shape[1], given.get("attention_mask"))
        return None if memory is None else ((), {**given, "past_key_values": memory, "use_cache": True})

    watch(model)
    hook = decoder.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
