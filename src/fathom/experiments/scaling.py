"""The compute multiplier of an arm, its trend with scale, and the uncertainty of both. The model is:

    ln(L_v - E) = c - α x                                  the control along the ladder, x = ln FLOPs
    ln(L_a - E) = c - α x - u - w (x - x̄)                  an arm
    ln M(x)     = (u + w (x - x̄)) / α,     g = w / α       the control's FLOPs for the arm's loss over the arm's FLOPs

All seeds of a size share its deviation from the law, so resampling seeds does not cover it. A deviation has three
parts, each with a scale: τ_s for the part that both arms of a rung share, τ_d for an arm's own part, and τ_w for the
steps of a random walk from rung to rung, as caused by a learning rate that is scaled slightly wrong. E, τ_s, τ_d and
τ_w are integrated over a grid; given them the model is linear and its posterior has a closed form. The cross-check is a
weighted line through the horizontal distances, with Student's t.

Losses are in nats; x is the natural logarithm of training FLOPs. Results depend on the losses alone.

Loop iterations have a law of their own, with the exponent φ: `iteration_worth.py`.

`multipliers.py` writes the verdict: it decides what is significant, and which extrapolations are withheld.
`simulation.py` simulates ladders whose true M is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import optimize
from scipy.special import stdtrit

Floats = NDArray[np.float64]
ESTIMATOR = "grid-2"
"""Name of the estimator in reports and sealed predictions; a new version gets another number."""
DECADE = math.log(10.0)
FLOORS = 24
"""Grid points of E between 0 and HIGHEST times the least loss."""
HIGHEST = 0.95
SHARED = (0.0, 0.003, 0.01, 0.02, 0.04)
OWN = (0.0, 0.001, 0.002, 0.004, 0.007, 0.012, 0.02)
"""Grid points of τ_s and τ_d; those of τ_d are scaled up with their prior if pairs are noisy."""
WALK = (0.0, 0.002, 0.004, 0.007, 0.012)
"""Grid points of τ_w."""
SHARED_SCALE, OWN_SCALE, WALK_SCALE = 0.02, 0.008, 0.01
"""Scales of the half-normal priors of τ_s, τ_d and τ_w; that of τ_d is at least the noise of a paired difference."""
SHIFT_SCALE, TREND_SCALE = 0.7, 0.15
"""Prior standard deviations of ln M and of g."""
DRAWS = 4000
STEEP = 0.005
"""Draws with a slope below this are not a scaling law and are left out."""
TINY = 1e-12
"""Variance of a rounding error, in nats squared."""
NEEDED = 0.9
"""Share of draws that must remain for a result."""


@dataclass(frozen=True)
class Rung:
    """The losses of the control and of one arm at one size; losses of the same seed have the same index."""

    x_control: float
    """ln of the control's training FLOPs."""
    control: tuple[float, ...]
    """Its losses."""
    x_arm: float
    """ln of the arm's training FLOPs."""
    arm: tuple[float, ...]
    """Its losses."""

    def __post_init__(self) -> None:
        if not self.control or len(self.control) != len(self.arm):
            raise ValueError("a model size needs paired losses: equally many of arm and control, at least one")

    @property
    def seeds(self) -> int:
        """Number of pairs of runs."""
        return len(self.control)

    @property
    def means(self) -> tuple[float, float]:
        """Mean loss of the control and of the arm."""
        return float(np.mean(self.control)), float(np.mean(self.arm))


@dataclass(frozen=True)
class Noise:
    """The noise over seeds, pooled over the rungs that have several seeds."""

    single: float
    """Standard deviation of one run."""
    paired: float
    """Standard deviation of a paired difference."""

    @property
    def common(self) -> float:
        """The variance over seeds that both arms share in runs of one seed."""
        return max(self.single**2 - self.paired**2 / 2, 0.0)

    @property
    def correlation(self) -> float:
        """Correlation, over seeds, of the losses of two arms that share the seed."""
        return self.common / self.single**2 if self.single else 0.0


@dataclass(frozen=True)
class Interval:
    """A median with its 50 % and 95 % intervals."""

    median: float
    q25: float
    q75: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Floats) -> Interval:
        """The median and intervals of draws from a posterior."""
        low, q25, median, q75, high = np.quantile(draws, [0.025, 0.25, 0.5, 0.75, 0.975]).tolist()
        return cls(median, q25, q75, low, high)

    def __str__(self) -> str:
        """The median and the 95 % interval."""
        return f"{self.median:.3f} ({self.low:.3f} … {self.high:.3f})"


