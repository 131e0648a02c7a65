"""Build caches by the name of a method.

`policy.py` decides the schedule that a command's method gets: each value is the requested one, else the checkpoint's,
else the default. `schedule.py` defines N, S, L and γ. `press.py` makes methods of kvpress's presses. `stored.py` says
which caches `save_cache` stores. `rope.py` (`refuse`) refuses models whose keys cannot be moved, and loops with
`kv: first`, tokens that halt, or iterations that read others.
"""

from __future__ import annotations

import warnings
from typing import cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from . import methods
from .cache import MemoryCache
from .memory import Memory
from .method import Method
from .observe import observed_backend
from .quantized import QuantizedMemory
from .rope import Rope, left_alone, refuse
from .schedule import RATIO, SINKS, Schedule
from .states import State, family, has_states, own_layers
from .static import StaticCache, StaticMemory
from .watch import decoder_of, watch
from .whole import WHOLE

METHODS: dict[str, type[Method]] = {
    found.name: found for found in vars(methods).values() if isinstance(found, type) and issubclass(found, Method)
}
"""The compression methods of `methods.py`, by name; `WHOLE` has the caches that are not compressed."""
NAMES = ("full", *(name for name, method in METHODS.items() if method.by_name))
"""The methods that a recipe and the command line may name."""


def base(method: str) -> str:
    """The method in a name such as `drop+int8`, i.e. the part before the plus; the part after it says how entries are
    stored."""
    return method.partition("+")[0]


class UntunedWarning(UserWarning):
    """Warns that a method that mixes entries was requested for a model that was not tuned under this method."""


def build_cache(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    method: str | Method | type[Method] = "freqkv",
    window: int | None = None,
    sinks: int | None = None,
    ratio: float | None = None,
    kept: int | None = None,
    quantized: str | None = None,
    static: bool = False,
    **options: object,
) -> Cache:
    """An empty cache that holds at most `window` entries per layer, for `generate` or a forward pass.

    Args:
        model_or_config: The model; if only its configuration is given, call `watch(model)` before use.
        method: A name of `METHODS`, also with `quantized` behind a plus (`drop+int8`), one of `WHOLE` (uncompressed), a
            class of methods (see `press`), or a trained `Method`, which brings schedule and options.
        window: N, maximum entries of a layer, preferably the context length in training. For `full_static`, the tokens
            to allocate.
        sinks: S, first entries that are never compressed.
        ratio: Share of the window that a compression leaves.
        kept: L, entries that a compression leaves in addition to the sinks, instead of `ratio`.
        quantized: Store entries as `int8` or `int4` (kivi.py), or by a backend of transformers: `quanto`, `hqq`, `fp8`.
        static: Hold the window in buffers that never grow, so that a decoding step compiles once.
        options: Options of the method, documented in its class.
    """
    model = model_or_config if isinstance(model_or_config, nn.Module) else None
    config = config_of(model_or_config)
    if isinstance(method, str) and "+" in method:
        if quantized is not None:
            raise ValueError(f"quantized={quantized}: method '{method}' names a quantization already; give only one")
        method, _, quantized = method.partition("+")
    if isinstance(method, str) and method in WHOLE:
        if static:
            raise ValueError(f"static=True: method '{method}' is transformers' own cache; use 'full_static'")
        if options:
            raise ValueError(
                f"{', '.join(options)}: method '{method}' is transformers' plain cache and has no such option"
            )
        return WHOLE[method](config, window, quantized)
    chosen = make_method(config, method, window, sinks, ratio, kept, **options)
    if isinstance(method, str) and (words := untuned(config, chosen)):
        warnings.warn(words, UntunedWarning, stacklevel=2)
    if static:
        refuse_static(chosen, config, quantized)
    return cache_of(chosen, config, model, quantized, static)


