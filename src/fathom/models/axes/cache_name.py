"""The name of the cache argument: `cache` in transformers 5.24 and later, `past_key_values` before."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Hashable, Mapping
from typing import Any, TypeVar, cast

from torch import nn
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

CACHES = ("cache", "past_key_values", "cache_params")
"""The names under which a part may take the cache, newest first."""
Function = TypeVar("Function", bound=Callable[..., Any])


def first_of(names: Container[str]) -> str | None:
    """The first of the cache argument's possible names that is among these names."""
    return next((name for name in CACHES if name in names), None)


CACHE: str = first_of(inspect.signature(create_causal_mask).parameters) or "past_key_values"
"""The name in the installed transformers: of `generate`, of its masks and of every output."""


@functools.cache
def taken(kind: Hashable) -> str:
    """The name of the cache argument of a module class's `forward`; `CACHE` for a wrapper that takes any keyword."""
    return first_of(inspect.signature(cast(type[nn.Module], kind).forward).parameters) or CACHE


def passed(model: nn.Module, cache: Cache | None) -> dict[str, Any]:
    """The cache as a keyword argument of a model."""
    return {taken(cast(Hashable, type(model))): cache}


def returned(output: Any) -> Any:
    """The KV cache in a model's output; None if the output has none."""
    return getattr(output, CACHE, None)


def by_any_name(function: Function) -> Function:
    """Decorate a method that takes `past_key_values` so that it also takes the installed transformers' name for it.

    An engine's own cache, which is no `Cache`, stays where it is.
    """

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        if "cache" in kwargs and isinstance(kwargs["cache"], Cache | None):
            cache = kwargs.pop("cache")
            if cache is not None and kwargs.get("past_key_values") is not None:
                raise ValueError("cache and past_key_values are one argument: give one of them")
            if cache is not None:
                kwargs["past_key_values"] = cache
        return function(*args, **kwargs)

    own = inspect.signature(function)
    parts = [one.replace(name=CACHE) if one.name == "past_key_values" else one for one in own.parameters.values()]
    named.__signature__ = own.replace(parameters=parts)  # type: ignore[attr-defined]  # transformers asks by it
    return named  # type: ignore[return-value]


def cache_among(given: Mapping[str, Any]) -> Any:
    """The KV cache among a forward pass's arguments, under any of its names; None if there is none."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def with_cache(given: Mapping[str, Any], model: nn.Module, cache: Cache) -> dict[str, Any]:
    """A forward pass's arguments with the cache replaced, under the name that the model's `forward` uses."""
    return {name: value for name, value in given.items() if name not in CACHES} | passed(model, cache)
