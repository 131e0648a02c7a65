"""Simulated ladders: to test that the estimator recovers the truth, and to predict the precision of a plan.

`benchmarks/ladder_simulation.py` counts how often intervals of such ladders hold the true M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fathom.experiments.scaling import DECADE, Rung, posterior


@dataclass(frozen=True)
class Truth:
    """The truth of a simulated ladder: the law, the arm's multiplier, and the noise."""

    decades: float = 1.5
    seeds: tuple[int, ...] = (5, 3, 3, 2)
    multiplier: float = 1.25
    """M at the geometric middle of the ladder."""
    growth: float = 0.0
    """g, the trend of ln M."""
    floor: float = 1.7
    arm_floor: float | None = None
    """The arm's own floor; None for the control's."""
    reducible: float = 2.6
    """Reducible loss of the control at the first rung."""
    slope: float = 0.15
    sigma: tuple[float, float] = (0.006, 0.0015)
    """Standard deviation of a run, at the first and at the last rung."""
    correlation: float = 0.5
    shared: float = 0.01
    own: float = 0.003
    walk: float = 0.0
    """Standard deviation of the step that an arm's own deviation takes from rung to rung."""
    excess: tuple[float, ...] = ()
    """Excess loss in nats of a mis-tuned arm at the last rungs, the last one last."""
    ratio: float = 1.0
    """The arm's FLOPs over the control's at the same rung."""
    start: float = 4e12
    """FLOPs of the first rung."""

    @property
    def x(self) -> np.ndarray:
        """ln FLOPs of the control."""
        return math.log(self.start) + np.linspace(0.0, self.decades * DECADE, len(self.seeds))

    @property
    def centre(self) -> float:
        """The mean of the arm's ln FLOPs over the rungs."""
        return float(self.x.mean()) + math.log(self.ratio)

    def log_multiplier(self, x: float) -> float:
        """The true ln M at an arm's ln FLOPs: how much larger the control's ln FLOPs must be for the same loss."""
        reducible = self.arm_loss(x) - self.floor
        return math.log(self.start) + math.log(self.reducible / reducible) / self.slope - x

    @property
    def trend(self) -> float:
        """The true trend d ln M / d ln FLOPs in the middle of the ladder; it is not constant if the arm has a loss
        floor of its own."""
        return (self.log_multiplier(self.centre + 0.1) - self.log_multiplier(self.centre - 0.1)) / 0.2

    def loss(self, x: float) -> float:
        """The control's law."""
        return self.floor + self.reducible * math.exp(-self.slope * (x - math.log(self.start)))

    def arm_loss(self, x: float) -> float:
        """The arm's law."""
        shift = math.log(self.multiplier) + self.growth * (x - self.centre)
        own = 0.0 if self.arm_floor is None else self.arm_floor - self.floor
        return self.loss(x + shift) + own


def simulate(truth: Truth, draw: int) -> list[Rung]:
    """One simulated ladder; `draw` is the seed."""
    chance = np.random.default_rng([draw, 20])
    excess = (0.0,) * (len(truth.seeds) - len(truth.excess)) + truth.excess
    sigmas = np.geomspace(*truth.sigma, len(truth.seeds)) if truth.sigma[0] else np.zeros(len(truth.seeds))
    rungs, walked = [], 0.0
    for x, seeds, sigma, lost in zip(truth.x.tolist(), truth.seeds, sigmas.tolist(), excess, strict=True):
        x_arm = x + math.log(truth.ratio)
        arm = truth.arm_loss(x_arm) + lost
        rung = truth.shared * chance.normal()
        own = truth.own * chance.normal()
        if truth.walk:
            walked += truth.walk * chance.normal()
            own += walked
        seed = math.sqrt(truth.correlation) * sigma * chance.normal(size=seeds)
        each = math.sqrt(1 - truth.correlation) * sigma * chance.normal(size=(2, seeds))
        control = truth.loss(x) + rung + seed + each[0]
        rungs.append(Rung(x, tuple(control.tolist()), x_arm, tuple((arm + rung + own + seed + each[1]).tolist())))
    return rungs


def resolution(truth: Truth, draws: int = 20) -> tuple[float, float]:
    """The median half-widths of 95 % intervals over simulated ladders, as factors: of the multiplier M at the last
    rung, and of its trend per decade."""
    tops, trends = [], []
    for draw in range(draws):
        found = posterior(simulate(truth, draw), draws=1000)
        low, high = np.quantile(found.log_multiplier(float(truth.x[-1])), [0.025, 0.975])
        tops.append((high - low) / 2)
        low, high = np.quantile(found.growth, [0.025, 0.975])
        trends.append((high - low) / 2 * DECADE)
    return math.exp(float(np.median(tops))), math.exp(float(np.median(trends)))
