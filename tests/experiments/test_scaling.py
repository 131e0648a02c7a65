"""The multiplier's intervals hold a planted truth, and the usual ones do not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks import ladder_simulation
from benchmarks.ladder_simulation import usual_interval

from fathom.experiments import scaling
from fathom.experiments.scaling import DECADE, Noise, Rung, agree, fitted, horizontal, noise_of, posterior
from fathom.experiments.simulation import Truth, resolution, simulate

CASES: dict[str, tuple[Truth, float | None]] = {
    # The truth, and the half-width at the last rung that an independent simulation found, where the case is the same.
    "reference": (Truth(), 1.05),
    "growing": (Truth(growth=0.08), 1.05),
    "flat law": (Truth(floor=1.6, slope=0.09, multiplier=1.5), 1.14),
    "few seeds": (Truth(seeds=(2, 2, 1, 1)), 1.06),
    "toy": (Truth(sigma=(0.02, 0.006), shared=0.02, own=0.006), 1.14),
    "seed control": (Truth(multiplier=1.0, own=0.0), 1.03),
    "other floor": (Truth(arm_floor=1.67), None),
}
FAST, SLOW = 25, 400
EXACT = Truth(sigma=(0.0, 0.0), shared=0.0, own=0.0)
QUIET = Noise(1e-6, 1e-6)


def ends(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


@pytest.fixture
def no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimator that knows deviations of single rungs alone."""
    monkeypatch.setattr(scaling, "WALK", (0.0, 1e-9))


