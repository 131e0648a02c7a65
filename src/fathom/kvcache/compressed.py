"""Compresses prompts without any other change to the caller's code. For example:

    with compressed(model, "tova", ratio=0.5):
        model.generate(ids)

Here `ratio` is a share of the *prompt*: a prompt of T tokens leaves `ratio · T` entries. In the caches of
`build_cache`, `ratio` is a share of a fixed window, and the cache is compressed whenever the window is full. With
`window` every input is read into such a cache, as an evaluation needs whose inputs are scored and not continued. With
`prefill_chunk_size`, `generate` reads a prompt in chunks, and the prompt is compressed after the last chunk.

Of methods that select entries, `Selection.choose` in `method.py` chooses which stay, by the scores of the method's own
file. `press.py` makes methods of kvpress's presses, and `paced.py` has the memory of those that count forward passes.
`Method.for_prompt` in `method.py` decides which prompts stay whole. Without `window` and `while_decoding`, every layer
with a sliding window keeps its own cache, because the memory has no maximum (`Once.most` in `schedule.py`).
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from fathom.models.axes.cache_name import cache_among, with_cache

from .build import METHODS, UntunedWarning, cache_of, config_of, make_method, untuned
from .cache import MemoryCache, refuse_compiling
from .method import Method
from .padding_check import left_padding, real_tokens
from .rope import Rope, refuse
from .schedule import UNTOUCHED, Eager, Once, Schedule
from .watch import decoder_of, named, watch

ASSISTED = ("assistant_model", "prompt_lookup_num_tokens")
"""Arguments of `generate` by which guesses come before the tokens that are generated."""
_OPEN: WeakSet[nn.Module] = WeakSet()
"""Decoders whose prompts are being compressed."""


class NothingCompressedWarning(UserWarning):
    """Warns that a prompt stays uncompressed, because its share of entries has no room for more than the sinks."""


@contextmanager
def compressed(
    model: PreTrainedModel,
    method: str | type[Method] = "snapkv",
    ratio: float | None = None,
    sinks: int | None = None,
    while_decoding: bool = False,
    window: int | None = None,
    quantized: str | None = None,
    **options: object,
) -> Iterator[None]:
    """Compress every prompt that `model` reads into a new cache within the `with` block.

    Each layer is compressed as soon as it has read the whole prompt, so only one layer at a time holds all entries. A
    prompt is what the first forward pass reads, or what `generate` is given. Prompts of a batch may be padded on the
    left: each keeps the share of its own length. A prompt whose share is no more than the sinks stays whole, which the
    first of them says (`NothingCompressedWarning`).

    An empty `DynamicCache` that is passed as `past_key_values` becomes the compressed cache, a `MemoryCache`; without
    one, `past_key_values` of the model's output is a new one. Its `.branch()` answers one of several questions about
    one context, also after the block.

    Args:
        model: Any decoder of the supported families.
        method: A name of `METHODS`, also with a plus (`drop+int8`), or a class of one's own (`press` makes one from a
            press of kvpress).
        ratio: The share of the prompt's entries to keep, sinks included; by default 0.5, or that of the press.
        sinks: First entries that are never compressed; by default 4, with a press 0.
        while_decoding: Compress again whenever the cache reaches the prompt's length. Otherwise the prompt is
            compressed once, and the answer's entries are added.
        window: Hold at most so many entries, compressed whenever they are full as in `build_cache`; `ratio` is then a
            share of them.
        quantized: Store entries as `int8` or `int4`, as in `build_cache`.
        options: Options of the method; with `window` also `kept`, the entries that stay beside the sinks.
    """
    made, quantized = found(method, quantized)
    ratio, sinks = made.own_ratio if ratio is None else ratio, made.own_sinks if sinks is None else sinks
    config, decoder = config_of(model), decoder_of(model)
    refuse_block(decoder, ratio, sinks, window, while_decoding, "kept" in options)
    kind = Eager if while_decoding else Once
    refuse(config, window or (0 if while_decoding else sys.maxsize))
    rope = Rope(config)
    rope.ask(decoder)  # before the hook, which would compress what the question reads

    def method_for(length: int) -> Method:
        if window is not None:
            return make_method(config, made, window, sinks, ratio, **options)  # type: ignore[arg-type]
        return made.for_prompt(kind, length, sinks, ratio, rope, **options)

    if window is not None:
        method_for(0)  # values that are refused
    whole = False  # whether a prompt was read that stays whole

    def new(length: int, attention_mask: object) -> MemoryCache:
        nonlocal whole
        chosen = method_for(length)
        refuse(config, chosen.schedule.window)
        touched = chosen.schedule.window < UNTOUCHED
        if touched and (words := untuned(config, chosen)):
            warnings.warn(words, UntunedWarning, stacklevel=2)
        if not (touched or whole):
            whole = True
            warnings.warn(
                f"compressed: a prompt of {length} tokens stays whole, because ratio={ratio} leaves "
                f"{made.left(length, ratio)} of them and sinks={sinks}; give more tokens, a larger ratio or fewer "
                "sinks",
                NothingCompressedWarning,
                stacklevel=2,
            )
        cache = cache_of(chosen, config, model, quantized)
        if attention_mask is not None and (pads := left_padding(real_tokens(attention_mask))):
            cache.pad(pads, lambda pad: method_for(length - pad))
        return cache

    def replace(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            refuse_compiling()
        given = named(module, args, kwargs)
        own = cache_among(given)
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if tokens is None or (isinstance(own, MemoryCache) and (own.seen or not own.schedule.eager)):
            return None  # a further turn, or a cache of build_cache
        use_cache = given.get("use_cache")
        if not isinstance(own, MemoryCache):  # one that was reset is filled with the next prompt
            refuse_cache(own, bool(config.use_cache if use_cache is None else use_cache), module.training)
        memory = new(asked.prompt(tokens.shape[1]), given.get("attention_mask"))
        if asked.assisted:
            memory.activate_past_recording()
        if own is not None:
            memory.take_over(own)
        return (), {**with_cache(given, module, memory if own is None else own), "use_cache": True}

    watch(model)
    hook = decoder.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)
    try:
        with noted(decoder), prompts_of(model) as asked:
            yield
    finally:
        hook.remove()


def found(method: str | type[Method], quantized: str | None) -> tuple[type[Method], str | None]:
    """The class of a method, and the way in which its entries are stored, from a name or a class."""
    if isinstance(method, type) and issubclass(method, Method):
        return method, quantized
    if not isinstance(method, str):
        raise ValueError(f"{type(method).__name__} is no method: give a method's name or class, or press(…) of a press")
    name, plus, stored = method.partition("+")
    if name not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if plus and quantized is not None:
        raise ValueError(f"quantized={quantized}: method '{method}' names a quantization already; give only one")
    return METHODS[name], stored if plus else quantized


def refuse_block(
    decoder: nn.Module, ratio: float, sinks: int, window: int | None, while_decoding: bool, kept: bool
) -> None:
    """Refuse a block nested in another one, and invalid values, before the first prompt is read."""
    Schedule.at(1 << 20, sinks, ratio)
    if decoder in _OPEN:
        raise ValueError(
            "compressed: this model is in a `with compressed(...)` block already; a second one compresses twice"
        )
    if window is None and kept:
        raise ValueError("kept is the number of entries that remain in a window: give window too")
    if window is not None and while_decoding:
        raise ValueError(f"window={window} compresses while decoding too: leave while_decoding out")


@contextmanager
def noted(decoder: nn.Module) -> Iterator[None]:
    """Record, within the block, that a decoder's prompts are being compressed."""
    _OPEN.add(decoder)
    try:
        yield
    finally:
        _OPEN.discard(decoder)


