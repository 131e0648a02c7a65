"""Results: dataclasses that are written as JSON, and read back as the same class.

A field named after a Python keyword ends with an underscore; its key does not. null stands for a number that is not
finite. Unknown keys are ignored. Computed fields are written but not read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, Union

from fathom.errors import DataError
from fathom.report.files import asdict, key_of, read_json

T = TypeVar("T")


def to_json(value: object) -> str:
    """A result as a line of JSON."""
    return json.dumps(asdict(value), ensure_ascii=False, allow_nan=False)


def read_result(kind: type[T], path: Path, remedy: str) -> T:
    """Read a result from a JSON file that `asdict` wrote; a `DataError` if the file does not hold one.

    Args:
        kind: The class of the result.
        path: The file.
        remedy: What to do about a damaged file, for the error message.
    """
    try:
        return restored(kind, read_json(path))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {remedy} ({error})") from None


def restored(kind: type[T], value: object) -> T:
    """Rebuild a value of a type from what `asdict` returned; the `ValueError` names what does not fit."""
    return typing.cast("T", _restored(kind, value, ""))


def _restored(kind: Any, value: Any, name: str) -> Any:
    """A JSON value converted to its type; `name` is its position, for errors."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return value
    if origin in (Union, types.UnionType):
        kinds = [one for one in inner if one is not types.NoneType]
        return None if value is None and len(kinds) < len(inner) else _restored(_fitting(kinds, value), value, name)
    if kind is float and value is None:
        return math.nan
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _filled(kind, value, name)
    if origin is tuple and ... not in inner:
        if isinstance(value, list) and len(value) == len(inner):
            return tuple(_restored(one, item, name) for one, item in zip(inner, value, strict=True))
    elif origin in (list, tuple, Sequence) and isinstance(value, list):
        items = [_restored(inner[0], item, name) for item in value]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _restored(inner[1], item, f"{name}.{key}") for key, item in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    holds_others = dataclasses.is_dataclass(kind) or origin not in (None, typing.Literal)
    if holds_others or not _is_a(kind, value):
        raise ValueError(f"{name.lstrip('.')}: not {getattr(kind, '__name__', kind)}")
    return value


def _filled(kind: Any, values: Mapping[str, Any], name: str) -> Any:
    """A dataclass from the values of its fields; missing ones get their defaults."""
    hints, given = _hints(kind), {}
    for field in dataclasses.fields(kind):
        key = key_of(field)
        if field.init and key in values:
            given[field.name] = _restored(hints[field.name], values[key], f"{name}.{key}")
        elif field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name}.{key} is missing".lstrip("."))
    return kind(**given)


def _fitting(kinds: Sequence[Any], value: object) -> Any:
    """The first of several types that a value may have."""
    return next((kind for kind in kinds if _is_a(kind, value)), kinds[0])


def _is_a(kind: Any, value: object) -> bool:
    """Whether a JSON value may have a type; its contents are not checked."""
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    if dataclasses.is_dataclass(kind) or origin in (dict, Mapping):
        return isinstance(value, dict)
    if origin in (list, tuple, Sequence):
        return isinstance(value, list)
    return type(value) is (str if kind is Path else kind)


def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass' fields."""
    return _evaluated(typing.cast("Hashable", kind))


@lru_cache
def _evaluated(kind: Any) -> dict[str, Any]:  # annotations are strings
    return typing.get_type_hints(kind)
