"""Stores compressed caches on disk: a context that was read once can be used for questions in another process.

A file is in safetensors: the entries of all layers, with the method, its schedules and the padding in the header. After
a prompt that is compressed once no method is needed any more, so what a press of kvpress has left is stored too.
"""

from __future__ import annotations

import copy
import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from fathom.models.registry import recurrence_class
from fathom.models.trips.slots import banks_of, plan

from .build import METHODS, config_of
from .cache import MemoryCache
from .memory import Memory
from .method import Held, Method, Selection
from .padded import Padded
from .rope import Rope, refuse
from .schedule import Eager, Once, Schedule
from .states import State, own_layers
from .watch import decoder_of, watch

SCHEDULES = {kind.__name__: kind for kind in (Schedule, Eager, Once)}
STORED = ("keys", "values", "first", "queries")
"""Tensors of a layer; the last two are None in some."""


class Kept(Selection):
    """Stands for the method of a stored prompt if that method has no name: further entries are appended, and none are
    removed.

    Args:
        schedule: That of the prompt.
        rope: The model's rotation.
        observed: As of the method that chose.
        moves: Whether the entries got consecutive positions.
    """

    name, by_name = "kept", False

    def __init__(self, schedule: Schedule, rope: Rope, observed: int = 0, moves: bool = True) -> None:
        super().__init__(schedule, rope)
        self.observed, self.moves = observed, moves

    def scores(self, held: Held) -> Tensor:
        """Raise a `ValueError`: the method that scored the entries is not in the file."""
        raise ValueError("a cache from a file holds one compressed prompt: read another prompt into a new cache")


def save_cache(cache: MemoryCache, path: str | Path) -> None:
    """Write a cache whose memories grow, with its entries, to a safetensors file."""
    if not cache.seen:
        raise ValueError("this cache is empty: read the context before it is stored")
    name = cache.method.name
    named = METHODS.get(name) is type(cache.method) and cache.method.by_name
    layers = [_described(layer, type(cache.method) if named else Kept) for layer in cache.layers]
    if not named and not all(part.seen >= part.prompt for layer in cache.layers for part in _memories(layer)):
        raise ValueError(
            f"a cache of {name}, which may compress again, cannot be stored: METHODS cannot rebuild this method"
        )
    about = {
        "method": name if named else Kept.name,
        "angles": cache.method.rope.angles.hex(),
        "seen": cache.seen,
        "offset": cache.offset,
        "pads": cache.pads,
        "layers": layers,
    }
    tensors = {
        f"{i}.{pad}.{name}": x.contiguous()
        for i, layer in enumerate(cache.layers)
        for pad, part in _parts(layer).items()
        for name in STORED
        if (x := getattr(part, name, None)) is not None
    }
    for i, layer in enumerate(cache.layers):
        if (state := _state(layer)) is not None:
            tensors |= {f"{i}.{name}": x.contiguous() for name, x in state.held().items()}
    Path(path).write_bytes(save(tensors, {"fathom_kvcache": json.dumps(about)}))  # with the usual permissions


def load_cache(model: PreTrainedModel, path: str | Path) -> MemoryCache:
    """Load a cache from a file that `save_cache` wrote, onto the device of `model`, which must have the RoPE angles of
    the model that read the context."""
    with safe_open(str(path), "pt", device=str(model.device)) as file:
        about: dict[str, Any] = json.loads((file.metadata() or {}).get("fathom_kvcache", "null"))
        if about is None:
            raise ValueError(f"{path}: not a cache that save_cache wrote")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    if about["method"] not in METHODS and about["method"] != Kept.name:
        raise ValueError(f"{path}: method {about['method']!r} is not in METHODS: add it before the cache is loaded")
    config = config_of(model)
    refuse(config, 0)
    rope = Rope(config)
    rope.ask(decoder_of(model))
    if rope.angles.hex() != about["angles"]:
        raise ValueError(f"{path}: this cache was filled by a model with other RoPE angles")
    watch(model)
    own = own_layers(config)
    which = list(range(len(own))) if len(about["layers"]) == len(own) else looped(config, len(about["layers"]))
    if which is None:
        raise ValueError(f"{path}: this cache was filled by a model with other layers or iterations")
    layers = [
        _layer(i, said, about, rope, tensors, own[layer])
        for i, (said, layer) in enumerate(zip(about["layers"], which, strict=True))
    ]
    cache = MemoryCache(next(layer.method for layer in layers if isinstance(layer, Memory)), layers)
    cache.offset = about["offset"]
    return cache


