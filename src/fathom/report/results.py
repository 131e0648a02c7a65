"""Results: dataclasses that are written as JSON, and read back as the same class.

A field named after a Python keyword ends with an underscore; its key does not. null stands for a number that is not
finite. Unknown keys are ignored. Computed fields are written but not read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fathom.errors import DataError
from fathom.report.files import asdict, key_of, read_json
from fathom.values import fit, hints_of

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
    """Rebuild a value of the given type from what `asdict` returned; if it does not fit, a `ValueError` names the
    field."""
    return typing.cast("T", fit(kind, value, read=_read))


def _read(kind: Any, value: Any, name: str) -> Any:
    """Restore a value for which JSON uses another type: a number that is not finite, a path, or a dataclass."""
    if kind is float and value is None:
        return math.nan
    if kind is Path and isinstance(value, str):
        return Path(value)
    return _filled(kind, value, name) if dataclasses.is_dataclass(kind) and isinstance(value, dict) else value


def _filled(kind: Any, values: Mapping[str, Any], name: str) -> Any:
    """Build a dataclass from a mapping of field values; missing fields get their defaults."""
    hints, given = hints_of(kind), {}
    for field in dataclasses.fields(kind):
        key = key_of(field)
        if field.init and key in values:
            given[field.name] = fit(hints[field.name], values[key], f"{name}.{key}", _read)
        elif field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name}.{key} is missing".lstrip("."))
    return kind(**given)