def refuse_cache(own: Any, use_cache: bool, training: bool) -> None:
    """Refuse calls within the block that would leave a prompt uncompressed."""
    if own is None and training:
        raise ValueError("compressed: the model is in training mode: call model.eval(), or use compress_in_training")
    if own is None and not use_cache:
        raise ValueError("compressed: use_cache=False keeps nothing that could be compressed; leave use_cache out")
    if own is None:
        return
    if type(own) is not DynamicCache or own.offloading:
        kind = "an offloaded cache" if type(own) is DynamicCache else f"a {type(own).__name__}"
        raise ValueError(
            f"compressed: {kind} cannot be compressed; pass none or an empty DynamicCache as past_key_values, and "
            "leave out cache_implementation"
        )
    if own.get_seq_length():
        raise ValueError(
            f"compressed: past_key_values holds {own.get_seq_length()} tokens that were read without compression; pass "
            "none, an empty DynamicCache, or a cache that was filled in a `with compressed(...)` block"
        )


class Asked(threading.local):
    """The prompt length of the running `model.generate` call, and whether guesses follow it, for each thread
    separately."""

    tokens = 0
    """The length of its prompt; 0 outside it."""
    assisted = False
    """Whether its first pass has guesses behind the prompt."""

    def prompt(self, read: int) -> int:
        """The prompt's length, given that the first forward pass reads `read` tokens, which are fewer if the prompt
        comes in chunks."""
        return self.tokens if self.assisted else max(self.tokens, read)


@contextmanager
def prompts_of(model: PreTrainedModel) -> Iterator[Asked]:
    """Record the prompt length of each `model.generate` call within the block."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    asked = Asked()
    if not hasattr(base, "generate"):
        yield asked
        return
    generate, before = base.generate, vars(base).get("generate")

    @functools.wraps(generate)
    def told(*args: object, **kwargs: Any) -> object:
        found = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        settings = kwargs.get("generation_config") or next(iter(args[1:2]), None) or base.generation_config

        def option(name: str) -> object:
            return kwargs.get(name, getattr(settings, name, None))

        if option("assistant_early_exit") or option("assistant_model") is base:
            raise ValueError(
                "compressed: a model that is its own draft model would draft from compressed prompts: leave "
                "assistant_early_exit out, and give another model as assistant_model"
            )
        asked.tokens = max((x.shape[1] for x in found if isinstance(x, Tensor)), default=0)
        asked.assisted = any(map(option, ASSISTED))
        try:
            return generate(*args, **kwargs)
        finally:
            asked.tokens, asked.assisted = 0, False

    base.generate = told
    try:
        yield asked
    finally:
        if before is None:
            del base.generate
        else:
            base.generate = before