@pytest.mark.parametrize("draws", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_a_walk_from_rung_to_rung_is_covered(draws: int) -> None:
    truth = ladder_simulation.WALKING
    fits = [posterior(simulate(truth, draw)) for draw in range(draws)]
    found = [ends(fit.log_multiplier(float(truth.x[-1]))) for fit in fits]
    held = sum(low <= 0 <= high for low, high in found) / draws
    assert held >= (0.93 if draws == SLOW else 0.88)
    assert float(np.median([high - low for low, high in found])) / 2 < math.log(1.13)
    assert ladder_simulation.false_claims(truth, draws // 4) <= 0.06


def test_deviations_of_single_rungs_alone_call_a_walk_sure(no_walk: None) -> None:
    """The negative control: what the estimator said before it knew of walks."""
    assert ladder_simulation.false_claims(ladder_simulation.WALKING, 12) > 0.3


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        *((name, FAST) for name in ("reference", "toy")),
        *(pytest.param(name, SLOW, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_the_truth_is_covered(no_walk: None, name: str, draws: int) -> None:
    """Without a walk: M at the last rung, half a decade above, and the trend; as wide as published."""
    truth, published = CASES[name]
    top = float(truth.x[-1])
    hits, widths = np.zeros(3), []
    for draw in range(draws):
        fit = posterior(simulate(truth, draw))
        for i, (value, found) in enumerate(
            [
                (truth.log_multiplier(top), ends(fit.log_multiplier(top))),
                (truth.log_multiplier(top + DECADE / 2), ends(fit.log_multiplier(top + DECADE / 2))),
                (truth.trend, ends(fit.growth)),
            ]
        ):
            hits[i] += found[0] <= value <= found[1]
            widths += [(found[1] - found[0]) / 2] if i == 0 else []
    assert (hits / draws >= (0.93 if draws == SLOW else 0.88)).all(), hits / draws
    if published is None:
        return
    width = float(np.median(widths))
    most = 0.25 if draws == SLOW else 0.35  # of few draws the median is itself uncertain
    assert abs(width / math.log(published) - 1) <= most, width


@pytest.mark.parametrize("draws", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_resampling_seeds_does_not_cover(draws: int) -> None:
    """The negative control: separate fits and a bootstrap over seeds, on ladders that the grid covers."""
    truth = Truth()
    top, hits = float(truth.x[-1]), 0
    for draw in range(draws):
        low, high = usual_interval(simulate(truth, draw), top)
        hits += low <= truth.log_multiplier(top) <= high
    assert hits / draws < 0.7


def test_the_usual_fit_is_no_straw_man() -> None:
    """Where the law is exact and noise is of seeds alone it finds the truth: its fault is what it does not know."""
    truth = Truth(sigma=(1e-4, 1e-4), shared=0.0, own=0.0)
    low, high = usual_interval(simulate(truth, 0), float(truth.x[-1]))
    assert math.exp((low + high) / 2) == pytest.approx(1.25, abs=0.02)


def test_without_noise_the_multiplier_is_the_truth() -> None:
    fit = posterior(simulate(EXACT, 0), QUIET)
    assert np.exp(np.median(fit.log_multiplier(fit.centre))) == pytest.approx(1.25, rel=0.01)
    line = horizontal(simulate(EXACT, 0), QUIET)
    assert math.exp(line.middle) == pytest.approx(1.25, rel=0.001)
    assert line.floor == pytest.approx(1.7, abs=0.02) and line.slope == pytest.approx(0.15, abs=0.002)


def test_a_loop_pays_for_its_trips() -> None:
    """Equal loss at three times the FLOPs is a third of the compute's worth."""
    rungs = [Rung(r.x_control, r.control, r.x_control + math.log(3), r.control) for r in simulate(EXACT, 0)]
    line = horizontal(rungs, QUIET)
    assert np.exp(line.log_m) == pytest.approx([1 / 3] * 4, rel=1e-6)
    fit = posterior(rungs, QUIET)
    assert np.exp(np.median(fit.log_multiplier(fit.centre))) == pytest.approx(1 / 3, rel=0.01)


def test_a_mistuned_arm_defeats_the_interval() -> None:
    """Which is why rates are checked: the usual remedy of more seeds would not help."""
    truth = Truth(excess=(0.04, 0.08))
    top = float(truth.x[-1])
    found = [ends(posterior(simulate(truth, draw)).log_multiplier(top)) for draw in range(10)]
    assert sum(low <= truth.log_multiplier(top) <= high for low, high in found) <= 2


@pytest.mark.parametrize("far", [0.02, 30.0])
def test_far_from_the_control_is_wide_and_no_crash(far: float) -> None:
    truth = Truth(multiplier=far)
    fit = posterior(simulate(truth, 1))
    low, high = ends(fit.log_multiplier(float(truth.x[-1])))
    assert fit.usable and math.isfinite(low) and low < high
    assert horizontal(simulate(truth, 1)).interval(float(truth.x[-1])) is not None


def test_no_slope_is_no_answer() -> None:
    """Losses that do not fall with compute bear no multiplier."""
    chance = np.random.default_rng(0)
    rungs = [
        Rung(x, tuple(3 + 0.01 * chance.normal(size=3)), x, tuple(3 + 0.01 * chance.normal(size=3)))
        for x in (29.0, 30.0, 31.0)
    ]
    assert fitted(tuple(rungs)) is None


def test_a_ladder_has_a_posterior_from_two_sizes_and_a_second_seed_on() -> None:
    rungs = tuple(simulate(Truth(decades=0.5, seeds=(2, 1)), 0))
    assert fitted(rungs) is not None and fitted(rungs[:1]) is None
    assert fitted(tuple(simulate(Truth(decades=0.5, seeds=(1, 1)), 0))) is None


def test_noise_is_pooled() -> None:
    rungs = [Rung(1, (1.0, 1.2), 1, (1.1, 1.1)), Rung(2, (0.5,), 2, (0.4,)), Rung(3, (0.2, 0.4), 3, (0.1, 0.3))]
    noise = noise_of(rungs)
    assert noise is not None
    assert noise.paired == pytest.approx(math.sqrt((0.1**2 * 2 + 0.0) / 2))
    assert noise.single == pytest.approx(math.sqrt((0.02 + 0.0 + 0.02 + 0.02) / 4))
    assert noise_of(rungs[1:2]) is None
    for estimator in (posterior, horizontal):
        with pytest.raises(ValueError, match="the noise between seeds is unknown"):
            estimator(rungs[1:2] * 2)
        with pytest.raises(ValueError, match="two model sizes"):
            estimator(rungs[:1])
    with pytest.raises(ValueError, match="paired losses"):
        Rung(1, (1.0,), 1, (1.0, 2.0))


def test_any_order_gives_the_same_draws() -> None:
    rungs = simulate(Truth(), 3)
    shuffled = [
        replace(rung, control=rung.control[::-1], arm=rung.arm[::-1])
        for rung in (rungs[2], rungs[0], rungs[3], rungs[1])
    ]
    one, other = posterior(rungs), posterior(shuffled)
    assert np.allclose(one.growth, other.growth, atol=1e-9)
    again = posterior([rungs[i] for i in (2, 0, 3, 1)])
    assert (one.growth == again.growth).all() and (one.floor == again.floor).all()


def test_three_rungs_are_twice_as_wide() -> None:
    """Student's t on one degree of freedom says so loudly; two rungs have no cross-check at all."""
    three = Truth(decades=1.0, seeds=(5, 3, 3))
    line = horizontal(simulate(three, 0))
    found = line.interval(float(three.x[-1]))
    assert found is not None and line.freedom == 1 and found[2] - found[1] > 0.1
    trend = line.per_decade()
    at = [line.interval(line.centre + decades * DECADE) for decades in (-1, 0, 1)]
    below, middle, above = ((high - low) ** 2 for _, low, high in filter(None, at))
    assert trend is not None and trend[0] == pytest.approx(line.growth * DECADE)
    assert (trend[2] - trend[1]) ** 2 == pytest.approx((below + above) / 2 - middle), "variances of a line"
    two = Truth(decades=0.5, seeds=(5, 3))
    assert horizontal(simulate(two, 0)).interval(float(two.x[-1])) is None
    assert posterior(simulate(two, 0)).usable


def test_a_further_rung_is_predicted() -> None:
    """The paired difference of a fourth rung from three, over ladders: 95 % of intervals hold it."""
    truth, inside, widths = Truth(), 0, []
    for draw in range(30):
        rungs = simulate(truth, draw)
        difference, _ = posterior(rungs[:-1]).predict(rungs[-1].x_control, rungs[-1].x_arm, rungs[-1].seeds)
        observed = rungs[-1].means[1] - rungs[-1].means[0]
        inside += difference.low <= observed <= difference.high
        widths.append((difference.high - difference.low) / 2)
    assert inside >= 27 and 0.01 < np.median(widths) < 0.05


def test_agreement() -> None:
    assert agree((0.0, 1.0), (0.5, 1.5)) and not agree((0.0, 1.0), (0.6, 1.6))
    assert agree((0.0, 10.0), (4.0, 5.0))


def test_resolution_is_what_the_table_says() -> None:
    top, trend = resolution(Truth(), draws=6)
    assert 1.08 < top < 1.14 and 1.06 < trend < 1.10
    assert resolution(replace(Truth(), own=0.02), draws=6)[0] > top


def test_arms_that_are_all_the_control_make_no_sure_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `benchmarks/ladder_simulation.py` counts them; arms whose losses are lower do."""
    assert ladder_simulation.false_claims(Truth(multiplier=1.0), 4) == 0.0
    monkeypatch.setattr(ladder_simulation, "shifted", lambda rung, first: tuple(loss - 0.05 for loss in first.control))
    assert ladder_simulation.false_claims(Truth(multiplier=1.0), 2) == 1.0
