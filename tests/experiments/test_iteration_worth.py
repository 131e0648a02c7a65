"""φ is found where the design resolves it, and refused where it does not."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.ladder_simulation import PHI, simulate_trips

from fathom.experiments.iteration_worth import ONE_BUDGET, worth

NOISE = (0.003, 0.003, 0.01)


@pytest.mark.parametrize("draws", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_phi_is_covered(draws: int) -> None:
    fits = [worth(simulate_trips(draw, NOISE)) for draw in range(draws)]
    covered = np.mean([fit.low <= PHI <= fit.high for fit in fits])
    assert covered >= (0.93 if draws > 100 else 0.75)
    assert np.median([(fit.high - fit.low) / 2 for fit in fits]) <= 0.08
    assert np.median([fit.value for fit in fits]) == pytest.approx(PHI, abs=0.03)
    assert {(fit.cells, fit.budgets) for fit in fits} == {(8, 2)}


@pytest.mark.parametrize("phi", [0.0, 1.0])
def test_without_noise_phi_is_the_truth(phi: float) -> None:
    assert worth(simulate_trips(0, (0.0, 0.0, 0.0), phi=phi)).value == pytest.approx(phi, abs=0.01)


def test_one_budget_is_refused() -> None:
    assert worth(simulate_trips(0, NOISE, budgets=(20.0,))).refused == ONE_BUDGET


def test_one_number_of_trips_is_refused() -> None:
    assert "nothing to compare" in str(worth(simulate_trips(0, NOISE, trips=(3,))).refused)