@dataclass(frozen=True)
class Posterior:
    """The posterior of the scaling law: draws of all its unknowns."""

    rungs: tuple[Rung, ...]
    noise: Noise
    centre: float
    """x̄."""
    floor: Floats
    intercept: Floats
    slope: Floats
    shift: Floats
    trend: Floats
    shared: Floats
    own: Floats
    walk: Floats
    kept: float
    """Share of the draws with a slope of at least STEEP."""

    @property
    def usable(self) -> bool:
        """Whether the control's losses fall with compute clearly enough for a multiplier to be defined."""
        return self.kept >= NEEDED

    def log_multiplier(self, x: float) -> Floats:
        """Draws of ln M for an arm that spends exp(x) FLOPs."""
        return (self.shift + self.trend * (x - self.centre)) / self.slope

    @cached_property
    def growth(self) -> Floats:
        """Draws of g = d ln M / d ln FLOPs."""
        return self.trend / self.slope

    def control_loss(self, x: float) -> Floats:
        """Posterior draws of the control's loss that the law gives at ln FLOPs x."""
        return self.floor + np.exp(self.intercept - self.slope * x)

    def arm_loss(self, x: float) -> Floats:
        """Posterior draws of the arm's loss that the law gives at ln FLOPs x."""
        drop = self.slope * x + self.shift + self.trend * (x - self.centre)
        return self.floor + np.exp(self.intercept - drop)

    def sides(self, x: float) -> float:
        """The two-sided posterior tail probability of M = 1 at ln FLOPs x."""
        below = float(np.mean(self.log_multiplier(x) < 0))
        return max(2 * min(below, 1 - below), 1 / len(self.slope))

    def predict(self, x_control: float, x_arm: float, seeds: int) -> tuple[Interval, Interval]:
        """Predict a further rung with `seeds` seeds: the paired difference of the loss, and ln M."""
        chance = np.random.default_rng(len(self.slope))
        reducible = self.control_loss(x_control) - self.floor
        walked, variance = self._walk_on()
        spread = np.sqrt(variance + self.own**2 + self.noise.paired**2 / seeds)
        deviation = walked + spread * chance.normal(size=len(self.slope))
        difference = self.arm_loss(x_arm) - self.control_loss(x_control) + deviation
        return Interval.of(difference), Interval.of(self.log_multiplier(x_arm) - deviation / (self.slope * reducible))

    def _walk_on(self) -> tuple[Floats, Floats]:
        """Mean and variance of the random walk at the next rung, given the deviations from the law observed at these
        rungs."""
        gaps = np.array([rung.means[1] - rung.means[0] for rung in self.rungs])
        law = [self.arm_loss(rung.x_arm) - self.control_loss(rung.x_control) for rung in self.rungs]
        steps = np.arange(1, len(gaps) + 1)
        ahead = self.walk[:, None] ** 2 * steps  # [draws, R]: covariance with the next rung
        seen = self.walk[:, None, None] ** 2 * np.minimum.outer(steps, steps)
        seeds = self.noise.paired**2 / np.array([rung.seeds for rung in self.rungs])
        seen[:, steps - 1, steps - 1] += self.own[:, None] ** 2 + seeds + TINY
        weights = np.linalg.solve(seen, ahead[:, :, None])[:, :, 0]
        walked = (weights * (gaps - np.stack(law, 1))).sum(1)
        return walked, self.walk**2 * (len(gaps) + 1) - (weights * ahead).sum(1)


def noise_of(rungs: Sequence[Rung]) -> Noise | None:
    """The noise, pooled over rungs with two seeds or more; None if there is no such rung."""
    many = [rung for rung in rungs if rung.seeds > 1]
    if not many:
        return None
    freedom = sum(rung.seeds - 1 for rung in many)
    single = sum(_squares(rung.control) + _squares(rung.arm) for rung in many) / (2 * freedom)
    paired = sum(_squares(np.subtract(rung.arm, rung.control)) for rung in many) / freedom
    return Noise(math.sqrt(single), math.sqrt(paired))