def looped(config: PreTrainedConfig, count: int) -> list[int] | None:
    """The model's layer of each of `count` cache layers, of which a loop has one for each iteration; None if no number
    of iterations has so many."""
    most = recurrence_class(config).most_trips(config) if config.model_type == "fathom" else 0
    found = (banks_of(plan(config, trips)) for trips in range(2, most + 1))
    return next((layers for layers in found if len(layers) == count), None)


def _parts(layer: CacheLayerMixin) -> dict[int, CacheLayerMixin]:
    """The objects that hold a layer's entries, keyed by the padding of the sequences."""
    return dict(layer.memories) if isinstance(layer, Padded) else {0: layer}


def _memories(layer: CacheLayerMixin) -> list[Memory]:
    """The memories that hold the entries of a compressed layer; empty for other layers."""
    return [part for part in _parts(layer).values() if isinstance(part, Memory)]


def _state(layer: object) -> State | None:
    """The recurrent state of a layer, whether alone or next to its entries; None if it has no state."""
    return layer.state if isinstance(layer, Memory) else layer if isinstance(layer, State) else None


def _described(layer: CacheLayerMixin, kind: type[Method]) -> dict[str, object]:
    """The description of a layer, without its tensors, for a file; its methods will be rebuilt as the class `kind`."""
    if not isinstance(layer, CacheLayerMixin):
        return {"keeps": "no keys"}
    if type(layer) is DynamicSlidingWindowLayer:
        return {"sees": layer.sliding_window}
    if type(layer) not in (Memory, Padded):
        raise ValueError(
            f"a cache of {type(layer).__name__} layers cannot be stored: build it without static, quantized or a "
            "press for decoding"
        )
    assert isinstance(layer, Memory)
    methods: dict[object, Method] = {"": layer.method}
    methods |= {pad: part.method for pad, part in _parts(layer).items() if isinstance(part, Memory)}
    return {"layer": layer.layer, "methods": {str(pad): _recipe(method, kind) for pad, method in methods.items()}}


def _recipe(method: Method, of: type[Method]) -> dict[str, object]:
    """The arguments, schedule and options, from which a method's class can be rebuilt, under the names of the method's
    attributes."""
    options = list(inspect.signature(of).parameters)[2:]
    kind = type(method.schedule).__name__
    return {"schedule": [kind, asdict(method.schedule)], "options": {name: getattr(method, name) for name in options}}


def _layer(
    i: int,
    said: dict[str, Any],
    about: dict[str, Any],
    rope: Rope,
    tensors: dict[str, Tensor],
    own: tuple[object, State | None],
) -> CacheLayerMixin:
    """Rebuild a layer from a file, with its entries and its state."""
    if (state := copy.deepcopy(own[1])) is not None:
        state.take({name.partition(".")[2]: x for name, x in tensors.items() if name.startswith(f"{i}.state.")})
    if "keeps" in said:
        return cast("CacheLayerMixin", own[0] if state is None else state)

    def method(pad: object) -> Method:
        kind, numbers = said["methods"][str(pad)]["schedule"]
        return METHODS.get(about["method"], Kept)(
            SCHEDULES[kind](**numbers), rope, **said["methods"][str(pad)]["options"]
        )

    layer: CacheLayerMixin
    if "sees" in said:
        layer = DynamicSlidingWindowLayer(sliding_window=said["sees"])
        layer.cumulative_length = about["seen"]
    else:
        layer = Memory(method(""), said["layer"])
        layer.state = state
        if about["pads"]:
            layer = Padded(layer, about["pads"], method)
            layer.is_initialized = True
        layer.seen = about["seen"]
    for pad, part in _parts(layer).items():
        found = {name: tensors.get(f"{i}.{pad}.{name}") for name in STORED}
        keys, values = found["keys"], found["values"]
        assert keys is not None and values is not None
        part.lazy_initialization(keys, values)
        part.keys, part.values = keys, values
        if isinstance(part, Memory):
            part.seen, part.first, part.queries = about["seen"] - pad, found["first"], found["queries"]
            part.bare = part.wears and part.compressions > 0
    return layer
