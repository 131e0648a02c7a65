"""The verdict held against simulated experiments whose truth is known: how often it claims what is not so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the published simulation runs, at fewer draws."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "verdict", raising=False)
    import verdict

    return verdict


@pytest.mark.parametrize(
    "truth",
    [(0, 0, 0), (0, -1000, -1000, 0)],
    ids=["two arms that do nothing", "two equal arms that do much and one that does nothing"],
)
def test_false_claims_are_rare(simulation: ModuleType, truth: tuple[float, ...]) -> None:
    """In one family; two families, the control, claim too often."""
    wrong, two_families = simulation.false_claims(truth, seeds=3, draws=6000)
    assert wrong <= 0.055
    assert two_families > 0.07