def posterior(rungs: Sequence[Rung], noise: Noise | None = None, draws: int = DRAWS) -> Posterior:
    """The posterior of the law, the multiplier and its trend, given the losses of a ladder.

    Args:
        rungs: At least two.
        noise: Noise over seeds; by default from the rungs.
        draws: Number of draws from the posterior, with a fixed seed.
    """
    rungs, noise, _, x_a = _checked(rungs, noise)
    grid = _grid(min(min(rung.means) for rung in rungs), noise)
    fit = _fitted(rungs, noise, grid)
    weight = np.exp(fit.log_weight - fit.log_weight.max()).ravel()
    chance = np.random.default_rng(0)
    scale, floor = np.divmod(chance.choice(len(weight), size=draws, p=weight / weight.sum()), FLOORS)
    sample = fit.mean[:, scale, floor] + _solved(fit.root[..., scale, floor], chance.normal(size=(draws, 4)).T)
    steep = sample[1] > STEEP
    intercept, slope, shift, trend = sample[:, steep]
    scale, floor = scale[steep], floor[steep]
    return Posterior(
        *(rungs, noise, float(x_a.mean()), grid.floor[floor], intercept, slope, shift, trend),
        *(grid.shared[scale], grid.own[scale], grid.walk[scale], float(steep.mean())),
    )


@lru_cache(maxsize=32)
def fitted(rungs: tuple[Rung, ...]) -> Posterior | None:
    """The cached posterior of a ladder's rungs; None if there are fewer than two rungs, if no rung has two seeds, or if
    the losses do not fall with compute."""
    if len(rungs) < 2 or noise_of(rungs) is None:
        return None
    found = posterior(rungs)
    return found if found.usable else None


def _checked(rungs: Sequence[Rung], noise: Noise | None) -> tuple[tuple[Rung, ...], Noise, Floats, Floats]:
    """The rungs sorted by FLOPs, their noise, and ln FLOPs of the control and of the arm."""
    noise = noise or noise_of(rungs)
    if noise is None:
        raise ValueError("no model size has two seeds: the noise between seeds is unknown")
    if len(rungs) < 2:
        raise ValueError("a slope needs two model sizes")
    rungs = tuple(sorted(rungs, key=lambda rung: (rung.x_control, rung.x_arm)))
    return rungs, noise, np.array([rung.x_control for rung in rungs]), np.array([rung.x_arm for rung in rungs])


@dataclass(frozen=True)
class _Grid:
    """The grid points of the scales (τ_s, τ_d, τ_w), S in all, and of the floor E."""

    shared: Floats
    own: Floats
    walk: Floats
    floor: Floats
    log_prior: Floats
    """The logarithm of prior times trapezoid weight: [τ_s, τ_d, τ_w, E]."""


@dataclass(frozen=True)
class _Fit:
    """The fitted linear model at every grid point of scales and floors."""

    mean: Floats
    """The posterior means of (c, α, u, w): [4, S, F]."""
    root: Floats
    """R with RᵀR the posterior's precision: [4, 4, S, F]."""
    log_weight: Floats
    """Log prior and evidence: [τ_s, τ_d, τ_w, E]."""


def _grid(least: float, noise: Noise) -> _Grid:
    """The grid of scales and of loss floors, all of which lie below the least loss."""
    stretch = max(1.0, noise.paired / OWN_SCALE)
    shared, own, walk = np.array(SHARED), np.array(OWN) * stretch, np.array(WALK)
    floors = np.linspace(0.0, HIGHEST * least, FLOORS, dtype=np.float64)
    parts = [
        _trapezoid(shared) * np.exp(-0.5 * (shared / SHARED_SCALE) ** 2),
        _trapezoid(own) * np.exp(-0.5 * (own / (stretch * OWN_SCALE)) ** 2),
        _trapezoid(walk) * np.exp(-0.5 * (walk / WALK_SCALE) ** 2),
        _trapezoid(floors),
    ]
    both, each, steps = (axis.ravel() for axis in np.meshgrid(shared, own, walk, indexing="ij"))
    return _Grid(both, each, steps, floors, np.log(np.einsum("i,j,k,l->ijkl", *parts)))


def _trapezoid(points: Floats) -> Floats:
    gaps = np.diff(points)
    return (np.append(gaps, 0.0) + np.insert(gaps, 0, 0.0)) / 2


