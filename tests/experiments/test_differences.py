"""The verdict held against simulated experiments whose truth is known: how often it claims what is not so."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fathom.experiments.compare_results import ComparisonReport
from fathom.experiments.differences import compare_runs, share_of_gain, smoke_test, verdict
from fathom.report.results import restored

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the published simulation runs, at fewer draws."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "verdict", raising=False)
    import verdict

    return verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    "truth",
    [(0, 0, 0), pytest.param((0, -1000, -1000, 0), marks=pytest.mark.slow)],
    ids=["two arms that do nothing", "two equal arms that do much and one that does nothing"],
)
def test_false_claims_are_rare(simulation: ModuleType, truth: tuple[float, ...]) -> None:
    """In one family; two families, the control, claim too often."""
    wrong, two_families = simulation.false_claims(truth, seeds=3, draws=6000)
    assert wrong <= 0.055
    assert two_families > 0.07


def test_a_share_of_a_gain_holds_the_true_share(simulation: ModuleType) -> None:
    """Fieller's interval, an unbounded one holding everything; a share without one is a lottery."""
    found = simulation.share(gain=3, seeds=5, draws=2000)
    assert 0.94 <= found["held"] <= 0.965
    assert 0.9 < found["bounded"] < 1
    low, high = found["shares_said"]
    assert low < 0.3 and high > 0.65, "the control: what was said without an interval"


def test_a_share_is_said_with_its_interval_or_not_at_all(simulation: ModuleType) -> None:
    names = ("vanilla", "uniform_depth", "depth_attention")
    vanilla, uniform, depth = [4.0, 4.2, 4.1], [3.79, 4.0, 3.9], [3.6, 3.79, 3.7]
    arms = simulation.arms_of(np.array([vanilla, uniform, depth]), names)
    found = share_of_gain(arms, compare_runs(arms))
    assert 0.4 < found.low < found.share < found.high < 0.6
    low, high = (f"{100 * end:.0f}" for end in (found.low, found.high))
    assert f"uniform_depth has 50 % of depth_attention's gain (95 % interval {low} to {high} %)" in str(found)
    arms = simulation.arms_of(np.array([vanilla, uniform, [3.6, 4.3, 3.9]]), names)
    found = share_of_gain(arms, compare_runs(arms))
    assert (found.share, found.low, found.high) == (None, None, None)
    assert "is undefined" in str(found)


def test_the_documented_rates_are_the_simulated_ones() -> None:
    """The tables of docs/explanation/statistics.md, against the log; and what they must show."""
    results = json.loads((BENCHMARKS / "results" / "verdict.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "explanation" / "statistics.md").read_text().partition("## Ladders")[0]
    numbers = [row[key] for row in results["families"] for key in ("false_claims", "two_families")]
    numbers += [row["false_claims"] for row in results["stopping"]] + [row["coverage"] for row in results["coverage"]]
    shown = re.findall(r"(?<=\| )[\d.]+ %(?= \|)", page)
    assert len(shown) > 20 and set(shown) <= {f"{100 * number:.1f} %" for number in numbers}
    assert all(row["false_claims"] <= 0.055 for row in results["families"])
    assert any(row["two_families"] > 0.07 for row in results["families"]), "the control"
    assert all(row["coverage"] >= 0.94 for row in results["coverage"] if row["differences"] == "normal")


def test_a_smoke_test_is_called_one(tmp_path: Path) -> None:
    """The demo's gains exclude zero, and tuned comparisons find none: its verdict says which of the two to believe."""
    values = json.loads((BENCHMARKS / "results" / "demo.json").read_text())
    arms = [{**arm, "runs": [], "measured": None, "curve": {}} for arm in values["arms"]]
    report = restored(ComparisonReport, {**values, "exploratory": False, "arms": arms})
    assert smoke_test(report).startswith(
        " This is a smoke test: it trains on fewer tokens than the model has parameters"
    )
    assert verdict(report).endswith("not tuned for each arm, as `fathom ladder` tunes it.")
    control = replace(report.arms[0], tokens=report.arms[0].parameters)
    longer = replace(report, arms=[control, *report.arms[1:]])
    assert smoke_test(longer) == smoke_test(replace(report, ladder="../../report.html")) == ""
