"""Results travel through JSON and come back equal; damaged files cost one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from fathom.errors import DataError
from fathom.report.files import asdict
from fathom.report.results import read_result, restored, to_json


@dataclass
class Part:
    """A nested result, with a key that is a word of Python's and a computed field."""

    from_: int
    loss: float
    twice: float = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.loss


@dataclass(kw_only=True)
class Whole:
    """Every kind of field that a result has."""

    name: str
    kind: Literal["a", "b"]
    part: Part | None
    parts: list[Part]
    named: Mapping[str, Part]
    pair: tuple[float, float | None]
    many: Sequence[int]
    words: tuple[str, ...]
    open: dict[str, Any]
    either: int | list[Part]
    note: str | None = None


def whole(**changes: Any) -> Whole:
    values: dict[str, Any] = {
        **{"name": "x", "kind": "a", "part": Part(1, 0.5), "parts": [Part(2, 1.5)], "named": {"n": Part(3, 2.5)}},
        **{"pair": (1.0, None), "many": [1, 2], "words": ("a", "b"), "open": {"any": [1, "x"]}, "either": [Part(4, 1)]},
    }
    return Whole(**{**values, **changes})


@pytest.mark.parametrize("made", [whole(), whole(part=None, either=3, parts=[], note="said")])
def test_a_result_comes_back_equal(made: Whole) -> None:
    text = to_json(made)
    assert restored(Whole, json.loads(text)) == made
    assert '"from": 3' in text and '"twice": 5.0' in text and "from_" not in text


def test_null_stands_for_what_is_no_number() -> None:
    text = to_json({"a": [np.float32(0.5), np.int64(3)], "b": (math.nan, -math.inf), "c": Part(1, math.nan)})
    assert json.loads(text) == {"a": [0.5, 3], "b": [None, None], "c": {"from": 1, "loss": None, "twice": None}}
    assert math.isnan(restored(Part, json.loads(text)["c"]).loss)


def test_a_missing_key_has_the_default_and_another_key_is_passed_over() -> None:
    values = asdict(whole())
    del values["note"]
    assert restored(Whole, {**values, "more": 1}) == whole()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "name: not text"),
        ({"kind": "c"}, "kind: not one of a, b"),
        ({"part": {"from": 1}}, "part.loss is missing"),
        ({"parts": [{"from": "1", "loss": 1}]}, "parts.from: not an integer"),
        ({"named": {"n": []}}, "named.n: not Part"),
        ({"pair": [1.0]}, "pair: not a list of 2"),
        ({"many": [True]}, "many: not an integer"),
        ({"words": "ab"}, "words: not a list of names"),
    ],
)
def test_a_damaged_file_costs_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**asdict(whole()), **change}))
    with pytest.raises(DataError, match="is damaged") as caught:
        read_result(Whole, path, remedy="delete it")
    assert f": delete it ({words}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_no_result_at_all(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(DataError, match="is damaged"):
        read_result(Whole, tmp_path / "result.json", remedy="delete it")