def _fitted(rungs: tuple[Rung, ...], noise: Noise, grid: _Grid) -> _Fit:
    """Fit (c, α, u, w) at every grid point."""
    x_v, x_a = (np.array([getattr(rung, name) for rung in rungs]) for name in ("x_control", "x_arm"))
    losses = np.concatenate([[rung.means[side] for rung in rungs] for side in (0, 1)])  # [2R]
    design = _design(x_v, x_a, float(x_a.mean()))
    reducible = losses[:, None] - grid.floor  # [2R, F]
    y = np.log(reducible)
    # The covariance of ln(ℓ - E) is that of ℓ between factors 1 / (ℓ - E), so rows are weighted by ℓ - E; and the
    # Jacobian of ℓ → ln(ℓ - E) cancels its determinant.
    rows = np.concatenate([np.broadcast_to(design[:, :, None], (*design.shape, FLOORS)), y[:, None]], 1)
    root = np.linalg.cholesky(_covariance(grid, losses, [rung.seeds for rung in rungs], noise))
    rows, scales = rows * reducible[:, None], len(root)
    white = (np.linalg.inv(root).reshape(-1, len(rows)) @ rows.reshape(len(rows), -1)).reshape(scales, *rows.shape)
    mean, triangle, evidence = _linear(white.transpose(1, 2, 0, 3), _precision(y, design)[:, None])
    evidence -= np.log(np.diagonal(root, axis1=1, axis2=2)).sum(1)[:, None]
    return _Fit(mean, triangle, grid.log_prior + evidence.reshape(grid.log_prior.shape))


def _design(x_v: Floats, x_a: Floats, centre: float) -> Floats:
    """The design matrix in the coefficients (c, α, u, w), the control's rows first: [2R, 4]."""
    zero, one = np.zeros_like(x_v), np.ones_like(x_v)
    control = np.stack([one, -x_v, zero, zero], 1)
    arm = np.stack([one, -x_a, -one, -(x_a - centre)], 1)
    return np.concatenate([control, arm])


def _covariance(grid: _Grid, losses: Floats, seeds: Sequence[int], noise: Noise) -> Floats:
    """Covariance of the losses at every grid point of the scales: [S, 2R, 2R]."""
    n = np.array(seeds, float)
    size = len(n)
    common, own = noise.common / n, noise.paired**2 / (2 * n)
    both, each = common + grid.shared[:, None] ** 2, own + grid.own[:, None] ** 2  # [S, R]
    found = np.zeros((len(grid.own), 2 * size, 2 * size))
    control, arm, steps = range(size), range(size, 2 * size), np.arange(1, size + 1)
    found[:, size:, size:] = grid.walk[:, None, None] ** 2 * np.minimum.outer(steps, steps)
    found[:, control, control] = both + own
    found[:, arm, arm] += both + each
    found[:, control, arm] = found[:, arm, control] = both
    # Losses that are bitwise equal still have rounding errors.
    found[:, range(2 * size), range(2 * size)] += (1e-7 * losses) ** 2
    return found


def _precision(y: Floats, design: Floats) -> Floats:
    """Prior precisions of the coefficients at every loss floor: [4, F]. A flat one is 0."""
    slope = np.maximum(np.abs((np.linalg.pinv(design) @ y)[1]), STEEP)
    flat, one = np.zeros_like(slope), np.ones_like(slope)
    return np.stack([flat, one, (SHIFT_SCALE * slope) ** -2, (TREND_SCALE * slope) ** -2])


def _linear(white: Floats, precision: Floats) -> tuple[Floats, Floats, Floats]:
    """For linear models with white noise: the posterior mean, a root of its precision, and the log evidence.

    LAPACK would take them one by one: the loops here are over columns, and each line is for all models.

    Args:
        white: Design and, as the last column, what it explains: `[n, p + 1, ...]`.
        precision: Of independent priors around 0, `[p, ...]`.
    """
    count, places = len(precision), white.shape[2:]
    # Orthogonal columns, which are accurate where normal equations are not; the prior is a row for each coefficient.
    below, triangle = np.zeros((2, count, count + 1, *places))
    below[range(count), range(count)] = np.sqrt(precision)
    left = np.concatenate([white, below])
    for j in range(count):
        triangle[j, j] = np.sqrt((left[:, j] ** 2).sum(0))
        unit = left[:, j] / triangle[j, j]
        triangle[j, j + 1 :] = (unit[:, None] * left[:, j + 1 :]).sum(0)
        left[:, j + 1 :] -= unit[:, None] * triangle[j, j + 1 :]
    root = triangle[:, :count]
    evidence = 0.5 * np.log(precision[1:]).sum(0) - 0.5 * (left[:, count] ** 2).sum(0)
    evidence = evidence - np.log(root[range(count), range(count)]).sum(0)
    return _solved(root, triangle[:, count]), root, evidence


