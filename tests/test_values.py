"""Values that fit type hints, whatever they come from."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Literal, NewType, Optional, Tuple  # noqa: UP035  (as other people write them)

import pytest

from fathom.models.registry import ALL
from fathom.values import allowed, finite, fit, hints_of, storable

Depth = NewType("Depth", int)
Mode = Literal["sum", "mean"]


@dataclass
class Point:
    """A class, whose instances fit."""

    x: int


GOOD = [
    (int, 3, 3),
    (Depth, 3, 3),
    (float, 3, 3),
    (str, "3", "3"),
    (bool, True, True),
    (Mode, "mean", "mean"),
    (Literal[1, "x", None], None, None),
    (Mode | None, None, None),
    (Optional[int], 2, 2),  # noqa: UP045
    (int | list[Mode], ["sum"], ["sum"]),
    (list, (1, "x"), [1, "x"]),
    (tuple, [1, "x"], (1, "x")),
    (List[int], (1, 2), [1, 2]),  # noqa: UP006
    (Tuple[int, str], [1, "x"], (1, "x")),  # noqa: UP006
    (tuple[tuple[int, ...], ...], [[1], []], ((1,), ())),
    (Sequence[float], (1, 2.5), [1, 2.5]),
    (dict[str, tuple[int, int]], {"a": [1, 2]}, {"a": (1, 2)}),
    (Mapping, {"a": 1}, {"a": 1}),
    (Any, object, object),
    (object, [1], [1]),
    (Point, Point(1), Point(1)),
]
BAD = [
    (int, True, ": not an integer"),
    (Depth, "3", ": not an integer"),
    (int, 3.0, ": not an integer"),
    (float, False, ": not a number"),
    (float, "3", ": not a number"),
    (bool, 1, ": not true or false"),
    (str, 5, ": not text"),
    (Path, "a", ": not a path"),
    (Mode, "max", ": not one of sum, mean"),
    (Literal[1, 2], True, ": not one of 1, 2"),
    (Literal[True], 1, ": not one of True"),
    (list[int], [1, "2"], ": not an integer"),
    (list[int], "12", ": not a list of integers"),
    (Sequence, "12", ": not a list"),
    (tuple[int, str], [1], ": not a list of 2 values"),
    (tuple[int, str], 1, ": not a list of 2 values"),
    (dict[str, int], {"a": {"b": 1}}, "a: not an integer"),
    (dict[str, int], [], ": not a mapping of names to an integer"),
    (list[Point], 1, ": not a list of mappings"),
    (Point, {"x": 1}, ": not Point"),
    (None.__class__, 0, ": not null"),
    (dict[str, list[int] | None], {"a": ["b"]}, "a: not an integer"),
]


@pytest.mark.parametrize(("hint", "value", "expected"), GOOD, ids=str)
def test_values_that_fit(hint: Any, value: Any, expected: Any) -> None:
    made = fit(hint, value)
    assert made == expected and type(made) is type(expected)


@pytest.mark.parametrize(("hint", "value", "says"), BAD, ids=str)
def test_values_that_do_not(hint: Any, value: Any, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        fit(hint, value)
    assert str(refused.value) == says


@pytest.mark.skipif(sys.version_info < (3, 12), reason="`type X = …` is a statement of Python 3.12")
def test_an_alias_is_what_it_stands_for() -> None:
    names: dict[str, Any] = {}
    exec("type Levels = list[int]", names)
    assert fit(names["Levels"], (1,)) == [1] and allowed(names["Levels"]) == "a list of integers"


def test_a_reader_sees_every_part_with_its_position() -> None:
    seen: list[tuple[Any, str]] = []

    def read(hint: Any, value: Any, name: str) -> Any:
        seen.append((value, name))
        return int(value) if hint is int else value

    assert fit(dict[str, list[int]], {"a": ["1", "2"]}, "top", read) == {"a": [1, 2]}
    assert seen[0][1] == "top" and ("2", "top.a") in seen


@pytest.mark.parametrize(
    ("hint", "holds"),
    [
        (int | None, True),
        (Mode, True),
        (tuple[int, ...], True),
        (list[dict[str, float]], True),
        (Any, True),
        (dict, True),
        (dict[int, float], False),
        (Path, False),
        (Point, False),
        (set, False),
        (list[set[int]], False),
        (int | complex, False),
        (Literal[b"x"], False),
    ],
    ids=str,
)
def test_what_json_can_hold(hint: Any, holds: bool) -> None:
    assert storable(hint) is holds


def test_every_option_of_ours_can_be_stored() -> None:
    assert all(storable(hint) for mechanism in ALL for hint in hints_of(mechanism.options).values())


def test_finite() -> None:
    assert finite({"a": [1, (2.5, None)], "b": "nan"})
    assert not finite([1, {"a": (math.nan,)}]) and not finite(math.inf)
