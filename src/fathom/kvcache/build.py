"""Names to methods, and methods to caches."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from . import methods
from .memory import Memory, MemoryCache
from .method import Method
from .observe import observe
from .quantized import QuantizedMemory
from .rope import Rope, refuse
from .watch import decoder_of, watch
from .whole import WHOLE

METHODS: dict[str, type[Method]] = {
    found.name: found for found in vars(methods).values() if isinstance(found, type) and issubclass(found, Method)
}
"""The compression methods of `methods.py`, by name; `WHOLE` has the caches that are not compressed."""
NAMES = ("full", *(name for name, method in METHODS.items() if method.by_name))
"""The methods that a recipe and the command line may name."""


def build_cache(
    model_or_config: PreTrainedModel | PreTrainedConfig,
    method: str | Method = "freqkv",
    window: int | None = None,
    sinks: int = 4,
    ratio: float = 0.5,
    kept: int | None = None,
    quantized: str | None = None,
    **options: object,
) -> Cache:
    """An empty cache that holds at most `window` entries per layer, for `generate` or a call of the model.

    Args:
        model_or_config: The model; if only its configuration is given, call `watch(model)` before use.
        method: A name of `METHODS`, one of `WHOLE` (everything, in transformers' own caches, whatever the schedule), or
            a trained `Method`, which brings schedule and options.
        window: N, most entries of a layer: best the length that the weights were trained at. For `full_static`, the
            tokens to allocate.
        sinks: S, first entries that are never compressed.
        ratio: Share of the window that a compression leaves.
        kept: L, the entries that a compression leaves beside the sinks, in place of `ratio`.
        quantized: Store entries through a transformers backend: `quanto`, `hqq` or `fp8`.
        options: Options of the method, as its class documents them.
    """
    model = model_or_config if isinstance(model_or_config, nn.Module) else None
    config = config_of(model_or_config)
    if isinstance(method, str) and method in WHOLE:
        if options:
            raise ValueError(
                f"{', '.join(options)}: method '{method}' is transformers' plain cache and has no such option"
            )
        return WHOLE[method](config, window, quantized)
    chosen = make_method(config, method, window, sinks, ratio, kept, **options)
    if chosen.observed and model is None:
        raise ValueError(f"{chosen.name} looks at queries: give build_cache the model, not its configuration")
    layers = [
        Memory(chosen) if quantized is None else QuantizedMemory(chosen, quantized)
        for _ in range(config.num_hidden_layers)
    ]
    cache = MemoryCache(chosen, layers, _shape(config, model))
    if model is not None:
        watch(model)
        if chosen.observed:
            observe(model)
    return cache


def _shape(config: PreTrainedConfig, model: nn.Module | None) -> dict[str, object]:
    """What of a model decides a cache's tensors; the number type is not known of every configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dtype = config.dtype if model is None else model.dtype
    return {"layers": config.num_hidden_layers, "kv_heads": heads, "dtype": None if dtype is None else str(dtype)}


def config_of(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder."""
    if isinstance(model_or_config, nn.Module):
        return decoder_of(model_or_config).config
    return model_or_config.get_text_config(decoder=True)


def make_method(
    config: PreTrainedConfig,
    method: str | Method,
    window: int | None = None,
    sinks: int = 4,
    ratio: float = 0.5,
    kept: int | None = None,
    **options: object,
) -> Method:
    """A method with its schedule, for models of this configuration."""
    if isinstance(method, Method):
        refuse(config, method.schedule.window)
        if (window, sinks, ratio, kept, options) != (None, 4, 0.5, None, {}):
            raise ValueError(f"this {method.name} brings its own schedule and options: give the method alone")
        if not method.rope.turns_as(Rope(config)):
            raise ValueError(f"this {method.name} was made for other rotary angles than this model's: make another")
        return method
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join([*WHOLE, *METHODS])}, got {method!r}")
    if window is None:
        raise ValueError("window must be given: the number of entries to hold, at best the length trained at")
    refuse(config, window)
    chosen = METHODS[method]
    return chosen(chosen.schedule_for(window, sinks, ratio, kept), Rope(config), **options)