def _solved(root: Floats, right: Floats) -> Floats:
    """Solve root · x = right for x, with upper triangular matrices `[p, p, ...]` and vectors `[p, ...]`."""
    found = np.empty_like(right)
    for i in reversed(range(len(root))):
        found[i] = (right[i] - (root[i, i + 1 :] * found[i + 1 :]).sum(0)) / root[i, i]
    return found


@dataclass(frozen=True)
class Horizontal:
    """A weighted line through ln M of every rung, with Student's t on (rungs - 2) degrees of freedom."""

    x: Floats
    log_m: Floats
    """h_i, the ln M of each rung."""
    errors: Floats
    """Standard error of h_i from the seeds."""
    floor: float
    slope: float
    middle: float
    growth: float
    covariance: Floats
    """Covariance of (middle, growth), scaled up if the line does not fit."""
    centre: float

    @property
    def freedom(self) -> int:
        """Degrees of freedom."""
        return len(self.x) - 2

    def interval(self, x: float) -> tuple[float, float, float] | None:
        """ln M at x with the ends of its 95 % interval; None with two rungs."""
        row = np.array([1.0, x - self.centre])
        return self._student(self.middle + self.growth * (x - self.centre), row)

    def per_decade(self) -> tuple[float, float, float] | None:
        """The change of ln M per decade of FLOPs with the ends of its 95 % interval; None with two rungs."""
        return self._student(self.growth * DECADE, np.array([0.0, DECADE]))

    def _student(self, value: float, row: Floats) -> tuple[float, float, float] | None:
        if self.freedom < 1:
            return None
        half = float(stdtrit(self.freedom, 0.975)) * math.sqrt(max(float(row @ self.covariance @ row), 0.0))
        return value, value - half, value + half


def horizontal(rungs: Sequence[Rung], noise: Noise | None = None) -> Horizontal:
    """The cross-check of the posterior: a weighted line through ln M; the arguments are those of `posterior`."""
    rungs, noise, x_v, x_a = _checked(rungs, noise)
    v, a = (np.array([rung.means[side] for rung in rungs]) for side in (0, 1))
    n = np.array([rung.seeds for rung in rungs], float)
    floor = _least_squares_floor(x_v, x_a, v, a)
    slope = -float(np.polyfit(x_v, np.log(v - floor), 1, w=v - floor)[0])
    slope = math.copysign(max(abs(slope), 1e-9), slope)
    log_m = (np.log(v - floor) - np.log(a - floor)) / slope + x_v - x_a
    errors = np.maximum(noise.paired, 1e-9) / (np.sqrt(n) * abs(slope) * (v - floor))
    centre = float(x_a.mean())
    design = np.stack([np.ones_like(x_a), x_a - centre], 1)
    covariance = np.linalg.inv(design.T @ (design / errors[:, None] ** 2))
    middle, growth = covariance @ design.T @ (log_m / errors**2)
    residual = (log_m - design @ [middle, growth]) / errors
    stretch = max(1.0, float(residual @ residual) / (len(rungs) - 2)) if len(rungs) > 2 else 1.0
    return Horizontal(x_a, log_m, errors, floor, slope, float(middle), float(growth), stretch * covariance, centre)


def _least_squares_floor(x_v: Floats, x_a: Floats, v: Floats, a: Floats) -> float:
    """The loss floor E for which two lines, one for each arm, fit the losses best by least squares."""

    def left(floor: float) -> float:
        total = 0.0
        for x, loss in ((x_v, v), (x_a, a)):
            y, weight = np.log(loss - floor), loss - floor
            line = np.polyfit(x, y, 1, w=weight)
            total += float((((y - np.polyval(line, x)) * weight) ** 2).sum())
        return total

    top = HIGHEST * float(min(v.min(), a.min()))
    starts = np.linspace(0.0, top, FLOORS)
    values = [left(float(start)) for start in starts]
    best = int(np.argmin(values))
    low, high = starts[max(best - 1, 0)], starts[min(best + 1, FLOORS - 1)]
    found = optimize.minimize_scalar(left, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return float(found.x) if found.fun < values[best] else float(starts[best])


def agree(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two intervals overlap by half of the shorter one."""
    overlap = min(one[1], other[1]) - max(one[0], other[0])
    return overlap >= 0.5 * min(one[1] - one[0], other[1] - other[0])


def _squares(values: Sequence[float] | Floats) -> float:
    found = np.asarray(values, float)
    return float(((found - found.mean()) ** 2).sum())
