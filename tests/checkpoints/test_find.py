"""The best arm of a comparison, and the names of models."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fathom.checkpoints.find import Gap, Scored, ScoredArm, ScoredRun, name_of


def arm(name: str, loss: float | None, mean: float | None = None) -> ScoredArm:
    """An arm with a run; `mean` is its difference to the control."""
    return ScoredArm(name, [ScoredRun(1.0, name)], loss, None if mean is None else Gap(mean))


@pytest.mark.parametrize("arms", [(arm("a", 0.0), arm("b", 0.25, 0.25)), (arm("b", 0.25), arm("a", 0.0, -0.25))])
def test_a_loss_of_nothing_is_the_lowest(arms: tuple[ScoredArm, ...]) -> None:
    """A puzzle may be solved to the last bit."""
    assert Scored(list(arms)).best().name == "a"


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    assert Scored([arm("a", 1.0), arm("b", math.nan, math.nan), arm("c", 0.5, -0.5)]).best().name == "c"
    assert Scored([arm("b", math.nan), arm("c", 0.5)]).best().name == "c"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("comparison/arms/loop/seed-1/model", "loop-seed-1"),
        ("comparison/arms/loop/seed-1", "loop-seed-1"),
        ("runs/mine/model", "mine"),
        ("runs/mine", "mine"),
        ("deep", "deep"),
    ],
)
def test_a_model_of_a_comparison_is_named_with_its_arm(place: str, name: str, tmp_path: Path) -> None:
    assert name_of(tmp_path / place) == name