def cache_of(
    method: Method,
    config: PreTrainedConfig,
    model: nn.Module | None,
    quantized: str | None = None,
    static: bool = False,
) -> MemoryCache:
    """An empty cache of a method; layers with a sliding window smaller than the cache's window keep transformers'
    cache."""
    if method.observed and model is None:
        raise ValueError(f"{method.name} looks at queries: give build_cache the model, not its configuration")
    if model is not None:
        decoder = decoder_of(model)
        method.rope.ask(decoder)
        if method.observed:
            observed_backend(decoder)
        watch(model)

    if static:
        return StaticCache(method, [StaticMemory(method, i) for i in range(config.num_hidden_layers)])

    layers, most = own_layers(config), method.schedule.most
    ours = [i for i, (own, _) in enumerate(layers) if isinstance(own, CacheLayerMixin)]
    ours = [i for i in ours if left_alone(config, i, most) is None]

    def layer(i: int, own: object, state: State | None) -> CacheLayerMixin:
        sees = left_alone(config, i, most)
        if own is None and state is not None:
            return state  # transformers' caches take both
        if not isinstance(own, CacheLayerMixin):
            return own  # of a layer that keeps nothing, or reads what another one keeps
        if sees is not None:
            return DynamicSlidingWindowLayer(sliding_window=sees)
        mine = method.for_layer(ours.index(i), len(ours))
        if mine.memory is not None and quantized is not None:
            raise ValueError(f"quantized={quantized}: method {mine.name} cannot quantize its entries")
        kind = cast("type[Memory]", mine.memory or Memory)
        memory = kind(mine, i) if quantized is None else QuantizedMemory(mine, quantized, i)
        memory.state = state
        return memory

    return MemoryCache(method, [layer(i, *own) for i, own in enumerate(layers)])


def refuse_static(method: Method, config: PreTrainedConfig, quantized: str | None) -> None:
    """Raise an error if a static cache cannot be used with this method, model or storage; the error names the
    reason."""
    reasons = {
        f"{method.name} looks at queries, which a compiled graph does not show": method.observed > 0,
        f"quantized={quantized} stores entries in parts that grow": quantized is not None,
        "layers with states keep transformers' own cache": has_states(family(config)),
        f"layers that see {getattr(config, 'sliding_window', None)} tokens keep their own cache": any(
            left_alone(config, i, method.schedule.most) for i in range(config.num_hidden_layers)
        ),
        f"attention {config._attn_implementation!r} reads entries that are not written yet; use sdpa": (
            config._attn_implementation not in ("sdpa", "eager")
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"static=True: {reason}")


def untuned(config: PreTrainedConfig, method: Method) -> str | None:
    """A warning if a method needs weights tuned under it and this model's were not; else None."""
    schedule = method.schedule
    was = getattr(config, "kvcache", None)
    if not method.needs_tuning or (was and _tuned_for(was) == (method.name, schedule)):
        return None
    words = f"tuned for {_words(was)}" if was else "not tuned under compression"
    return f"this checkpoint was {words}; past {schedule.window} tokens expect poor output from {method.name}"


def _tuned_for(was: dict[str, object]) -> tuple[object, Schedule | None]:
    name, window, sinks, ratio, kept = (was.get(key) for key in ("method", "window", "sinks", "ratio", "kept"))
    try:
        return name, METHODS[str(name)].schedule_for(window, sinks, RATIO if ratio is None else ratio, kept)  # type: ignore[arg-type]
    except (KeyError, ValueError):
        return name, None


def _words(schedule: dict[str, object]) -> str:
    keys = ("window", "sinks", "ratio" if schedule.get("kept") is None else "kept")
    return ", ".join([str(schedule.get("method")), *(f"{key} {schedule.get(key)}" for key in keys)])


def config_of(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder."""
    if isinstance(model_or_config, nn.Module):
        return decoder_of(model_or_config).config
    return model_or_config.get_text_config(decoder=True)


def make_method(
    config: PreTrainedConfig,
    method: str | Method | type[Method],
    window: int | None = None,
    sinks: int | None = None,
    ratio: float | None = None,
    kept: int | None = None,
    **options: object,
) -> Method:
    """A method with its schedule, for models of this configuration."""
    if isinstance(method, Method):
        refuse(config, method.schedule.window)
        defaults = window is None and kept is None and sinks in (None, SINKS) and ratio in (None, RATIO)
        if options or not defaults:
            raise ValueError(f"this {method.name} has its own schedule and options: give no window, ratio or others")
        if not method.rope.turns_as(Rope(config)):
            raise ValueError(f"this {method.name} was made for a model with other RoPE angles: make one for this model")
        return method
    chosen = METHODS.get(method) if isinstance(method, str) else method
    if not isinstance(chosen, type) or not issubclass(chosen, Method):
        raise ValueError(f"method must be one of {', '.join([*WHOLE, *METHODS])}, got {method!r}")
    if window is None:
        raise ValueError("window must be given: maximum entries per layer, preferably the context length in training")
    refuse(config, window)
    ratio, sinks = chosen.own_ratio if ratio is None else ratio, chosen.own_sinks if sinks is None else sinks
    return chosen(chosen.schedule_for(window, sinks, ratio, kept), Rope(config), **options)
