"""Shares, epochs and caps, by the published numbers, and the order of rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fathom.corpus.budget import plan_budget
from fathom.corpus.publish import ORDERS, _publish_mixture
from fathom.data.mixture import row_order, whole_weights
from fathom.errors import DataError

PUBLISHED = {"geo": 52_721_798_004, "arxiv": 13_704_981_558, "code": 12_424_652_670}
SHARES = {"geo": 0.8, "arxiv": 0.1, "code": 0.1}


def test_published_numbers() -> None:
    budget = plan_budget(PUBLISHED, SHARES, 61_440_000_000, 4)
    assert {name: round(value, 2) for name, value in budget.epochs.items()} == {
        "geo": 0.93,
        "arxiv": 0.45,
        "code": 0.49,
    }
    assert round(budget.largest / 1e9, 1) == 263.6 and budget.limited_by == "geo"
    assert plan_budget(PUBLISHED, SHARES, 263_600_000_000, 4).tokens == 263_600_000_000
    with pytest.raises(
        DataError, match=r"geo has 52,721,798,004 tokens and would be read 4\.01 times.*263,608,990,020"
    ):
        plan_budget(PUBLISHED, SHARES, 264_000_000_000, 4)


def test_without_shares_or_budget() -> None:
    budget = plan_budget({"a": 3000, "b": 1000, "none": 0}, {}, None, 4)
    assert budget.weights == {"a": 3, "b": 1} and budget.tokens == 4000
    assert budget.epochs == {"a": 1.0, "b": 1.0}
    with pytest.raises(DataError, match=r"mix\.shares\.b: this collection has no training tokens left") as raised:
        plan_budget({"a": 10, "b": 0}, {"a": 0.5, "b": 0.5}, None, 4)
    assert raised.value.exit_code == 2


def test_a_small_collection_does_not_limit_a_mixture_in_proportion_to_sizes() -> None:
    sizes = {"large": 1_000_000_000, "small": 30_000}
    budget = plan_budget(sizes, {}, None, 4)
    assert budget.epochs == pytest.approx(dict.fromkeys(sizes, 1.0), rel=0.05)
    assert plan_budget(sizes, {}, 3_000_000_000, 4).tokens == 3_000_000_000
    assert plan_budget(sizes, {"large": 0.999, "small": 0.001}, None, 4).weights == {"large": 999, "small": 1}


@pytest.mark.parametrize("count", [256, 300])
def test_the_order_of_rows_is_written_in_as_few_bytes_as_hold_it(count: int, tmp_path: Path) -> None:
    budget = plan_budget({f"c{number}": 100 for number in range(count)}, {}, None, 4)
    workspace: Any = SimpleNamespace(directory=tmp_path, recipe=SimpleNamespace(mix=SimpleNamespace(block=10)))
    for name in ORDERS.values():
        (tmp_path / name).write_bytes(b"of an earlier recipe")
    _publish_mixture(workspace, budget)
    [written] = tmp_path.glob("mixture.u*")
    assert written.name == ("mixture.u8" if count == 256 else "mixture.u16")
    order = np.fromfile(written, {"mixture.u8": "u1", "mixture.u16": "<u2"}[written.name])
    assert order.tolist() == list(range(count))


def test_shares_to_four_digits() -> None:
    assert whole_weights([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_weights([1.0, 1e-9]) == [10_000, 1]
    with pytest.raises(ValueError, match="weights must be positive"):
        row_order([1, 0], 3)
