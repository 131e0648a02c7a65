"""Check that values fit their type hints: recipes, results and the options of mechanisms all go through `fit`.

This file travels in exports, since the registry of mechanisms checks options with it. So it needs the standard library
alone.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union

Read = Callable[[Any, Any, str], Any]
"""(hint, value, name) to the value that its source, such as YAML or JSON, writes another way."""
UNIONS = (Union, types.UnionType)
LISTS = (tuple, list, Sequence)
MAPPINGS = (dict, Mapping)


def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    return _hints(typing.cast("Hashable", kind))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)  # annotations may be text
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def fit(hint: Any, value: Any, name: str = "", read: Read = lambda hint, value, name: value) -> Any:
    """The value, with its lists and tuples converted as a type hint says; a `ValueError` names the part that does not
    fit.

    In Python, true is also the integer 1; here it is not. An integer is also a number.

    Args:
        hint: A class, a Literal, a tuple, list, Sequence, dict or Mapping of hints, or a union.
        value: A scalar, a list, a mapping, or an instance of the class.
        name: The value's dotted position, for errors.
        read: Applied to every part before it is checked.
    """
    origin, arguments = _parts(hint)
    if origin in UNIONS:
        return _first(arguments, value, name, read)
    value = read(hint, value, name)
    if _is_one(origin, arguments, value):
        return value
    if origin in LISTS and isinstance(value, (tuple, list)):
        return _items(origin, arguments, value, name, read)
    if origin in MAPPINGS and isinstance(value, Mapping):
        key, item = arguments or (Any, Any)
        return {fit(key, k, name, read): fit(item, v, f"{name}.{k}", read) for k, v in value.items()}
    raise ValueError(f"{name.lstrip('.')}: not {allowed(hint)}")


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The class or special form of a hint, and its arguments; an alias (`type X = …`, NewType) is resolved."""
    if type(hint) is type:  # most hints, and none of what follows
        return hint, ()
    hint = getattr(hint, "__value__", getattr(hint, "__supertype__", hint))
    return typing.get_origin(hint) or hint, typing.get_args(hint)


def _is_one(origin: Any, arguments: tuple[Any, ...], value: object) -> bool:
    """Whether a value fits a type hint without conversion."""
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in arguments)
    if origin in (int, float):
        return isinstance(value, (int, origin)) and not isinstance(value, bool)
    listed = origin in (*LISTS, *MAPPINGS)
    return origin is Any or (isinstance(origin, type) and not listed and isinstance(value, origin))


def _first(hints: Sequence[Any], value: object, name: str, read: Read) -> object:
    """The value converted to the first of several type hints that accepts it."""
    if value is None and types.NoneType in hints:
        return None
    errors = []
    for hint in hints:
        try:
            return fit(hint, value, name, read)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _items(origin: Any, hints: tuple[Any, ...], values: Sequence[Any], name: str, read: Read) -> object:
    """The items of a list, each converted to its type hint."""
    if origin is not tuple or not hints or hints[-1] is ...:
        hints = (hints or (Any,))[:1] * len(values)
    if len(values) != len(hints):
        raise ValueError(f"{name.lstrip('.')}: not a list of {len(hints)} values")
    made = (fit(hint, value, name, read) for hint, value in zip(hints, values, strict=True))
    return tuple(made) if origin is tuple else list(made)


def allowed(hint: Any) -> str:
    """A type in words."""
    names: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}
    names |= {object: "any value", Any: "any value", types.NoneType: "null"}
    names |= dict.fromkeys(LISTS, "a list") | dict.fromkeys(MAPPINGS, "a mapping")
    origin, arguments = _parts(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in UNIONS:
        return " or ".join(map(allowed, arguments))
    if origin is tuple and arguments and arguments[-1] is not ...:
        return f"a list of {len(arguments)} {'numbers' if {*arguments} <= {int, float} else 'values'}"
    if origin in LISTS and arguments:
        return f"a list of {_several(arguments[0])}"
    if origin in MAPPINGS and arguments:
        return f"a mapping of names to {allowed(arguments[1])}"
    return names.get(origin, getattr(origin, "__name__", str(origin)))


def _several(hint: Any) -> str:
    """A list's item type, in words."""
    origin, arguments = _parts(hint)
    if origin is Literal:
        return f"names, of {', '.join(map(str, arguments))}"
    other = "mappings" if origin in MAPPINGS or dataclasses.is_dataclass(origin) else "values"
    return {int: "integers", float: "numbers", str: "names", Path: "paths"}.get(origin, other)


def storable(hint: Any) -> bool:
    """Whether a value of the type can be written as JSON, and what is read back fits the type again."""
    origin, arguments = _parts(hint)
    if origin is Literal:
        return all(type(one) in (str, int, bool, types.NoneType) for one in arguments)
    if origin in MAPPINGS:
        return all(map(storable, arguments)) and arguments[:1] in ((), (str,))
    if origin in (*UNIONS, *LISTS):
        return all(one is ... or storable(one) for one in arguments)
    return origin in (str, int, float, bool, types.NoneType, object, Any)


def plain(value: object) -> object:
    """A value with tuples converted to lists, as JSON and YAML have them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def finite(value: object) -> bool:
    """Whether none of the numbers in a value is infinite or NaN."""
    if isinstance(value, (Mapping, list, tuple)):
        items: Iterable[object] = value.values() if isinstance(value, Mapping) else value
        return all(map(finite, items))
    return not isinstance(value, float) or math.isfinite(value)
