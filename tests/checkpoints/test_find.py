"""The best arm of a comparison."""

from __future__ import annotations

import math

import pytest

from fathom.checkpoints.find import Gap, Scored, ScoredArm, ScoredRun


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
